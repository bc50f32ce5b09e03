#include <ATen/autocast_mode.h>

#include "memfit.h"

namespace {

c10::DeviceType type_of(int device) { return device < 0 ? at::kCPU : at::kCUDA; }

void set(c10::DeviceType type, const mf_autocast &state) {
  at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(state.dtype));
  at::autocast::set_autocast_cache_enabled(state.cache_enabled != 0);
  at::autocast::set_autocast_enabled(type, state.enabled != 0);
}

}  // namespace

int mf_autocast_get(int device, mf_autocast *out) noexcept {
  return memfit::guarded([&] {
    auto type = type_of(device);
    *out = {
        at::autocast::is_autocast_enabled(type),
        static_cast<int>(at::autocast::get_autocast_dtype(type)),
        at::autocast::is_autocast_cache_enabled()};
  });
}

int mf_autocast_enter(int device, const mf_autocast *state, mf_autocast *former) noexcept {
  if (mf_autocast_get(device, former) != 0) return 1;
  return memfit::guarded([&] {
    mf_autocast inner = *state;
    // A cast made without a graph would be served to operators that need one.
    inner.cache_enabled = inner.cache_enabled && c10::GradMode::is_enabled();
    set(type_of(device), inner);
    at::autocast::increment_nesting();
  });
}

void mf_autocast_leave(int device, const mf_autocast *former) noexcept {
  memfit::guarded([&] {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    set(type_of(device), *former);
  });
}

void mf_autocast_clear() noexcept {
  memfit::guarded([] { at::autocast::clear_cache(); });
}
