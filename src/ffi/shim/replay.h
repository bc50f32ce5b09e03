// Thread state that a recompute sets as forward had it, for the .cpp files only.
#pragma once

#include <ATen/core/Tensor.h>
#include <utility>
#include <vector>

#include "memfit.h"

namespace memfit {

// The default generators of the CPU and of some accelerators.
class Generators {
 public:
  // Captures the CPU's and those of the inputs' devices; throws Uncaptured.
  explicit Generators(const std::vector<int> &devices);
  ~Generators() { mf_rng_free(cpu_); }
  Generators(const Generators &) = delete;
  Generators &operator=(const Generators &) = delete;

  bool moved() const;
  void restore() const;
  std::vector<int> devices() const;

 private:
  mf_rng cpu_;
  std::vector<std::pair<int, at::Tensor>> devices_;
};

// Generators as they were at a capture, for the life of the object; then as they were before.
class ReplayGenerators {
 public:
  explicit ReplayGenerators(const Generators &captured) : before_(captured.devices()) {
    captured.restore();
  }
  ~ReplayGenerators() {
    try {
      before_.restore();
    } catch (...) {
      // A device that fails here fails its next operator, too; a throw would end the process
      // where a mismatch is on its way out.
    }
  }

 private:
  Generators before_;
};

// A device's generator cannot be read.
struct Uncaptured : std::exception {
  const char *what() const noexcept override { return "memfit: a device's generator cannot be captured"; }
};

struct Autocast {
  mf_autocast cpu, accelerator;
  static Autocast now();
  bool any() const { return cpu.enabled || accelerator.enabled; }
};

// Autocast as captured, for the life of the object.
class ReplayAutocast {
 public:
  explicit ReplayAutocast(const Autocast &captured);
  ~ReplayAutocast();
  ReplayAutocast(const ReplayAutocast &) = delete;
  ReplayAutocast &operator=(const ReplayAutocast &) = delete;

 private:
  bool entered_ = false;
  Autocast former_;
};

// TorchScript's executor rewrites a graph after its first calls, and what it saves with it:
// off, every call saves the same.
class PlainTorchScript {
 public:
  PlainTorchScript();
  ~PlainTorchScript();
  PlainTorchScript(const PlainTorchScript &) = delete;
  PlainTorchScript &operator=(const PlainTorchScript &) = delete;

 private:
  bool before_;
};

}  // namespace memfit
