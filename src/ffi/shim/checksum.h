// A number that tells two tensors' bytes apart, for the .cpp files only.
#pragma once

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <optional>

namespace memfit {

// Σ (2i + 1) · bits(i) modulo 2⁶⁴ over the elements in row order: a swap of two elements
// changes it, as a sum alone would not. On an accelerator it stays there, so that only the
// comparison waits for the device.
class Checksum {
 public:
  Checksum() = default;
  explicit Checksum(const at::Tensor &tensor);
  // Waits for the device where there is one.
  bool operator!=(const Checksum &other) const;

 private:
  uint64_t value_ = 0;
  at::Tensor on_device_;
};

}  // namespace memfit
