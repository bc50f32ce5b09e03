// Watches the operators of this thread, for the .cpp files only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace at {
struct RecordFunction;
}

namespace memfit {

// Told of what a watch sees, on the watching thread. Exceptions end in `failure`.
struct Watcher {
  virtual ~Watcher() = default;
  // An operator is about to read a registered tensor that requires no gradient.
  virtual void reads_frozen(const at::Tensor &) {}
  // What was packed into a slot has its final bytes now.
  virtual void is_final(uint32_t, const at::Tensor &) {}
};

// Sees each operator that this thread calls, for the life of the object. Watches nest and end
// on their thread, in reverse order.
class Watch {
 public:
  struct Sees {
    bool frozen_reads = false;  // tell of them
    bool undo = false;          // put back what operators do to running statistics
  };
  Watch(Watcher &watcher, Sees sees);
  ~Watch();
  Watch(const Watch &) = delete;
  Watch &operator=(const Watch &) = delete;

  // Tells is_final once the operator that runs now has returned.
  void when_final(uint32_t slot, const at::Tensor &tensor);
  // A tensor was packed that the running operator might fill later.
  void mark_questionable() { questionable_ = true; }
  // Whether it will: the operator has not called another yet, so its kernel may still be to
  // come, and its schema says that it writes into an argument.
  bool unfinished() const;
  // The first failure inside a callback; libtorch would swallow it there.
  const std::string &failure() const { return failure_; }

 private:
  friend struct WatchCallbacks;
  struct Pending {
    uint32_t slot;
    uint32_t depth;
    at::Tensor tensor;
  };
  void enter(const at::RecordFunction &fn) noexcept;
  void leave() noexcept;
  void tell_final(uint32_t depth) noexcept;

  Watcher &watcher_;
  Sees sees_;
  Watch *outer_;
  uint64_t handle_ = 0;
  uint32_t depth_ = 0;
  bool questionable_ = false;
  // The running operator, until it calls another.
  const at::RecordFunction *just_entered_ = nullptr;
  std::vector<Pending> pending_;
  std::string failure_;
};

}  // namespace memfit
