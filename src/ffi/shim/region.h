// Recompute regions, for the .cpp files only. src/checkpoint/mod.rs tells the rules.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checksum.h"
#include "memfit.h"
#include "operators.h"
#include "replay.h"
#include "saved.h"

namespace memfit {

class Collector;

// What forward saved and dropped.
struct Slot {
  explicit Slot(const at::Tensor &tensor)
      : sizes(tensor.sizes()), dtype(tensor.scalar_type()), device(tensor.device()) {}
  bool fits(const at::Tensor &tensor) const {
    return tensor.sizes() == c10::IntArrayRef(sizes) && tensor.scalar_type() == dtype &&
        tensor.device() == device;
  }
  c10::DimVector sizes;
  at::ScalarType dtype;
  at::Device device;
  Checksum checksum;
};

// A tensor that the segment read and that must not change before its recompute.
struct Read {
  c10::VariableVersion version;
  uint32_t expected;
  bool registered;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
};

// One forward pass of a segment: the inputs, and how to compute the rest again. Owned by the
// hooks of the saved variables that it replaces, so it goes when the last of them goes.
class Region final : public Link {
 public:
  struct Input {
    Saved saved;
    bool requires_grad;
  };

  Region(mf_closure recompute, const mf_region_options &options);

  Kind kind() const override { return Kind::Region; }
  bool take(const at::Tensor &tensor, Saved &into) override;
  // Gives each tensor once per backward and recomputes where it has none to give.
  at::Tensor unpack(uint32_t slot) override;

  // Remembers the tensor's version.
  void note(const at::Tensor &tensor, bool registered);
  // Remembers the versions of the leaves that a forward pass, which began with node number
  // `first`, has read.
  void note_leaves(
      const mf_tensor *outputs, size_t count, uint64_t first, const std::vector<const void *> &boundary);
  // The generators are needed only where forward has moved them; registered buffers that it
  // changed are not read only.
  void settle();

  void release_resources() override;

 private:
  friend class Collector;
  friend struct ::mf_forward_;
  friend int ::mf_region_begin(
      const mf_tensor *, size_t, mf_closure, const mf_region_options *, mf_forward *) noexcept;
  friend int ::mf_region_end(mf_forward, const mf_tensor *, size_t) noexcept;

  void recompute(int task);
  void check_reads() const;
  std::vector<at::Tensor> unpack_inputs() const;
  void forget_after(int task);
  [[noreturn]] void mismatch(const std::string &what) const;

  std::optional<Closure> recompute_;
  std::string name_;
  bool checked_;
  bool early_stop_;
  std::vector<Input> inputs_;
  std::vector<Slot> slots_;
  std::vector<Read> reads_;
  std::unique_ptr<Generators> generators_;
  Autocast autocast_;

  // Of the forward pass in progress.
  mf_forward_ *forward_ = nullptr;
  c10::intrusive_ptr<Collector> enclosing_;

  // Of the backward in progress; a graph may be used by several threads.
  std::recursive_mutex mutex_;
  bool busy_ = false;
  int task_ = -2;
  std::vector<Saved> values_;
};

// The innermost link while a region is recomputed: takes what forward dropped, in its order.
class Collector final : public Link, public Watcher {
 public:
  Collector(Region &region, const std::vector<at::Tensor> &inputs);

  Kind kind() const override { return Kind::Collect; }
  bool take(const at::Tensor &tensor, Saved &into) override;
  // Takes the next tensor, as `value`. Throws where it is the last one needed.
  void collect(const at::Tensor &tensor, Saved value);
  void is_final(uint32_t slot, const at::Tensor &tensor) override;
  // Throws where what was collected is not what forward saved.
  void check() const;

  Watch *watch = nullptr;
  bool stopped = false;
  std::string problem;

 private:
  bool is_input(const at::Tensor &tensor) const;

  Region &region_;
  size_t total_;
  size_t next_ = 0;
  // The forward pass is not over: it may pack more than there was when backward began.
  bool partial_;
  std::vector<const void *> inputs_;
  std::vector<Checksum> checksums_;
};

// Where a segment's forward pass is held together.
const void *storage_of(const at::Tensor &tensor);

}  // namespace memfit

struct mf_forward_ final : memfit::Watcher {
  mf_forward_(c10::intrusive_ptr<memfit::Region> region, const mf_tensor *inputs, size_t count);
  ~mf_forward_() override;

  void reads_frozen(const at::Tensor &tensor) override { region->note(tensor, true); }
  void is_final(uint32_t slot, const at::Tensor &tensor) override;
  bool is_input(const at::Tensor &tensor) const;

  c10::intrusive_ptr<memfit::Region> region;
  std::vector<const void *> storages;  // of the inputs, which the caller keeps alive
  std::vector<const void *> boundary;  // the nodes that made the inputs
  uint64_t first_node;
  memfit::PlainTorchScript plain;
  std::optional<memfit::Place> place;
  std::optional<memfit::Watch> watch;
};
