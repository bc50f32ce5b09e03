// The contract between memfit's Rust and libtorch's C++. docs/ffi.md explains it.
//
// Every function is `extern "C"` and noexcept. One that can fail returns 0, or 1 with a text
// in mf_last_error() (thread-local, borrowed until the next failure on that thread).
// Pointers are *borrowed* for the call unless marked *given* (the callee frees it) or
// *owned* (the caller frees it). A function runs on the calling thread unless it says so.
//
// With MEMFIT_ALLOCATOR_ALONE only the allocator's section is left, so that allocator.cpp
// builds as a library of its own, for other programs to count by.
#pragma once

#ifndef MEMFIT_ALLOCATOR_ALONE
#include <ATen/core/Tensor.h>
#endif
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

extern "C" {

// ---- CPU allocator (allocator.cpp) -------------------------------------------------------
// Counts every byte that libtorch asks of its CPU allocator, from before main on. Sizes are
// those asked for, without the 64 bytes that head each block. All functions may run on any
// thread at any time.
struct mf_cpu_stats {
  uint64_t current;      // live bytes
  uint64_t peak;         // highest `current` since the start or mf_cpu_reset_peak
  uint64_t allocated;    // bytes ever allocated
  uint64_t freed;        // bytes ever freed
  uint64_t allocations;  // blocks ever allocated
  uint64_t frees;        // blocks ever freed
  uint64_t failures;     // requests refused, by the limit or by the system
  uint64_t limit;        // UINT64_MAX: none
};
// 1 where libtorch's CPU allocator is the counting one.
int mf_cpu_counted() noexcept;
void mf_cpu_read(mf_cpu_stats *out) noexcept;
void mf_cpu_reset_peak() noexcept;
// Live bytes never exceed the limit from now on: a request that would throws
// c10::OutOfMemoryError, "memfit: out of memory: requested=N live=N limit=N device=cpu".
void mf_cpu_set_limit(uint64_t bytes) noexcept;
// Refuses the n-th request from now (1: the next one), once. 0 calls it off.
void mf_cpu_fail_at(uint64_t n) noexcept;
// A mark that remembers the highest live bytes since it was opened; any number of the 64 may
// be open at once. -1 where none is free.
int mf_watermark_open() noexcept;
uint64_t mf_watermark_peak(int mark) noexcept;
void mf_watermark_close(int mark) noexcept;

}  // extern "C"

#ifndef MEMFIT_ALLOCATOR_ALONE

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
  mf_tensor *inputs;   // borrowed: `count` handles, undefined ones among them
  size_t count;
};

// Implemented in Rust (callback.rs). Calls the closure on this thread, catching panics:
// 0, or the number of a parked error.
uint64_t mf_call(mf_closure closure, mf_args *args) noexcept;
// Implemented in Rust (callback.rs). Writes a parked error's text, cut to fit, with a NUL.
void mf_parked_text(uint64_t parked, char *buffer, size_t capacity) noexcept;
// Implemented in Rust (callback.rs). Frees a closure; runs on the thread that drops it last.
void mf_drop_closure(mf_closure closure) noexcept;

