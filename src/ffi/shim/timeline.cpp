// Events of the counting allocator in a ring, and the list of blocks that are still alive.
#include <algorithm>
#include <chrono>
#include <cstdint>
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <x86intrin.h>
#endif
#include <new>
#include <thread>
#include <utility>

#include "memfit.h"
#include "watcher.h"

namespace {

using memfit::Block;

// An event's word and a block's origin: kind 0-2, phase 3-5, role 6-9, thread 10, segment
// 16-31, step 32-63. The driver's word is the same without kind, role and thread.
constexpr uint64_t kPhase = 0x7 << 3;
constexpr uint64_t kRole = 0xf << 6;
constexpr uint64_t kForeign = 1 << 10;
enum Kind : uint64_t { kTaken = 0, kGiven = 1, kRefused = 2, kMark = 3 };

std::atomic<uint64_t> phase_word{0};
// Tells threads apart by the address of a variable that each has.
thread_local char here;
std::atomic<const char *> phase_thread{nullptr};
thread_local uint64_t role_here = 0;

uint64_t nanoseconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// An event waits for its time longer than for all else, so it takes the processor's own counter
// where that one runs evenly.
#if defined(__x86_64__) && defined(__GNUC__)
bool counts_evenly() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d >> 8 & 1) == 1;
}
const bool kCounter = counts_evenly();
uint64_t ticks() { return kCounter ? __rdtsc() : nanoseconds(); }
#else
constexpr bool kCounter = false;
uint64_t ticks() { return nanoseconds(); }
#endif

// Both clocks at one moment: a thread that is interrupted between them reads them apart, so the clock
// is read between two of the counter, and again where these are far apart; the nearest count.
struct Clocks {
  uint64_t ticks = 0, nanoseconds = 0;

  Clocks() {
    constexpr uint64_t kNear = 2000;
    constexpr int kTries = 32;
    uint64_t nearest = UINT64_MAX;
    for (int tries = 0; tries < kTries && nearest > kNear; ++tries) {
      uint64_t before = ::ticks(), between = ::nanoseconds(), apart = ::ticks() - before;
      if (apart >= nearest) continue;
      nearest = apart;
      ticks = before + apart / 2;
      nanoseconds = between;
    }
  }
};

uint64_t origin_here() {
  uint64_t word = phase_word.load(std::memory_order_relaxed) | role_here;
  bool foreign = phase_thread.load(std::memory_order_relaxed) != &here;
  return foreign ? word | kForeign : word;
}

class Recorder final : public memfit::Watcher {
 public:
  void lock() noexcept override {
    for (int tries = 0; locked_.test_and_set(std::memory_order_acquire); ++tries) {
      if (tries > 64) std::this_thread::yield();
    }
  }
  void unlock() noexcept override { locked_.clear(std::memory_order_release); }

  void taken(Block &block, uint64_t live) noexcept override {
    block.origin = origin_here();
    if (censuses_ > 0) list(block);
    append({block.number, block.bytes, live, 0, block.origin | kTaken});
  }

  void given(Block &block, uint64_t live) noexcept override {
    if (block.listed) unlist(block);
    if (block.followed) gone_ += 1;
    append({block.number, block.bytes, live, 0, origin_here() | kGiven});
  }

  void refused(uint64_t bytes, uint64_t live) noexcept override {
    append({0, bytes, live, 0, origin_here() | kRefused});
  }

  void mark() noexcept { append({0, 0, memfit::live_bytes(), 0, origin_here() | kMark}); }

  // Takes the ring, or hands it back where there is one.
  mf_memory_event *open(mf_memory_event *ring, size_t capacity) {
    if (capacity_ > 0) return ring;
    ring_ = ring;
    capacity_ = capacity;
    oldest_ = next_;
    return nullptr;
  }

  mf_memory_event *close() {
    capacity_ = 0;
    oldest_ = next_;
    return std::exchange(ring_, nullptr);
  }

  void now(mf_timeline_now *out) const {
    *out = {next_, oldest_, memfit::live_bytes(), ticks(), phase_word.load(), gone_};
  }

  size_t read(uint64_t from, mf_memory_event *out, size_t count) const {
    if (from < oldest_ || from >= next_) return 0;
    count = std::min<uint64_t>(count, next_ - from);
    for (size_t i = 0; i < count; ++i) out[i] = ring_[(from + i) % capacity_];
    return count;
  }

  size_t census(mf_memory_event *out, size_t count) const {
    size_t found = 0;
    for (const Block *block = blocks_.next; block != nullptr; block = block->next, ++found) {
      if (found < count) out[found] = {block->number, block->bytes, 0, 0, block->origin};
    }
    return found;
  }

  size_t censuses_ = 0;
  size_t capacity_ = 0;  // 0: no timeline

 private:
  void append(mf_memory_event event) noexcept {
    if (capacity_ == 0) return;
    event.ticks = ticks();
    ring_[next_ % capacity_] = event;
    next_ += 1;
    if (next_ - oldest_ > capacity_) oldest_ += 1;
  }

  void list(Block &block) noexcept {
    block.listed = true;
    block.previous = &blocks_;
    block.next = blocks_.next;
    if (block.next != nullptr) block.next->previous = &block;
    blocks_.next = &block;
  }

