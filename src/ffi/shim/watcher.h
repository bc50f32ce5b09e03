// What the counting allocator tells whoever watches it. Needs c10 alone, as allocator.cpp does.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>

namespace memfit {

// Heads each block. libtorch's own alignment of 64 bytes survives it.
struct alignas(64) Block {
  uint64_t bytes;
  uint64_t number;  // from 1, in the order of allocation; never given twice
  uint64_t origin;  // the watcher's word on where it was made
  // The list of blocks made while a census was open. Neighbours change under the watcher's
  // lock; `listed` is set before anybody else knows the block.
  Block *next;
  Block *previous;
  bool listed;
  bool followed;  // the watcher counts its end; set and read under its lock
};
static_assert(sizeof(Block) == 64);

// Is told of each change under its lock, on the thread that makes the change. Takes no memory
// from the counting allocator.
class Watcher {
 public:
  virtual void lock() noexcept = 0;
  virtual void unlock() noexcept = 0;
  // `live`: live bytes after the change.
  virtual void taken(Block &block, uint64_t live) noexcept = 0;
  virtual void given(Block &block, uint64_t live) noexcept = 0;
  virtual void refused(uint64_t bytes, uint64_t live) noexcept = 0;

 protected:
  ~Watcher() = default;
};

// Null: nobody watches. Whoever is set here is never destroyed.
extern std::atomic<Watcher *> watcher;
// The one that holds the list of blocks, whether it watches or not.
extern Watcher *keeper;
// Whether a profile wants to know of memory, on threads that it profiles.
extern std::atomic<bool> profiled;

// Holds the watcher's lock, where there is a watcher.
class Watched {
 public:
  // `always`: also where nobody watches any more.
  explicit Watched(bool always = false)
      : watcher_(always ? keeper : watcher.load(std::memory_order_acquire)) {
    if (watcher_ != nullptr) watcher_->lock();
  }
  ~Watched() {
    if (watcher_ != nullptr) watcher_->unlock();
  }
  Watched(const Watched &) = delete;
  Watched &operator=(const Watched &) = delete;

  explicit operator bool() const { return watcher_ != nullptr; }
  Watcher *operator->() const { return watcher_; }

 private:
  Watcher *watcher_;
};

// The block that libtorch's data lies in; null where another allocator made it.
Block *block_of(const c10::DataPtr &data);

uint64_t live_bytes();

}  // namespace memfit