// ---- timeline and census (timeline.cpp) --------------------------------------------------
// What the counting allocator did, event by event, in a ring of fixed size outside it, and the
// list of blocks that are still alive. While either is open, the CPU's allocations take turns.
// All functions may run on any thread.
struct mf_memory_event {
  uint64_t block;  // its number; 0 for a refusal and a mark
  uint64_t bytes;
  uint64_t live;         // live bytes after it
  uint64_t ticks;        // see mf_timeline_scale
  // kind 0-2 (0 taken, 1 given back, 2 refused, 3 the phase changed), phase 3-5, role 6-9 (0:
  // none said), 10: not on the thread that set the phase, segment 16-31, step 32-63.
  uint64_t word;
};
struct mf_timeline_now {
  uint64_t next, oldest;  // numbers of events: the next one, the oldest in the ring
  uint64_t live;
  uint64_t ticks;
  uint64_t word;  // the phase's
  uint64_t gone;  // followed blocks that were freed while anybody watched
};
struct mf_block {
  uint64_t number;  // 0 where the counting allocator has not made it
  uint64_t bytes;
};
// What is known of a tensor that is asked for again and again; all 0 before the first time.
struct mf_followed {
  uint64_t storage;  // the address of the StorageImpl that the block was found by
  mf_block block;
};
// Opens the ring, for `capacity` events (above 0); nothing where it is open. 1: no memory.
int mf_timeline_open(size_t capacity) noexcept;
void mf_timeline_close() noexcept;
// Whether a timeline or a census is open.
int mf_timeline_on() noexcept;
// Nanoseconds of a tick, from the time since the first timeline was opened.
double mf_timeline_scale() noexcept;
void mf_timeline_read_now(mf_timeline_now *out) noexcept;
// Copies up to `count` events from number `from` on and returns how many; 0 where that one is
// not in the ring.
size_t mf_timeline_read(uint64_t from, mf_memory_event *out, size_t count) noexcept;
// The process-wide phase word.
uint64_t mf_phase_get() noexcept;
// Sets the masked bits of that word and returns the former word. Where the phase is among them,
// the calling thread is from then on the one that trains.
uint64_t mf_phase_set(uint64_t mask, uint64_t value) noexcept;
// Sets the role of what this thread allocates, 0 for none, and returns the former one.
int mf_role_set(int role) noexcept;
// While any census is open, blocks that are made enter the list, and leave it when freed.
void mf_census_open() noexcept;
void mf_census_close() noexcept;
// Copies up to `count` listed blocks, newest first (block, bytes, word), returns how many there
// are.
size_t mf_census_read(mf_memory_event *out, size_t count) noexcept;
// The blocks of `count` tensors, or of their gradients.
void mf_blocks_of(const mf_tensor *tensors, size_t count, int gradients, mf_block *out) noexcept;
// Brings `known`, of `count` tensors, up to date, and follows their blocks: `gone` counts those
// that are freed. Looks a block up only where the storage is another one or has none, or
// everywhere with `all`, which is right where `gone` has moved. 1 where anything was another.
int mf_blocks_follow(
    const mf_tensor *tensors, size_t count, int all, mf_followed *known) noexcept;

// ---- profiler (profiler.cpp) ---------------------------------------------------------------
// libtorch's own profiler, Kineto, around what one thread does, backward's threads included.
// One profile at a time in the process: its owner sees to that.
struct mf_profile;
struct mf_profiled {
  uint32_t name;         // index into the names
  uint32_t kind;         // 0 an operator, 1 an allocation or a free, 2 work of an accelerator
  uint64_t thread;
  uint64_t start;        // nanoseconds
  uint64_t length;       // nanoseconds
  int64_t bytes;         // of kind 1, negative for a free
  uint64_t correlation;  // of kind 0 its own, of kind 2 its operator's
  uint32_t on_device;    // of kind 1: 1 where the memory is an accelerator's
  uint32_t crosses;      // of kind 0: 1 where it ends on another thread
};
// Starts on this thread. `shapes`: of operators' inputs, for the trace. While it runs, the
// counting allocator reports the CPU's memory: sizes as asked for, frees of older blocks too.
int mf_profiler_start(int shapes, int memory) noexcept;
// Ends it, on the thread that started. *out, owned, freed by mf_profile_drop.
int mf_profiler_stop(mf_profile **out) noexcept;
// Both are borrowed from the profile; `names` has NUL-ended texts.
const mf_profiled *mf_profile_events(const mf_profile *profile, size_t *count) noexcept;
const char *const *mf_profile_names(const mf_profile *profile, size_t *count) noexcept;
// Frees what the two above have lent.
void mf_profile_trim(mf_profile *profile) noexcept;
// Writes the Chrome trace, once; the path is copied. A file that cannot be written is no
// error here: look at it. On any one thread.
int mf_profile_save(mf_profile *profile, const char *path) noexcept;
void mf_profile_drop(mf_profile *profile) noexcept;  // given; any thread

// ---- tensors (tensor.cpp) ----------------------------------------------------------------
// The address of the TensorImpl: equal for handles of one tensor, while one is alive.
size_t mf_tensor_identity(mf_tensor tensor) noexcept;
// The address of the StorageImpl, 0 where there is none: equal for all views.
size_t mf_storage_identity(mf_tensor tensor) noexcept;
// The version counter; 0 for inference tensors.
uint64_t mf_tensor_version(mf_tensor tensor) noexcept;
// Counts a change in place that was made below libtorch. Nothing for an inference tensor.
void mf_tensor_bump(mf_tensor tensor) noexcept;
// Puts bytes back that the tensor held before: writes `bytes` into it and bumps nothing.
int mf_tensor_put_back(mf_tensor tensor, mf_tensor bytes) noexcept;

