// What optimizers with kernels of their own share: the parameters of a step, checked, and
// their elements row by row.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <type_traits>
#include <vector>

#include "lanes.h"
#include "memfit.h"
#include "numbers.h"

namespace memfit {

// A parameter that moves.
struct Taken {
  mf_moving *moving;
  at::Tensor parameter, grad;
};

// Those that need a gradient and have one.
inline std::vector<Taken> take(mf_moving *moving, size_t count) {
  std::vector<Taken> all;
  all.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor &parameter = *moving[i].parameter;
    if (!parameter.requires_grad() || !parameter.grad().defined()) continue;
    const at::Tensor &grad = parameter.grad();
    TORCH_CHECK(
        grad.layout() == at::kStrided && parameter.layout() == at::kStrided,
        "memfit: a sparse gradient; give the embedding dense gradients");
    TORCH_CHECK(!parameter.is_inference(), "memfit: a parameter made in inference mode");
    TORCH_CHECK(
        grad.scalar_type() == parameter.scalar_type() && grad.sizes() == parameter.sizes() &&
            grad.is_cpu() && parameter.is_cpu(),
        "memfit: a gradient of shape ", grad.sizes(), ", ", grad.scalar_type(), " on ",
        grad.device(), " for a parameter of shape ", parameter.sizes(), ", ",
        parameter.scalar_type(), " on ", parameter.device());
    TORCH_CHECK(
        at::has_internal_overlap(parameter) != at::MemOverlap::Yes,
        "memfit: elements of a parameter share memory; train the tensor it was expanded from");
    all.push_back({&moving[i], parameter, grad});
  }
  return all;
}

// fp64 parameters are computed in fp64, all others in fp32.
inline at::ScalarType wide_type(const at::Tensor &parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_state(const Taken &taken, mf_tensor state, int64_t elements) {
  TORCH_CHECK(state != nullptr, "memfit: a state is missing");
  TORCH_CHECK(
      state->is_cpu() && state->is_contiguous() && state->numel() == elements &&
          state->scalar_type() == wide_type(taken.parameter),
      "memfit: optimizer state of shape ", state->sizes(), ", ", state->scalar_type(), " on ",
      state->device(), " for a parameter of shape ", taken.parameter.sizes(), ", ",
      taken.parameter.scalar_type());
}

inline void count_moved(const Taken &taken, size_t *moved) {
  taken.parameter.unsafeGetTensorImpl()->bump_version();
  for (mf_tensor state : taken.moving->state) {
    if (state != nullptr) state->unsafeGetTensorImpl()->bump_version();
  }
  taken.moving->count += 1;
  *moved += 1;
}

template <class Element>
using Wide = std::conditional_t<std::is_same_v<Element, double>, double, float>;

MEMFIT_INLINE Double16 load(const double *from) {
  Double16 lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
MEMFIT_INLINE void store(double *to, const Double16 &lanes) { std::memcpy(to, &lanes, sizeof lanes); }

template <class Lanes>
MEMFIT_INLINE double sum_of(const Lanes &lanes) {
  double sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += lanes[lane];
  return sum;
}

// How elements of a part of a parameter are rounded; `index` is that of the first.
struct Rounder {
  bool random = false;
  Draw draw{0, 0};
  uint32_t index = 0;
};

inline Rounder rounder_of(const mf_moving &moving, const mf_rounding &rounding, int64_t start) {
  if (!rounding.weights) return {};
  auto index = static_cast<uint64_t>(start);
  Draw draw = draw_of(rounding.seed, moving.key, moving.count, 0, index >> 32);
  return {true, draw, static_cast<uint32_t>(index)};
}

// A strided tensor as rows along its last dimension, in the order of its elements.
template <class Element>
class Rows {
 public:
  explicit Rows(const at::Tensor &tensor) : data_(static_cast<Element *>(tensor.data_ptr())) {
    int64_t dims = tensor.dim();
    stride = dims == 0 ? 1 : tensor.stride(dims - 1);
    cols = dims == 0 ? 1 : tensor.size(dims - 1);
    if (cols == 1) stride = 1;
    for (int64_t d = 0; d + 1 < dims; ++d) {
      sizes_.push_back(tensor.size(d));
      strides_.push_back(tensor.stride(d));
    }
    even_ = tensor.is_contiguous();
  }

  // The first element of a row.
  Element *row(int64_t index) const {
    if (even_) return data_ + index * cols;
    int64_t offset = 0;
    for (size_t d = sizes_.size(); d-- > 0;) {
      offset += index % sizes_[d] * strides_[d];
      index /= sizes_[d];
    }
    return data_ + offset;
  }

  int64_t stride;  // from one element of a row to the next
  int64_t cols;

 private:
  Element *data_;
  std::vector<int64_t> sizes_, strides_;
  bool even_;
};

// Most elements of a row that are worked on at once; where they are not side by side they are
// gathered into a buffer of this size.
constexpr int64_t kPart = 1024;

// Part of a row, side by side: in its place, or a copy that `put_back` returns.
template <class Element>
class Part {
 public:
  Element *of(const Rows<Element> &rows, int64_t row, int64_t from, int64_t length) {
    first_ = rows.row(row) + from * rows.stride;
    stride_ = rows.stride;
    length_ = length;
    if (stride_ == 1) return first_;
    for (int64_t i = 0; i < length; ++i) buffer_[i] = first_[i * stride_];
    return buffer_;
  }
  void put_back() {
    if (stride_ == 1) return;
    for (int64_t i = 0; i < length_; ++i) first_[i * stride_] = buffer_[i];
  }

 private:
  Element buffer_[kPart];
  Element *first_;
  int64_t stride_, length_;
};

}  // namespace memfit
