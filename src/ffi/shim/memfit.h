// The contract between memfit's Rust and libtorch's C++. docs/ffi.md explains it.
//
// Every function is `extern "C"` and noexcept. One that can fail returns 0, or 1 with a text
// in mf_last_error() (thread-local, borrowed until the next failure on that thread).
// Pointers are *borrowed* for the call unless marked *given* (the callee frees it) or
// *owned* (the caller frees it). A function runs on the calling thread unless it says so.
#pragma once

#include <ATen/core/Tensor.h>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

typedef at::Tensor *mf_tensor;  // the same handle as torch-sys' C_tensor
typedef void *mf_closure;       // a Rust closure; freed by mf_drop_closure

extern "C" {

// ---- errors and closures (support.cpp) ---------------------------------------------------
const char *mf_last_error() noexcept;

// What a closure gets and gives. Fields are null where a call has no use for them.
struct mf_args {
  mf_tensor in;        // borrowed
  mf_tensor out;       // owned by the receiver, set by the closure
  mf_closure closure;  // given to the receiver, set by the closure
  int64_t number;      // either way
};

// Implemented in Rust (callback.rs). Calls the closure on this thread, catching panics:
// 0, or the number of a parked error.
uint64_t mf_call(mf_closure closure, mf_args *args) noexcept;
// Implemented in Rust (callback.rs). Frees a closure; runs on the thread that drops it last.
void mf_drop_closure(mf_closure closure) noexcept;

// ---- tensors (tensor.cpp) ----------------------------------------------------------------
// The address of the TensorImpl: equal for handles of one tensor, while one is alive.
size_t mf_tensor_identity(mf_tensor tensor) noexcept;
// The address of the StorageImpl, 0 where there is none: equal for all views.
size_t mf_storage_identity(mf_tensor tensor) noexcept;
// The version counter; 0 for inference tensors.
uint64_t mf_tensor_version(mf_tensor tensor) noexcept;
int mf_tensor_bump_version(mf_tensor tensor) noexcept;

// ---- gradients (grad.cpp) ----------------------------------------------------------------
// The gradient, owned, or null.
mf_tensor mf_grad_get(mf_tensor tensor) noexcept;
// As mf_grad_get, and leaves none.
mf_tensor mf_grad_take(mf_tensor tensor) noexcept;
// Sets the gradient: the handle is shared, not copied. Shape, dtype and device must match.
int mf_grad_set(mf_tensor tensor, mf_tensor grad) noexcept;
// Backward from a one-element root, seeded with `seed` in its dtype; accumulates into leaves.
// Runs the graph of CPU nodes on this thread, of each accelerator on the engine's threads.
int mf_backward(mf_tensor root, double seed, int keep_graph, int create_graph) noexcept;

// ---- storages whose bytes leave and return (storage.cpp) -----------------------------------
// A storage held weakly: its bytes may die, its address is not reused. Owned.
struct mf_weak_storage;
// A tensor's version counter, held without its bytes. Owned.
struct mf_version;

// A c10::ScalarType.
int mf_tensor_dtype(mf_tensor tensor) noexcept;
// Bytes of the whole storage, there or away; 0 without a storage.
uint64_t mf_storage_nbytes(mf_tensor tensor) noexcept;
// Owned, freed by mf_storage_unwatch; null without a storage. Any thread.
mf_weak_storage *mf_storage_watch(mf_tensor tensor) noexcept;
int mf_storage_alive(const mf_weak_storage *watch) noexcept;
void mf_storage_unwatch(mf_weak_storage *watch) noexcept;  // given
// *base, owned: all bytes of the storage as 1-d uint8, with a version counter of its own.
int mf_storage_base(mf_tensor tensor, mf_tensor *base) noexcept;
// *view, owned: a tensor over base's storage; offset, sizes and strides in elements, checked
// against the storage. dtype is a c10::ScalarType.
int mf_storage_view(
    mf_tensor base, int dtype, int64_t offset, const int64_t *sizes, const int64_t *strides,
    size_t dims, mf_tensor *view) noexcept;
// The bytes leave: *bytes, owned, is a uint8 tensor that has them now; reading the storage
// fails with `message` (copied) until mf_storage_give. Identity, device, size, views and
// version stay. No other thread may use the storage meanwhile.
int mf_storage_take(mf_tensor tensor, const char *message, mf_tensor *bytes) noexcept;
// Bytes return: moved out of `bytes`, which must own them alone and is empty afterwards.
int mf_storage_give(mf_tensor tensor, mf_tensor bytes) noexcept;
int mf_storage_away(mf_tensor tensor) noexcept;
// First byte of a CPU tensor's storage, borrowed from it; null on another device or while away.
void *mf_storage_data(mf_tensor base) noexcept;

// Owned, freed by mf_version_unwatch; null for inference tensors. Any thread.
mf_version *mf_version_watch(mf_tensor tensor) noexcept;
uint64_t mf_version_now(const mf_version *watch) noexcept;
void mf_version_unwatch(mf_version *watch) noexcept;  // given
// Changes with every autograd node made on this thread: tells one operator from the next.
uint64_t mf_operator_number() noexcept;

// ---- gradient hooks (hooks.cpp) ------------------------------------------------------------
// Calls the closure, given, each time the gradient of a leaf is final in a backward; runs on
// the thread that accumulates it (this one for CPU). *hook, owned, freed by mf_hook_drop.
struct mf_hook;
int mf_hook_on_gradient(mf_tensor leaf, mf_closure closure, mf_hook **hook) noexcept;
// Calls the closure, given, before the node that made a tensor runs backward, when the
// gradient of the tensor is complete. It lives as long as the graph.
int mf_hook_before_backward(mf_tensor tensor, mf_closure closure) noexcept;
// Within a backward: calls the closure, given, once when that backward ends, not where it fails.
int mf_hook_after_backward(mf_closure closure) noexcept;
void mf_hook_drop(mf_hook *hook) noexcept;  // given; never waits for a running closure

}  // extern "C"

// ---- for the .cpp files only -------------------------------------------------------------
namespace memfit {

// A failed closure on its way through C++: its text carries the parked error's number.
struct CallbackError : std::exception {
  explicit CallbackError(uint64_t parked) : text("memfit error #" + std::to_string(parked)) {}
  const char *what() const noexcept override { return text.c_str(); }
  std::string text;
};

// Owns a Rust closure.
class Closure {
 public:
  explicit Closure(mf_closure given) : closure_(given) {}
  Closure(Closure &&other) noexcept : closure_(other.closure_) { other.closure_ = nullptr; }
  Closure(const Closure &) = delete;
  Closure &operator=(const Closure &) = delete;
  Closure &operator=(Closure &&) = delete;
  ~Closure() {
    if (closure_) mf_drop_closure(closure_);
  }
  // Throws CallbackError.
  void call(mf_args &args) const {
    if (uint64_t parked = mf_call(closure_, &args)) throw CallbackError(parked);
  }

 private:
  mf_closure closure_;
};

void set_last_error(const char *text) noexcept;

// Runs `body`, turning every exception into the status and text of the contract.
template <class Body>
int guarded(Body &&body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception &error) {
    set_last_error(error.what());
  } catch (...) {
    set_last_error("unknown C++ exception");
  }
  return 1;
}

}  // namespace memfit