// ---- gradients (grad.cpp) ----------------------------------------------------------------
// The gradient, owned, or null.
mf_tensor mf_grad_get(mf_tensor tensor) noexcept;
// As mf_grad_get, and leaves none.
mf_tensor mf_grad_take(mf_tensor tensor) noexcept;
// Leaves none of `count` tensors a gradient.
void mf_grads_drop(const mf_tensor *tensors, size_t count) noexcept;
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

// From now on libtorch's loops that this thread begins stay on it; other threads' are as before.
void mf_threads_alone() noexcept;

// A c10::ScalarType.
int mf_tensor_dtype(mf_tensor tensor) noexcept;
// Bytes of the whole storage, there or away; 0 without a storage.
uint64_t mf_storage_nbytes(mf_tensor tensor) noexcept;
// Owned, freed by mf_storage_unwatch; null without a storage. Any thread.
mf_weak_storage *mf_storage_watch(mf_tensor tensor) noexcept;
void mf_storage_unwatch(mf_weak_storage *watch) noexcept;  // given
// Tensors, views and graphs that hold the storage now. What those that let go of it wrote and read
// comes before this. Any thread.
size_t mf_storage_holders(mf_tensor tensor) noexcept;
// *tensor, owned: contiguous, over memory of the caller's. `release(context)` is called once, on
// whichever thread drops the last holder, and at once where this fails.
int mf_storage_over(
    void *data, int dtype, const int64_t *sizes, size_t dims, void *context, void (*release)(void *),
    mf_tensor *tensor) noexcept;
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
// ---- saved tensors (saved.cpp, registry.cpp) -----------------------------------------------
// Implemented in Rust (saved.rs). Parks an Error::Modified and returns its number; `what` is
// borrowed. Runs on the thread that unpacks.
uint64_t mf_park_modified(const char *what, uint64_t expected, uint64_t found) noexcept;

// A link, owned (mf_link_drop), made of a closure that is given. The closure gets a detached
// tensor in `in` and declines, or takes it by setting `closure` to one that sets `out` at
// each call. It is called where a tensor is saved, on the thread that pushed the link; what
// it sets is called in backward, on the thread of the node that asks, and freed with the
// graph, on the thread that drops the graph. Both run with links, gradients and operator
// records off, one call at a time.
void *mf_link_new(mf_closure pack) noexcept;
void mf_link_drop(void *link) noexcept;  // given
// Makes the link this thread's innermost. The place, owned, ends it (mf_place_end) and keeps
// the link alive. The first push installs the engine that asks the links.
void *mf_link_push(void *link) noexcept;
// A place that hides all links of this thread, owned.
void *mf_links_pause() noexcept;
// Given. On the thread that made it; in any order.
void mf_place_end(void *place) noexcept;

// Registers the storages of `count` tensors under names (copied), for all threads: they are
// held weakly and never offered to a link. The registration is owned (mf_unregister).
int mf_register(
    const mf_tensor *tensors, const char *const *names, size_t count, void **registration) noexcept;
void mf_unregister(void *registration) noexcept;  // given
// 1 for a registered storage, a leaf that requires a gradient, or a view of such a leaf.
int mf_is_parameter(mf_tensor tensor) noexcept;
// ---- accelerators (device.cpp) -----------------------------------------------------------
// `device` is an index; the accelerator is the one that libtorch finds. All fail where there
// is none. Streams and events are owned, freed by their _free.
typedef struct mf_stream_ *mf_stream;
typedef struct mf_event_ *mf_event;
struct mf_device_stats {
  int64_t current, peak, allocated, freed;  // bytes handed out
  int64_t reserved;                         // bytes held from the device, caches included
  int64_t allocations, frees, failures;
  int64_t peak_reserved;
  int64_t peak_blocks;
  int64_t retries;       // allocations that succeeded after the caches were given back
  int64_t inactive;      // bytes of split blocks that hold memory and nobody uses
};
// Devices of the accelerator; 0 where there is none.
int mf_device_count() noexcept;
int mf_device_stats_of(int device, mf_device_stats *out) noexcept;
int mf_device_reset_peak(int device) noexcept;
// Gives cached blocks back to the device and, pinned ones, to the host.
int mf_device_release_caches() noexcept;
int mf_device_memory(int device, uint64_t *free, uint64_t *total) noexcept;
// The stream that this thread uses now, or one from the pool.
int mf_stream_current(int device, mf_stream *out) noexcept;
int mf_stream_new(int device, mf_stream *out) noexcept;
// Makes it this thread's current stream; the former one is owned by the caller.
int mf_stream_enter(mf_stream stream, mf_stream *former) noexcept;
// Keeps the tensor's storage from being reused before the stream's work so far is done.
int mf_stream_uses(mf_stream stream, mf_tensor tensor) noexcept;
void mf_stream_free(mf_stream stream) noexcept;
int mf_event_record(mf_stream stream, mf_event *out) noexcept;
// Later work of the stream waits for the event.
int mf_event_block(mf_event event, mf_stream stream) noexcept;
void mf_event_free(mf_event event) noexcept;

