// A window's gradients join a momentum one by one, and the momentum moves the parameter.
#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <type_traits>

#include "lanes.h"
#include "memfit.h"

// Without contraction each element's result is the same wherever it stands in a loop.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

namespace {

using memfit::widen;
MEMFIT_INLINE double widen(double value) { return value; }

template <class Number>
struct Join {
  Number keep, rise, decay, divisor;

  explicit Join(const mf_join &from)
      : keep(static_cast<Number>(from.keep)),
        rise(static_cast<Number>(from.rise)),
        decay(static_cast<Number>(from.decay)),
        divisor(static_cast<Number>(from.divisor)) {}
};

template <class Element, class Number>
MEMFIT_INLINE void join(Element *v, const Element *g, const Element *w, const Join<Number> &k) {
  Number total = widen(*g) / k.divisor + k.decay * Number(widen(*w));
  *v = static_cast<Element>(k.keep * Number(widen(*v)) + k.rise * total);
}

template <class Element, class Number>
MEMFIT_INLINE void move(Element *w, const Element *v, Number lr) {
  *w = static_cast<Element>(Number(widen(*w)) - lr * Number(widen(*v)));
}

// Functions for elements that lie side by side: no template is compiled for several
// instruction sets.
#define MEMFIT_KERNELS(Element, Number)                                                       \
  MEMFIT_CLONES void join_dense(                                                              \
      Element *__restrict v, const Element *__restrict g, const Element *__restrict w,        \
      int64_t n, const Join<Number> &k) {                                                     \
    for (int64_t i = 0; i < n; ++i) join(v + i, g + i, w + i, k);                             \
  }                                                                                           \
  MEMFIT_CLONES void move_dense(                                                              \
      Element *__restrict w, const Element *__restrict v, int64_t n, Number lr) {             \
    for (int64_t i = 0; i < n; ++i) move(w + i, v + i, lr);                                   \
  }
MEMFIT_KERNELS(float, float)
MEMFIT_KERNELS(double, double)
MEMFIT_KERNELS(c10::BFloat16, float)
MEMFIT_KERNELS(c10::Half, float)
#undef MEMFIT_KERNELS

template <class Element>
using NumberOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

template <class Element>
Element *at(char *const *data, const int64_t *strides, int which, int64_t i) {
  return reinterpret_cast<Element *>(data[which] + i * strides[which]);
}

// Calls row(pointers, strides of elements, count) for rows of elements of up to three tensors.
template <int kTensors, class Row>
void each_row(at::TensorIterator &lists, const Row &row) {
  lists.for_each([&](char **data, const int64_t *strides, int64_t n, int64_t rows) {
    char *start[kTensors];
    for (int64_t j = 0; j < rows; ++j) {
      for (int t = 0; t < kTensors; ++t) start[t] = data[t] + j * strides[kTensors + t];
      row(start, strides, n);
    }
  });
}

template <class Element>
void join_all(at::TensorIterator &lists, const mf_join &options) {
  const Join<NumberOf<Element>> k(options);
  constexpr int64_t step = sizeof(Element);
  each_row<3>(lists, [&](char *const *data, const int64_t *strides, int64_t n) {
    auto of = [&](int which, int64_t i) { return at<Element>(data, strides, which, i); };
    if (strides[0] == step && strides[1] == step && strides[2] == step) {
      return join_dense(of(0, 0), of(1, 0), of(2, 0), n, k);
    }
    for (int64_t i = 0; i < n; ++i) join(of(0, i), of(1, i), of(2, i), k);
  });
}

template <class Element>
void move_all(at::TensorIterator &lists, double by) {
  const auto lr = static_cast<NumberOf<Element>>(by);
  constexpr int64_t step = sizeof(Element);
  each_row<2>(lists, [&](char *const *data, const int64_t *strides, int64_t n) {
    auto of = [&](int which, int64_t i) { return at<Element>(data, strides, which, i); };
    if (strides[0] == step && strides[1] == step) return move_dense(of(0, 0), of(1, 0), n, lr);
    for (int64_t i = 0; i < n; ++i) move(of(0, i), of(1, i), lr);
  });
}

// Goes over elements wherever they lie, without memory of its own.
at::TensorIterator over(const at::Tensor &to, std::initializer_list<at::Tensor> from) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).resize_outputs(false).check_all_same_dtype(true);
  config.add_owned_output(to);
  for (const at::Tensor &tensor : from) config.add_owned_const_input(tensor);
  return config.build();
}

template <class Body>
void typed(at::ScalarType type, Body &&body) {
  switch (type) {
    case at::kFloat: return body(float{});
    case at::kDouble: return body(double{});
    case at::kBFloat16: return body(c10::BFloat16{});
    case at::kHalf: return body(c10::Half{});
    default: TORCH_CHECK(false, "memfit: SGD moves Float, Double, BFloat16 and Half");
  }
}

void check_alike(const at::Tensor &parameter, const at::Tensor &other, const char *what) {
  TORCH_CHECK(
      other.layout() == at::kStrided && other.sizes() == parameter.sizes() &&
          other.scalar_type() == parameter.scalar_type() && other.device() == parameter.device(),
      "memfit: ", what, " of shape ", other.sizes(), ", ", other.scalar_type(),
      " for a parameter of shape ", parameter.sizes(), ", ", parameter.scalar_type());
}

}  // namespace

int mf_momentum_join(
    mf_tensor parameter, mf_tensor grad, mf_tensor momentum, const mf_join *options) noexcept {
  return memfit::guarded([&] {
    at::AutoDispatchBelowADInplaceOrView below;
    check_alike(*parameter, *grad, "a gradient");
    check_alike(*parameter, *momentum, "a momentum");
    if (parameter->is_cpu()) {
      auto lists = over(*momentum, {*grad, *parameter});
      typed(parameter->scalar_type(), [&](auto element) {
        join_all<decltype(element)>(lists, *options);
      });
    } else {
      momentum->mul_(options->keep).add_(*grad, options->rise / options->divisor);
      if (options->decay != 0) momentum->add_(*parameter, options->rise * options->decay);
    }
    momentum->unsafeGetTensorImpl()->bump_version();
  });
}

int mf_momentum_move(mf_tensor parameter, mf_tensor momentum, double lr) noexcept {
  return memfit::guarded([&] {
    at::AutoDispatchBelowADInplaceOrView below;
    check_alike(*parameter, *momentum, "a momentum");
    TORCH_CHECK(!parameter->is_inference(), "memfit: a parameter made in inference mode");
    if (parameter->is_cpu()) {
      auto lists = over(*parameter, {*momentum});
      typed(parameter->scalar_type(), [&](auto element) {
        move_all<decltype(element)>(lists, lr);
      });
    } else {
      parameter->add_(*momentum, -lr);
    }
    parameter->unsafeGetTensorImpl()->bump_version();
    mf_autocast_clear();
  });
}
