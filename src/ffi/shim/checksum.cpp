#include "checksum.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cstring>

namespace memfit {
namespace {

template <class Bits>
uint64_t sum_of(const void *data, int64_t count) {
  const char *bytes = static_cast<const char *>(data);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * sizeof(Bits), sizeof(Bits));
    sum += (2 * static_cast<uint64_t>(i) + 1) * bits;
  }
  return sum;
}

uint64_t on_host(const at::Tensor &tensor) {
  switch (tensor.element_size()) {
    case 1: return sum_of<uint8_t>(tensor.const_data_ptr(), tensor.numel());
    case 2: return sum_of<uint16_t>(tensor.const_data_ptr(), tensor.numel());
    case 4: return sum_of<uint32_t>(tensor.const_data_ptr(), tensor.numel());
    default: return sum_of<uint64_t>(tensor.const_data_ptr(), tensor.nbytes() / 8);
  }
}

// In pieces, so that the 8-byte copies stay small.
at::Tensor on_device(const at::Tensor &tensor) {
  constexpr int64_t piece = 1 << 20;
  static constexpr at::ScalarType as_bits[] = {at::kByte, at::kShort, at::kInt, at::kLong};
  int64_t size = std::min<int64_t>(tensor.element_size(), 8);
  at::Tensor bits = tensor.view(as_bits[size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : 3]).view(-1);
  auto options = bits.options().dtype(at::kLong);
  at::Tensor sum = at::arange(0, 1, options).squeeze(0);
  for (int64_t from = 0; from < bits.numel(); from += piece) {
    int64_t to = std::min(from + piece, bits.numel());
    at::Tensor weights = at::arange(2 * from + 1, 2 * to + 1, 2, options);
    sum.add_(weights.mul_(bits.slice(0, from, to)).sum());
  }
  return sum;
}

}  // namespace

Checksum::Checksum(const at::Tensor &tensor) {
  if (tensor.layout() != at::kStrided || tensor.numel() == 0 || tensor.is_meta()) return;
  at::Tensor plain = tensor.tensor_data().contiguous();
  if (plain.is_complex()) plain = at::view_as_real(plain.resolve_conj()).contiguous();
  if (plain.is_cpu()) {
    value_ = on_host(plain);
  } else {
    on_device_ = on_device(plain);
  }
}

bool Checksum::operator!=(const Checksum &other) const {
  if (!on_device_.defined() || !other.on_device_.defined()) return value_ != other.value_;
  return !on_device_.equal(other.on_device_);
}

}  // namespace memfit
