// Adam and SGD in one pass over memory. Plain loops: the compiler makes vectors of them.
#include "moments.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <type_traits>

#include "lanes.h"

// Without contraction each element's result is the same wherever it stands in a loop.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#ifndef __NO_MATH_ERRNO__
#warning "without -fno-math-errno a root sets errno, which makes Adam three times slower"
#endif
#endif

namespace {

constexpr int64_t kChunk = 1 << 14;

MEMFIT_INLINE double widen(double value) { return value; }
MEMFIT_INLINE float widen(float value) { return value; }
MEMFIT_INLINE float widen(c10::BFloat16 value) { return memfit::widen(value); }
MEMFIT_INLINE float widen(c10::Half value) { return value; }

MEMFIT_INLINE void narrow(double *to, double value) { *to = value; }
MEMFIT_INLINE void narrow(float *to, float value) { *to = value; }
MEMFIT_INLINE void narrow(c10::Half *to, float value) { *to = value; }
// To nearest, ties to even, without a branch; a NaN stays one.
MEMFIT_INLINE void narrow(c10::BFloat16 *to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->x = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

// Not std::sqrt, which is compiled with other options and stays a call.
MEMFIT_INLINE double root_of(double value) { return __builtin_sqrt(value); }
MEMFIT_INLINE float root_of(float value) { return __builtin_sqrtf(value); }

// Divides gradients. A power of two is multiplied by its inverse instead, which gives the
// same bits sooner.
template <class Number>
struct Divide {
  Number divisor, inverse;
  bool exact;

  explicit Divide(double by) : divisor(static_cast<Number>(by)), inverse(1 / divisor) {
    int exponent;
    exact = std::frexp(by, &exponent) == 0.5 && std::isnormal(inverse);
  }
  MEMFIT_INLINE Number operator()(Number grad) const {
    return exact ? grad * inverse : grad / divisor;
  }
};

// Numbers of an update, in the precision it is computed in.
template <class Number>
struct Adam {
  Divide<Number> divide;
  Number shrink, decay, rise1, beta2, rise2, root, epsilon, step;

  Adam(const memfit::Scalars &now, const mf_adam &options) : divide(options.divisor) {
    double steps = static_cast<double>(now.count + 1);
    shrink = static_cast<Number>(1 - now.lr * now.weight_decay);
    decay = static_cast<Number>(now.weight_decay);
    rise1 = static_cast<Number>(1 - options.beta1);
    beta2 = static_cast<Number>(options.beta2);
    rise2 = static_cast<Number>(1 - options.beta2);
    root = static_cast<Number>(1 / std::sqrt(1 - std::pow(options.beta2, steps)));
    epsilon = static_cast<Number>(options.epsilon);
    step = static_cast<Number>(now.lr / (1 - std::pow(options.beta1, steps)));
  }
};

template <bool kDecoupled, class Element, class Number>
MEMFIT_INLINE void adam(
    Element *__restrict parameter, const Element *__restrict grad, Element *__restrict first,
    Element *__restrict second, int64_t length, const Adam<Number> &k) {
  for (int64_t i = 0; i < length; ++i) {
    Number w = widen(parameter[i]);
    Number g = k.divide(widen(grad[i]));
    if (kDecoupled) {
      w *= k.shrink;
    } else {
      g += w * k.decay;
    }
    Number m = widen(first[i]);
    m += (g - m) * k.rise1;
    Number v = widen(second[i]) * k.beta2 + g * g * k.rise2;
    narrow(parameter + i, w - k.step * m / (root_of(v) * k.root + k.epsilon));
    narrow(first + i, m);
    narrow(second + i, v);
  }
}

template <class Number>
struct Sgd {
  Divide<Number> divide;
  Number decay, momentum, rise, lr;
  bool nesterov;

  Sgd(const memfit::Scalars &now, const mf_sgd &options) : divide(options.divisor) {
    decay = static_cast<Number>(now.weight_decay);
    momentum = static_cast<Number>(options.momentum);
    // A first step takes the gradient as momentum, undampened.
    rise = static_cast<Number>(now.count == 0 ? 1 : 1 - options.dampening);
    lr = static_cast<Number>(now.lr);
    nesterov = options.nesterov != 0;
  }
};

template <class Element, class Number>
MEMFIT_INLINE void sgd(
    Element *__restrict parameter, const Element *__restrict grad, Element *__restrict kept,
    int64_t length, const Sgd<Number> &k) {
  for (int64_t i = 0; i < length; ++i) {
    Number w = widen(parameter[i]);
    Number g = k.divide(widen(grad[i])) + w * k.decay;
    Number v = k.momentum * widen(kept[i]) + k.rise * g;
    narrow(kept + i, v);
    narrow(parameter + i, w - k.lr * (k.nesterov ? g + k.momentum * v : v));
  }
}

template <class Element, class Number>
MEMFIT_INLINE void plain(
    Element *__restrict parameter, const Element *__restrict grad, int64_t length,
    const Sgd<Number> &k) {
  for (int64_t i = 0; i < length; ++i) {
    Number w = widen(parameter[i]);
    narrow(parameter + i, w - k.lr * (k.divide(widen(grad[i])) + w * k.decay));
  }
}

// A function must be no template to be compiled for several instruction sets.
#define MEMFIT_KERNELS(Element, Number)                                                        \
  MEMFIT_CLONES void adamw_of(                                                                 \
      Element *p, const Element *g, Element *m, Element *v, int64_t n, const Adam<Number> &k) { \
    adam<true>(p, g, m, v, n, k);                                                              \
  }                                                                                            \
  MEMFIT_CLONES void adam_of(                                                                  \
      Element *p, const Element *g, Element *m, Element *v, int64_t n, const Adam<Number> &k) { \
    adam<false>(p, g, m, v, n, k);                                                             \
  }                                                                                            \
  MEMFIT_CLONES void sgd_of(                                                                   \
      Element *p, const Element *g, Element *m, int64_t n, const Sgd<Number> &k) {             \
    sgd(p, g, m, n, k);                                                                        \
  }                                                                                            \
  MEMFIT_CLONES void plain_of(Element *p, const Element *g, int64_t n, const Sgd<Number> &k) { \
    plain(p, g, n, k);                                                                         \
  }
MEMFIT_KERNELS(float, float)
MEMFIT_KERNELS(double, double)
MEMFIT_KERNELS(c10::BFloat16, float)
MEMFIT_KERNELS(c10::Half, float)
#undef MEMFIT_KERNELS

struct Chunk {
  size_t tensor;
  int64_t start, length;
};

// Calls body(typed pointer selector, chunk) for chunks of all tensors on all threads.
template <class Body>
void each_chunk(const std::vector<at::Tensor> &tensors, Body &&body) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int64_t start = 0; start < tensors[i].numel(); start += kChunk) {
      chunks.push_back({i, start, std::min(kChunk, tensors[i].numel() - start)});
    }
  }
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) body(chunks[i]);
  });
}

