#include <ATen/core/CachingHostAllocator.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "memfit.h"

struct mf_stream_ {
  c10::Stream stream;
};
struct mf_event_ {
  c10::Event event;
};

namespace {

c10::Device accelerator(int index) {
  auto type = at::accelerator::getAccelerator(false);
  TORCH_CHECK(type.has_value(), "memfit: no accelerator");
  int devices = at::accelerator::deviceCount();
  TORCH_CHECK(index >= 0 && index < devices, "memfit: no device ", index, " of ", devices);
  return {*type, static_cast<c10::DeviceIndex>(index)};
}

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

}  // namespace

int mf_device_count() noexcept {
  int devices = 0;
  int failed = memfit::guarded([&] {
    if (at::accelerator::getAccelerator(false)) devices = at::accelerator::deviceCount();
  });
  return failed ? 0 : devices;
}

int mf_device_stats_of(int device, mf_device_stats *out) noexcept {
  return memfit::guarded([&] {
    c10::Device which = accelerator(device);
    auto stats = c10::getDeviceAllocator(which.type())->getDeviceStats(which.index());
    const auto &bytes = stats.allocated_bytes[0];
    const auto &blocks = stats.allocation[0];
    *out = {bytes.current,    bytes.peak,   bytes.allocated,
            bytes.freed,      stats.reserved_bytes[0].current,
            blocks.allocated, blocks.freed, stats.num_ooms,
            stats.reserved_bytes[0].peak,   blocks.peak,
            stats.num_alloc_retries,        stats.inactive_split_bytes[0].current};
  });
}

int mf_device_reset_peak(int device) noexcept {
  return memfit::guarded([&] {
    c10::Device which = accelerator(device);
    c10::getDeviceAllocator(which.type())->resetPeakStats(which.index());
  });
}

int mf_device_release_caches() noexcept {
  return memfit::guarded([&] {
    c10::Device which = accelerator(0);
    c10::getDeviceAllocator(which.type())->emptyCache();
    if (auto *pinned = at::getHostAllocator(which.type())) pinned->empty_cache();
  });
}

int mf_device_memory(int device, uint64_t *free, uint64_t *total) noexcept {
  return memfit::guarded([&] {
    c10::Device which = accelerator(device);
    auto info = c10::getDeviceAllocator(which.type())->getMemoryInfo(which.index());
    *free = info.first;
    *total = info.second;
  });
}

int mf_stream_current(int device, mf_stream *out) noexcept {
  return memfit::guarded([&] {
    c10::Device which = accelerator(device);
    *out = new mf_stream_{guard_of(which).getStream(which)};
  });
}

int mf_stream_new(int device, mf_stream *out) noexcept {
  return memfit::guarded([&] {
    c10::Device which = accelerator(device);
    *out = new mf_stream_{guard_of(which).getStreamFromGlobalPool(which)};
  });
}

int mf_stream_enter(mf_stream stream, mf_stream *former) noexcept {
  return memfit::guarded([&] {
    auto guard = guard_of(stream->stream.device());
    *former = new mf_stream_{guard.exchangeStream(stream->stream)};
  });
}

int mf_stream_uses(mf_stream stream, mf_tensor tensor) noexcept {
  return memfit::guarded([&] {
    guard_of(stream->stream.device())
        .recordDataPtrOnStream(tensor->storage().data_ptr(), stream->stream);
  });
}

void mf_stream_free(mf_stream stream) noexcept { delete stream; }

int mf_event_record(mf_stream stream, mf_event *out) noexcept {
  return memfit::guarded([&] {
    auto event = std::make_unique<mf_event_>(mf_event_{c10::Event(stream->stream.device_type())});
    event->event.record(stream->stream);
    *out = event.release();
  });
}

int mf_event_block(mf_event event, mf_stream stream) noexcept {
  return memfit::guarded([&] { event->event.block(stream->stream); });
}

void mf_event_free(mf_event event) noexcept { delete event; }