// ---- generators (rng.cpp) ----------------------------------------------------------------
// A copy of the default CPU generator's engine and cached samples, owned; freed by
// mf_rng_free. Takes no tensor. Runs under the generator's mutex.
typedef struct mf_rng_ *mf_rng;
mf_rng mf_rng_capture() noexcept;
void mf_rng_restore(mf_rng saved) noexcept;
// 1 where the generator is not in the saved state any more.
int mf_rng_moved(mf_rng saved) noexcept;
size_t mf_rng_bytes() noexcept;
void mf_rng_free(mf_rng saved) noexcept;
// A copy as the tensor that libtorch's own get_state gives (5,056 bytes), owned; and a copy
// from such a tensor, borrowed, on the CPU: an error where it is no state. The default
// generator is not involved. Any thread.
int mf_rng_pack(mf_rng saved, mf_tensor *out) noexcept;
int mf_rng_unpack(mf_tensor state, mf_rng *out) noexcept;
// The state of an accelerator's default generator, as an owned tensor.
int mf_rng_device_state(int device, mf_tensor *out) noexcept;
int mf_rng_set_device_state(int device, mf_tensor state) noexcept;

// ---- autocast (autocast.cpp) -------------------------------------------------------------
// The state of this thread for one device type (tch's numbers: -1 CPU, 0.. CUDA).
struct mf_autocast {
  int enabled;
  int dtype;  // torch-sys' number of a ScalarType
  int cache_enabled;
};
int mf_autocast_get(int device, mf_autocast *out) noexcept;
// Sets the state and opens a scope; casts are cached only where gradients are recorded.
int mf_autocast_enter(int device, const mf_autocast *state, mf_autocast *former) noexcept;
// Closes a scope, the outermost clearing the cast cache, and sets the former state.
void mf_autocast_leave(int device, const mf_autocast *former) noexcept;
void mf_autocast_clear() noexcept;

// ---- many tensors at once (multi.cpp) ----------------------------------------------------
// All run on this thread and libtorch's worker threads, below autograd; those that write
// bump versions once per tensor.
struct mf_measured {
  double squared_norm;
  int non_finite;
};
// v = tensor * factor, in fp32 (fp64 for fp64): the sum of v^2 in double, and whether a v is
// not finite. One readback per accelerator, none on the CPU.
int mf_measure(const mf_tensor *tensors, size_t count, double factor, mf_measured *out) noexcept;
// sums[i] += tensors[i], the sum in its own dtype, without a copy of a tensor on the CPU for
// fp32 += bf16 or fp16 of the same strides.
int mf_add_to(const mf_tensor *sums, const mf_tensor *tensors, size_t count) noexcept;
int mf_cast_into(mf_tensor to, mf_tensor from) noexcept;

// ---- optimizers (optim.cpp) --------------------------------------------------------------
// One parameter of a step. Skipped where it needs no gradient or has none.
struct mf_moving {
  mf_tensor parameter;
  mf_tensor state[4];  // borrowed; null where the optimizer has none
  uint64_t count;      // its steps so far; one more where it moved
  double lr;
  double weight_decay;
  uint64_t key;        // tells it from the other parameters, the same in every run
};
struct mf_adam {
  double beta1, beta2, epsilon, divisor;
  int decoupled;  // weight decay: 1 AdamW's, 0 added to the gradient
};
struct mf_sgd {
  double momentum, dampening, divisor;
  int nesterov;
};
// Moves all; gradients are divided by `divisor` first. `moved` tells how many parameters
// had moved when it returned. Everything it needs is allocated before the first one does.
// Bumps versions and clears the autocast cache.
int mf_adam_step(mf_moving *moving, size_t count, const mf_adam *options, size_t *moved) noexcept;
int mf_sgd_step(mf_moving *moving, size_t count, const mf_sgd *options, size_t *moved) noexcept;

