#include <ATen/core/grad_mode.h>

#include "memfit.h"

size_t mf_tensor_identity(mf_tensor tensor) noexcept {
  return reinterpret_cast<size_t>(tensor->unsafeGetTensorImpl());
}

size_t mf_storage_identity(mf_tensor tensor) noexcept {
  if (!tensor->defined() || !tensor->has_storage()) return 0;
  return reinterpret_cast<size_t>(tensor->storage().unsafeGetStorageImpl());
}

uint64_t mf_tensor_version(mf_tensor tensor) noexcept {
  if (!tensor->defined() || tensor->is_inference()) return 0;
  return tensor->unsafeGetTensorImpl()->version_counter().current_version();
}

void mf_tensor_bump(mf_tensor tensor) noexcept {
  if (!tensor->defined() || tensor->is_inference()) return;
  tensor->unsafeGetTensorImpl()->bump_version();
}

int mf_tensor_put_back(mf_tensor tensor, mf_tensor bytes) noexcept {
  return memfit::guarded([&] {
    at::NoGradGuard no_grad;
    // variable_data() shares the storage and has a version counter of its own.
    tensor->variable_data().copy_(*bytes);
  });
}