  void unlist(Block &block) noexcept {
    block.previous->next = block.next;
    if (block.next != nullptr) block.next->previous = block.previous;
  }

  std::atomic_flag locked_ = ATOMIC_FLAG_INIT;
  mf_memory_event *ring_ = nullptr;
  uint64_t next_ = 0;    // number of the next event; numbers go on over recordings
  uint64_t oldest_ = 0;  // of those in the ring
  uint64_t gone_ = 0;    // followed blocks that were freed
  Block blocks_{};       // heads the list
};

// Never destroyed: tensors in static variables are freed after it would have been.
Recorder &recorder() {
  static Recorder *one = new Recorder;
  return *one;
}

struct Locked {
  Locked() { recorder().lock(); }
  ~Locked() { recorder().unlock(); }
};

// Under the lock.
void watch_where_asked() {
  Recorder &one = recorder();
  memfit::keeper = &one;
  bool asked = one.capacity_ > 0 || one.censuses_ > 0;
  memfit::watcher.store(asked ? &one : nullptr, std::memory_order_release);
}

c10::StorageImpl *storage_of(const at::Tensor &tensor) {
  bool has = tensor.defined() && tensor.has_storage();
  return has ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Unchecked: bytes that are away have no block, and asking for them would throw.
Block *block_of(c10::StorageImpl *storage) {
  return storage ? memfit::block_of(storage->_mutable_data_ptr_no_checks()) : nullptr;
}

}  // namespace

double mf_timeline_scale() noexcept {
  static const Clocks first;
  Clocks now;
  uint64_t passed = now.ticks - first.ticks;
  if (!kCounter || passed == 0) return 1.0;
  return static_cast<double>(now.nanoseconds - first.nanoseconds) / static_cast<double>(passed);
}

int mf_timeline_open(size_t capacity) noexcept {
  mf_timeline_scale();  // begins to compare the clocks
  // A length beyond the address space would throw in spite of nothrow.
  if (capacity > PTRDIFF_MAX / sizeof(mf_memory_event)) return 1;
  // Written to, so that no event waits for the system to find a page.
  auto *ring = new (std::nothrow) mf_memory_event[capacity]();
  if (ring == nullptr) return 1;
  {
    Locked locked;
    ring = recorder().open(ring, capacity);
    watch_where_asked();
  }
  delete[] ring;
  return 0;
}

void mf_timeline_close() noexcept {
  mf_memory_event *ring = nullptr;
  {
    Locked locked;
    ring = recorder().close();
    watch_where_asked();
  }
  delete[] ring;
}

int mf_timeline_on() noexcept { return memfit::watcher.load(std::memory_order_relaxed) != nullptr; }

void mf_timeline_read_now(mf_timeline_now *out) noexcept {
  Locked locked;
  recorder().now(out);
}

size_t mf_timeline_read(uint64_t from, mf_memory_event *out, size_t count) noexcept {
  Locked locked;
  return recorder().read(from, out, count);
}

uint64_t mf_phase_get() noexcept { return phase_word.load(std::memory_order_relaxed); }

uint64_t mf_phase_set(uint64_t mask, uint64_t value) noexcept {
  // Who only names a segment does not become the thread that trains.
  if (mask & kPhase) phase_thread.store(&here, std::memory_order_relaxed);
  uint64_t former = phase_word.load(std::memory_order_relaxed);
  while (!phase_word.compare_exchange_weak(former, (former & ~mask) | (value & mask))) {
  }
  if (mf_timeline_on()) {
    Locked locked;
    recorder().mark();
  }
  return former;
}

int mf_role_set(int role) noexcept {
  int former = static_cast<int>(role_here >> 6);
  role_here = (static_cast<uint64_t>(role) << 6) & kRole;
  return former;
}

void mf_census_open() noexcept {
  Locked locked;
  recorder().censuses_ += 1;
  watch_where_asked();
}

void mf_census_close() noexcept {
  Locked locked;
  recorder().censuses_ -= 1;
  watch_where_asked();
}

size_t mf_census_read(mf_memory_event *out, size_t count) noexcept {
  Locked locked;
  return recorder().census(out, count);
}

void mf_blocks_of(const mf_tensor *tensors, size_t count, int gradients, mf_block *out) noexcept {
  for (size_t i = 0; i < count; ++i) {
    out[i] = {0, 0};
    const at::Tensor &tensor = *tensors[i];
    if (!tensor.defined()) continue;
    const at::Tensor &asked = gradients ? tensor.grad() : tensor;
    if (const Block *block = block_of(storage_of(asked))) out[i] = {block->number, block->bytes};
  }
}

int mf_blocks_follow(
    const mf_tensor *tensors, size_t count, int all, mf_followed *known) noexcept {
  int another = 0;
  for (size_t i = 0; i < count; ++i) {
    c10::StorageImpl *storage = storage_of(*tensors[i]);
    auto key = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(storage));
    // Without a block nobody tells when the storage dies and its address is another's.
    if (!all && key == known[i].storage && known[i].block.number != 0) continue;
    mf_followed now{key, {0, 0}};
    if (Block *block = block_of(storage)) {
      Locked locked;
      block->followed = true;
      now.block = {block->number, block->bytes};
    }
    if (key != known[i].storage || now.block.number != known[i].block.number) another = 1;
    known[i] = now;
  }
  return another;
}