// ---- optimizers with state of other dtypes (lion.cpp, mixed.cpp, adam8bit.cpp), and SGD that
// rounds or decays in its own way (sgd.cpp) --------------------------------------------------
// All run on the CPU and on libtorch's threads, as mf_adam_step does, take nothing from its
// allocators, and give the same bits on any number of threads and for any strides.
struct mf_lion {
  double beta1, beta2, divisor;
};
// Half-precision moments are always rounded at random, by bits made of the seed, the
// parameter's key and count, and the element's index.
struct mf_rounding {
  uint64_t seed;
  int weights;  // half-precision weights: 1 at random too, 0 to nearest
};
// State: the momentum.
int mf_lion_step(
    mf_moving *moving, size_t count, const mf_lion *options, const mf_rounding *rounding,
    size_t *moved) noexcept;
// State: the momentum, where it is not 0. Weight decay: `decoupled` 1 shrinks the parameter,
// 0 joins the gradient.
int mf_sgd_mixed_step(
    mf_moving *moving, size_t count, const mf_sgd *options, int decoupled,
    const mf_rounding *rounding, size_t *moved) noexcept;
// State: first and second moment, in dtypes of their own.
int mf_adam_mixed_step(
    mf_moving *moving, size_t count, const mf_adam *options, const mf_rounding *rounding,
    size_t *moved) noexcept;
// State: codes and scales of the first moment, codes and scales of the second; or, for a
// parameter that is not quantised, as in mf_adam_mixed_step. The decay is decoupled.
int mf_adam8bit_step(
    mf_moving *moving, size_t count, const mf_adam *options, const mf_rounding *rounding,
    size_t *moved) noexcept;
// Codes of `count` numbers and one scale per block of 256, by the map with or without sign.
void mf_quantise(
    const float *numbers, size_t count, int with_sign, uint8_t *codes, float *scales) noexcept;
void mf_dequantise(
    const uint8_t *codes, const float *scales, size_t count, int with_sign,
    float *numbers) noexcept;

// ---- gradients that join a momentum (accumulate.cpp) --------------------------------------
// Both run on this thread and libtorch's worker threads, below autograd, take any strides and
// no memory, bump the version of what they write. All handles are borrowed.
struct mf_join {
  double keep, rise, decay, divisor;
};
// momentum = keep * momentum + rise * (grad / divisor + decay * parameter), computed in fp32
// (fp64 for fp64) and rounded once on the CPU.
int mf_momentum_join(
    mf_tensor parameter, mf_tensor grad, mf_tensor momentum, const mf_join *options) noexcept;
// parameter -= lr * momentum. Clears the autocast cache.
int mf_momentum_move(mf_tensor parameter, mf_tensor momentum, double lr) noexcept;

// ---- optimizers of matrices (adafactor.cpp, muon.cpp) ---------------------------------------
// As those above: all is checked and allocated before the first parameter moves. On the CPU
// only; gradients of any strides.
struct mf_adafactor {
  double decay;               // the second moment forgets with 1 - step^-decay
  double epsilon1, epsilon2;  // least mean square of a gradient, least size of a parameter
  double clip;                // most root mean square of an update
  double beta1;               // 0: no momentum
  double divisor;
  int relative;               // steps in proportion to the parameter
};
// States, contiguous, fp64 for fp64 and fp32 otherwise: of a parameter of shape [.., r, c]
// the mean squares of rows [.., r, 1] and columns [.., 1, c], of a vector those of its
// elements; then the momentum of its shape where beta1 is not 0.
int mf_adafactor_step(
    mf_moving *moving, size_t count, const mf_adafactor *options, const mf_rounding *rounding,
    size_t *moved) noexcept;

struct mf_muon {
  double momentum, a, b, c, epsilon, divisor;
  int steps;       // of the Newton-Schulz iteration
  int nesterov;
  int mixed;       // the others by mf_adam_mixed_step instead of mf_adam_step
  int match_adam;  // scale: 1 0.2 sqrt(max(r, c)), 0 sqrt(max(1, r / c))
};
// An entry with one state, the momentum, contiguous, fp64 for fp64 and fp32 otherwise, is a
// matrix: shape[0] rows, the other dimensions together its columns. One with two states is
// moved by `others`. An fp32 or fp64 gradient that is contiguous and has its storage alone is
// used up: it holds the update when this returns.
int mf_muon_step(
    mf_moving *moving, size_t count, const mf_muon *options, const mf_adam *others,
    const mf_rounding *rounding, size_t *moved) noexcept;

// ---- recompute regions (region.cpp, recompute.cpp) ----------------------------------------
// Implemented in Rust (recompute.rs). Parks an Error::RecomputeMismatch and returns its
// number; both texts are borrowed. Runs on the thread that recomputes.
uint64_t mf_park_mismatch(const char *segment, const char *what) noexcept;