template <class Element>
Element *at_start(const std::vector<at::Tensor> &list, const Chunk &chunk) {
  return static_cast<Element *>(list[chunk.tensor].data_ptr()) + chunk.start;
}

template <class Element>
void adam_typed(const memfit::Lists &lists, const memfit::Scalars &now, const mf_adam &options) {
  using Number = std::conditional_t<std::is_same_v<Element, double>, double, float>;
  const Adam<Number> k(now, options);
  each_chunk(lists.parameters, [&](const Chunk &chunk) {
    auto *p = at_start<Element>(lists.parameters, chunk);
    const auto *g = at_start<Element>(lists.grads, chunk);
    auto *m = at_start<Element>(lists.states[0], chunk);
    auto *v = at_start<Element>(lists.states[1], chunk);
    if (options.decoupled) {
      adamw_of(p, g, m, v, chunk.length, k);
    } else {
      adam_of(p, g, m, v, chunk.length, k);
    }
  });
}

template <class Element>
void sgd_typed(const memfit::Lists &lists, const memfit::Scalars &now, const mf_sgd &options) {
  using Number = std::conditional_t<std::is_same_v<Element, double>, double, float>;
  const Sgd<Number> k(now, options);
  each_chunk(lists.parameters, [&](const Chunk &chunk) {
    auto *p = at_start<Element>(lists.parameters, chunk);
    const auto *g = at_start<Element>(lists.grads, chunk);
    if (lists.states[0].empty()) {
      plain_of(p, g, chunk.length, k);
    } else {
      sgd_of(p, g, at_start<Element>(lists.states[0], chunk), chunk.length, k);
    }
  });
}

}  // namespace

void memfit::adam_on_cpu(const Lists &lists, const Scalars &now, const mf_adam &options) {
  switch (lists.parameters[0].scalar_type()) {
    case at::kFloat: return adam_typed<float>(lists, now, options);
    case at::kDouble: return adam_typed<double>(lists, now, options);
    case at::kBFloat16: return adam_typed<c10::BFloat16>(lists, now, options);
    case at::kHalf: return adam_typed<c10::Half>(lists, now, options);
    default: TORCH_CHECK(false, "memfit: Adam moves Float, Double, BFloat16 and Half");
  }
}

void memfit::sgd_on_cpu(const Lists &lists, const Scalars &now, const mf_sgd &options) {
  switch (lists.parameters[0].scalar_type()) {
    case at::kFloat: return sgd_typed<float>(lists, now, options);
    case at::kDouble: return sgd_typed<double>(lists, now, options);
    case at::kBFloat16: return sgd_typed<c10::BFloat16>(lists, now, options);
    case at::kHalf: return sgd_typed<c10::Half>(lists, now, options);
    default: TORCH_CHECK(false, "memfit: SGD moves Float, Double, BFloat16 and Half");
  }
}
