// The counting CPU allocator. Needs c10 alone; see memfit.h for building it by itself.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "memfit.h"
#include "watcher.h"

namespace memfit {
std::atomic<Watcher *> watcher{nullptr};
Watcher *keeper = nullptr;
std::atomic<bool> profiled{false};
}  // namespace memfit

namespace {

using memfit::Block;
using memfit::Watched;

constexpr uint64_t kNone = UINT64_MAX;
constexpr int kMarks = 64;

std::atomic<uint64_t> current{0};
std::atomic<uint64_t> peak{0};
std::atomic<uint64_t> allocated{0};
std::atomic<uint64_t> allocations{0};  // numbers the blocks, too
std::atomic<uint64_t> frees{0};
std::atomic<uint64_t> failures{0};
std::atomic<uint64_t> limit{kNone};
std::atomic<int64_t> fail_in{0};  // 0: no failure is ordered

std::atomic<uint64_t> claimed_marks{0};
std::atomic<uint64_t> active_marks{0};
std::atomic<unsigned> next_mark{0};
std::atomic<uint64_t> marks[kMarks];

void raise_to(std::atomic<uint64_t> &highest, uint64_t value) {
  uint64_t seen = highest.load(std::memory_order_relaxed);
  while (seen < value && !highest.compare_exchange_weak(seen, value)) {
  }
}

void raise_marks(uint64_t now) {
  raise_to(peak, now);
  for (uint64_t open = active_marks.load(); open != 0; open &= open - 1) {
    raise_to(marks[__builtin_ctzll(open)], now);
  }
}

[[noreturn]] void refuse(uint64_t requested, uint64_t live, uint64_t met, Watched &watched) {
  failures.fetch_add(1, std::memory_order_relaxed);
  if (watched) watched->refused(requested, live);
  std::string text = "memfit: out of memory: requested=" + std::to_string(requested) +
      " live=" + std::to_string(live) + " limit=" + (met == kNone ? "none" : std::to_string(met)) +
      " device=cpu";
  // Without a backtrace: a search for the largest batch meets this often.
  throw c10::OutOfMemoryError(std::move(text));
}

bool failure_is_due() {
  if (fail_in.load(std::memory_order_relaxed) == 0) return false;
  int64_t left = fail_in.load();
  while (left > 0 && !fail_in.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1;
}

// Counts the bytes first, so that concurrent requests cannot pass the limit together.
uint64_t reserve(uint64_t bytes, Watched &watched) {
  uint64_t live = current.load(std::memory_order_relaxed);
  if (failure_is_due()) refuse(bytes, live, kNone, watched);
  do {
    uint64_t most = limit.load(std::memory_order_relaxed);
    if (most != kNone && (live > most || bytes > most - live)) refuse(bytes, live, most, watched);
  } while (!current.compare_exchange_weak(live, live + bytes));
  return live + bytes;
}

// Stands in for a profiler that wants to know of no memory.
struct Deaf final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void *, int64_t, size_t, size_t, c10::Device) override {}
  bool memoryProfilingEnabled() const override { return false; }
};

// Tells the profiler of this thread, if one wants to know, in the place of the inner
// allocator, which would count the block's head and miss frees of what is older than the
// profile.
class Told {
 public:
  Told() {
    if (!memfit::profiled.load(std::memory_order_relaxed) || !c10::memoryProfilingEnabled()) return;
    static const auto *deaf = new std::shared_ptr<c10::DebugInfoBase>(std::make_shared<Deaf>());
    quiet_.emplace(c10::DebugInfoKind::PROFILER_STATE, *deaf);
  }

  // Ends the quiet. `bytes` is negative for a free.
  void tell(void *data, int64_t bytes) {
    if (!quiet_) return;
    quiet_.reset();
    uint64_t live = current.load(std::memory_order_relaxed);
    c10::reportMemoryUsageToProfiler(data, bytes, live, live, c10::Device(c10::DeviceType::CPU));
  }

 private:
  std::optional<c10::DebugInfoGuard> quiet_;
};