// What a forward pass under a region is held in, between begin and end.
typedef struct mf_forward_ *mf_forward;
struct mf_region_options {
  const char *segment;  // borrowed, copied
  int checked;          // compare checksums of what forward and recompute saved
  int early_stop;       // end a recompute at the last tensor that is needed
};
// Whether a segment entered now on this thread is to be a region: gradients are on, and no
// region's forward pass is already in progress here.
int mf_region_wanted() noexcept;
// Starts a region and makes it this thread's innermost link: what operators save from now on
// is dropped. The inputs (undefined ones among them) are offered to the links outside. The
// closure is given, also where this fails; in backward it is called with detached copies of
// the inputs, on the thread of the node that asks first, and computes the segment again. It
// is freed with the graph, on the thread that drops the graph. `out` is owned (mf_region_end
// or mf_region_abandon). 2: a device's generator cannot be captured.
int mf_region_begin(
    const mf_tensor *inputs, size_t count, mf_closure recompute, const mf_region_options *options,
    mf_forward *out) noexcept;
// Ends the forward pass; given. The outputs tell which parameters were read. On the thread of
// begin, as mf_region_abandon.
int mf_region_end(mf_forward forward, const mf_tensor *outputs, size_t count) noexcept;
// Ends a forward pass that failed; given.
void mf_region_abandon(mf_forward forward) noexcept;
// Whether this thread is leaving a recompute that has all it needs, or that has failed for a
// reason that C++ knows: whatever unwinds now is not to be reported.
int mf_recompute_leaving() noexcept;

// ---- linear layer and cross-entropy in one (linear_cross_entropy.cpp, token_rows.cpp) ------
// hidden [.., D], weight [V, D], bias [V] or null, labels int64 of hidden's leading shape,
// token_weights of that shape or null; all on one device, dtypes as Rust has checked them.
struct mf_head {
  mf_tensor hidden, weight, bias, labels, token_weights;  // borrowed
};
struct mf_counted {
  double weight;       // sum of the weights of the tokens that count; without weights as `tokens`
  int64_t tokens;      // tokens that count: the label is not the ignored one, the weight not 0
  int64_t bad_at;      // the first label that is neither ignored nor a class, or the first
                       // weight that is negative or not finite; -1
  int64_t bad_label;   // its label
  double bad_weight;   // its weight; 1 without weights
  double most_token;   // the largest of those weights
  double most_hidden, most_weight;  // the largest magnitudes, where they were asked for, else 0
};
struct mf_loss_options {
  int64_t ignored;     // the label of tokens that do not count
  double smoothing, z;
  double norm;         // what the sum over tokens is multiplied by
  double scale;        // what logits' gradients are multiplied by at first, norm / scale in backward
  double rows_scale;   // what hidden is multiplied by for the weight's gradient, undone in backward
  int64_t rows;        // of one chunk, at least 1
  int dtype;           // of the matrix products, a c10::ScalarType
  int by_operators;    // 1: libtorch's operators on the CPU too
};
// Counts and checks, before anything is computed. One readback on an accelerator. sizes: 1 asks
// for the largest magnitudes too.
int mf_count_tokens(const mf_head *head, int64_t ignored, int sizes, mf_counted *out) noexcept;
// *loss, owned: 0-d. Where gradients are on and wanted, its node holds them already; no
// second derivative.
int mf_linear_cross_entropy(
    const mf_head *head, const mf_loss_options *options, mf_tensor *loss) noexcept;
// Without a graph: the sum of the losses, and how often the label has the highest logit (the
// first one where several have). One readback.
int mf_evaluate_cross_entropy(
    const mf_head *head, const mf_loss_options *options, double *sum, int64_t *correct) noexcept;
// Implemented in Rust (loss.rs). Parks the error of a second derivative, returns its number.
uint64_t mf_park_second_order() noexcept;

}  // extern "C"

// ---- for the .cpp files only -------------------------------------------------------------
namespace memfit {

// A typed error on its way through C++: its text carries the parked error's number, and what
// a reader without the number needs.
struct CallbackError : std::exception {
  explicit CallbackError(uint64_t parked) : text("memfit error #" + std::to_string(parked) + ": ") {
    char buffer[1024];
    mf_parked_text(parked, buffer, sizeof buffer);
    text += buffer;
  }
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

#endif  // MEMFIT_ALLOCATOR_ALONE
