// Adam and SGD in one pass over memory. Plain loops: the compiler makes vectors of them.
#include "moments.h"

#include <algorithm>
#include <type_traits>

#include "adam.h"
#include "parallel.h"

// Without contraction each element's result is the same wherever it stands in a loop.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#ifndef __NO_MATH_ERRNO__
#warning "without -fno-math-errno a root sets errno, which makes Adam three times slower"
#endif
#endif

namespace {

constexpr int64_t kChunk = 1 << 14;

using memfit::Adam;
using memfit::Divide;
using memfit::narrow;
using memfit::widen;

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
    memfit::adam<true>(p, g, m, v, n, k);                                                      \
  }                                                                                            \
  MEMFIT_CLONES void adam_of(                                                                  \
      Element *p, const Element *g, Element *m, Element *v, int64_t n, const Adam<Number> &k) { \
    memfit::adam<false>(p, g, m, v, n, k);                                                     \
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
#undef MEMFIT_KERNELS

// Numbers of half-precision elements, a row at a time: loops that change the width are kept
// apart from those that compute, or the compiler makes no vectors of either.
constexpr int64_t kRow = 1024;

template <class Element>
class Row {
 public:
  MEMFIT_INLINE Row(const Element *from, int64_t length) {
    for (int64_t i = 0; i < length; ++i) numbers_[i] = widen(from[i]);
  }
  MEMFIT_INLINE void put(Element *to, int64_t length) const {
    for (int64_t i = 0; i < length; ++i) narrow(to + i, numbers_[i]);
  }
  MEMFIT_INLINE float *data() { return numbers_; }

 private:
  alignas(64) float numbers_[kRow];
};

template <bool kDecoupled, class Element>
MEMFIT_INLINE void adam_rows(
    Element *p, const Element *g, Element *m, Element *v, int64_t n, const Adam<float> &k) {
  for (; n > 0; n -= kRow, p += kRow, g += kRow, m += kRow, v += kRow) {
    int64_t some = std::min(n, kRow);
    Row<Element> weight(p, some), slope(g, some), first(m, some), second(v, some);
    memfit::adam<kDecoupled>(weight.data(), slope.data(), first.data(), second.data(), some, k);
    weight.put(p, some);
    first.put(m, some);
    second.put(v, some);
  }
}

template <class Element>
MEMFIT_INLINE void sgd_rows(
    Element *p, const Element *g, Element *m, int64_t n, const Sgd<float> &k) {
  for (; n > 0; n -= kRow, p += kRow, g += kRow, m += kRow) {
    int64_t some = std::min(n, kRow);
    Row<Element> weight(p, some), slope(g, some), momentum(m, some);
    sgd(weight.data(), slope.data(), momentum.data(), some, k);
    weight.put(p, some);
    momentum.put(m, some);
  }
}

template <class Element>
MEMFIT_INLINE void plain_rows(Element *p, const Element *g, int64_t n, const Sgd<float> &k) {
  for (; n > 0; n -= kRow, p += kRow, g += kRow) {
    int64_t some = std::min(n, kRow);
    Row<Element> weight(p, some), slope(g, some);
    plain(weight.data(), slope.data(), some, k);
    weight.put(p, some);
  }
}

#define MEMFIT_ROWS(Element)                                                                   \
  MEMFIT_CLONES void adamw_of(                                                                 \
      Element *p, const Element *g, Element *m, Element *v, int64_t n, const Adam<float> &k) { \
    adam_rows<true>(p, g, m, v, n, k);                                                         \
  }                                                                                            \
  MEMFIT_CLONES void adam_of(                                                                  \
      Element *p, const Element *g, Element *m, Element *v, int64_t n, const Adam<float> &k) { \
    adam_rows<false>(p, g, m, v, n, k);                                                        \
  }                                                                                            \
  MEMFIT_CLONES void sgd_of(                                                                   \
      Element *p, const Element *g, Element *m, int64_t n, const Sgd<float> &k) {              \
    sgd_rows(p, g, m, n, k);                                                                   \
  }                                                                                            \
  MEMFIT_CLONES void plain_of(Element *p, const Element *g, int64_t n, const Sgd<float> &k) {  \
    plain_rows(p, g, n, k);                                                                    \
  }
MEMFIT_ROWS(c10::BFloat16)
MEMFIT_ROWS(c10::Half)
#undef MEMFIT_ROWS

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
  memfit::parallel(static_cast<int64_t>(chunks.size()), [&](int64_t from, int64_t to) {
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

void memfit::adam_row(
    float *parameter, const float *grad, float *first, float *second, int64_t length,
    const Adam<float> &k, bool decoupled) {
  if (decoupled) return adamw_of(parameter, grad, first, second, length, k);
  adam_of(parameter, grad, first, second, length, k);
}

void memfit::adam_row(
    double *parameter, const double *grad, double *first, double *second, int64_t length,
    const Adam<double> &k, bool decoupled) {
  if (decoupled) return adamw_of(parameter, grad, first, second, length, k);
  adam_of(parameter, grad, first, second, length, k);
}

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