class Counting final : public c10::Allocator {
 public:
  explicit Counting(c10::Allocator *inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    void *data = nullptr;
    if (bytes > 0) {
      Told told;
      data = take(bytes);
      told.tell(data, static_cast<int64_t>(bytes));
    }
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void *to, const void *from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  void *take(size_t bytes);
  static void give_back(void *data);

  c10::Allocator *inner_;
};

Counting *installed = nullptr;

void *Counting::take(size_t bytes) {
  TORCH_CHECK(bytes <= size_t(PTRDIFF_MAX) - sizeof(Block), "memfit: a tensor of negative size");
  // Held to the end, so that what a watcher sees and what is counted have one order.
  Watched watched;
  uint64_t now = reserve(bytes, watched);
  void *memory = nullptr;
  try {
    memory = inner_->raw_allocate(bytes + sizeof(Block));
  } catch (const std::exception &) {
  }
  if (memory == nullptr) {
    refuse(bytes, current.fetch_sub(bytes) - bytes, kNone, watched);
  }
  allocated.fetch_add(bytes, std::memory_order_relaxed);
  raise_marks(now);
  auto *block = new (memory) Block{};
  block->bytes = bytes;
  block->number = allocations.fetch_add(1, std::memory_order_relaxed) + 1;
  if (watched) watched->taken(*block, now);
  return block + 1;
}

void Counting::give_back(void *data) {
  if (data == nullptr) return;
  Told told;
  auto *block = static_cast<Block *>(data) - 1;
  auto bytes = static_cast<int64_t>(block->bytes);
  {
    Watched watched(block->listed);
    uint64_t live = current.fetch_sub(block->bytes) - block->bytes;
    frees.fetch_add(1, std::memory_order_relaxed);
    if (watched) watched->given(*block, live);
  }
  installed->inner_->raw_deallocate(block);
  told.tell(data, -bytes);
}

// Before main, so that a model built before memfit's first call is counted. Never destroyed:
// tensors in static variables are freed after it would have been.
const bool install = [] {
  c10::Allocator *inner = c10::GetCPUAllocator();
  if (inner->raw_deleter() == nullptr) return false;
  installed = new Counting(inner);
  c10::SetCPUAllocator(installed, 255);
  return true;
}();

}  // namespace

namespace memfit {

Block *block_of(const c10::DataPtr &data) {
  bool ours = data.get() != nullptr && installed != nullptr &&
      data.get_deleter() == installed->raw_deleter();
  return ours ? static_cast<Block *>(data.get()) - 1 : nullptr;
}

uint64_t live_bytes() { return current.load(); }

}  // namespace memfit

int mf_cpu_counted() noexcept { return install && c10::GetCPUAllocator() == installed; }

void mf_cpu_read(mf_cpu_stats *out) noexcept {
  out->current = current.load();
  out->allocated = allocated.load();
  out->freed = out->allocated - std::min(out->allocated, out->current);
  out->peak = std::max(peak.load(), out->current);
  out->allocations = allocations.load();
  out->frees = frees.load();
  out->failures = failures.load();
  out->limit = limit.load();
}

void mf_cpu_reset_peak() noexcept {
  peak.store(0);
  raise_to(peak, current.load());
}

void mf_cpu_set_limit(uint64_t bytes) noexcept { limit.store(bytes); }

void mf_cpu_fail_at(uint64_t n) noexcept { fail_in.store(static_cast<int64_t>(n)); }

// Marks are taken in turn, so that a thread still raising a closed one does not disturb the
// next that opens.
int mf_watermark_open() noexcept {
  unsigned start = next_mark.fetch_add(1);
  for (unsigned i = 0; i < kMarks; ++i) {
    unsigned mark = (start + i) % kMarks;
    uint64_t bit = uint64_t(1) << mark;
    if (claimed_marks.fetch_or(bit) & bit) continue;
    marks[mark].store(0);
    active_marks.fetch_or(bit);
    raise_to(marks[mark], current.load());
    return static_cast<int>(mark);
  }
  return -1;
}

uint64_t mf_watermark_peak(int mark) noexcept { return marks[mark].load(); }

void mf_watermark_close(int mark) noexcept {
  uint64_t bit = uint64_t(1) << mark;
  active_marks.fetch_and(~bit);
  claimed_marks.fetch_and(~bit);
}
