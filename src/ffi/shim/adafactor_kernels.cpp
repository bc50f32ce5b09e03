// The loops of Adafactor, for every dtype and several instruction sets.
#include "adafactor.h"

// Without contraction each element's result is the same wherever it stands in a loop.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

namespace memfit {
namespace adafactor {
namespace {

template <class Element, class Number>
MEMFIT_INLINE Found squares(
    const Element *g, const Element *w, Number *column, int64_t n, const Divide<Number> &divide) {
  Double16 grads = {}, weights = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    auto grad = divide(load(g + i));
    auto value = load(w + i);
    store(column + i, load(column + i) + grad * grad);
    // In fp32 the square of a large weight overflows.
    auto wide = __builtin_convertvector(grad, Double16);
    auto wide_value = __builtin_convertvector(value, Double16);
    grads += wide * wide;
    weights += wide_value * wide_value;
  }
  Found found{sum_of(grads), sum_of(weights)};
  for (; i < n; ++i) {
    Number grad = divide(Number(widen(g[i]))), value = widen(w[i]);
    column[i] += grad * grad;
    found.update += double(grad) * grad;
    found.parameter += double(value) * value;
  }
  return found;
}

template <class Element, class Number>
MEMFIT_INLINE double updates(
    const Element *g, const Number *column, int64_t n, const Divide<Number> &divide, Number row) {
  decltype(load(column)) sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    auto update = divide(load(g + i)) * row * load(column + i);
    sums += update * update;
  }
  double sum = sum_of(sums);
  for (; i < n; ++i) {
    Number update = divide(Number(widen(g[i]))) * row * column[i];
    sum += update * update;
  }
  return sum;
}

// A vector's second moment, and the update's and the parameter's squares.
template <class Element, class Number>
MEMFIT_INLINE Found moment(
    const Element *g, const Element *w, Number *v, int64_t n, const Divide<Number> &divide,
    Number beta, Number rise, Number epsilon) {
  double update = 0, weight = 0;
  for (int64_t i = 0; i < n; ++i) {
    Number grad = divide(Number(widen(g[i]))), value = widen(w[i]);
    v[i] = v[i] * beta + (grad * grad + epsilon) * rise;
    update += double(grad * grad) / v[i];
    weight += double(value) * value;
  }
  return {update, weight};
}

template <bool kMomentum, bool kRandom, class Element, class Number>
MEMFIT_INLINE void apply_one(
    Element *w, Number update, Number *m, int64_t i, const Step<Number> &k) {
  update *= k.clip;
  if (kMomentum) m[i] = update = m[i] * k.beta1 + update * k.rise1;
  Number moved = Number(widen(w[i])) * k.shrink - k.rate * update;
  if (kRandom) {
    narrow(w + i, moved, random_of(k.round.draw, k.round.index + uint32_t(i)));
  } else {
    narrow(w + i, moved);
  }
}

template <bool kMomentum, bool kRandom, class Element, class Number>
MEMFIT_INLINE void apply(
    Element *__restrict w, const Element *__restrict g, const Number *__restrict column,
    Number *__restrict m, int64_t n, const Step<Number> &k) {
  for (int64_t i = 0; i < n; ++i) {
    Number update = k.divide(Number(widen(g[i]))) * k.row * column[i];
    apply_one<kMomentum, kRandom>(w, update, m, i, k);
  }
}

template <bool kMomentum, bool kRandom, class Element, class Number>
MEMFIT_INLINE void apply_vector(
    Element *__restrict w, const Element *__restrict g, const Number *__restrict v,
    Number *__restrict m, int64_t n, const Step<Number> &k) {
  for (int64_t i = 0; i < n; ++i) {
    Number update = k.divide(Number(widen(g[i]))) / root_of(v[i]);
    apply_one<kMomentum, kRandom>(w, update, m, i, k);
  }
}

}  // namespace

// A function must be no template to be compiled for several instruction sets.
#define MEMFIT_KERNELS(Element, Number)                                                          \
  MEMFIT_CLONES Found squares_of(                                                                \
      const Element *g, const Element *w, Number *c, int64_t n, const Divide<Number> &d) {      \
    return squares(g, w, c, n, d);                                                               \
  }                                                                                              \
  MEMFIT_CLONES double updates_of(                                                               \
      const Element *g, const Number *c, int64_t n, const Divide<Number> &d, Number row) {      \
    return updates(g, c, n, d, row);                                                             \
  }                                                                                              \
  MEMFIT_CLONES Found moment_of(                                                                 \
      const Element *g, const Element *w, Number *v, int64_t n, const Divide<Number> &d,        \
      Number beta, Number rise, Number epsilon) {                                                \
    return moment(g, w, v, n, d, beta, rise, epsilon);                                           \
  }                                                                                              \
  MEMFIT_CLONES void apply_of(                                                                   \
      Element *w, const Element *g, const Number *c, Number *m, int64_t n,                       \
      const Step<Number> &k) {                                                                   \
    if (m != nullptr && k.round.random) return apply<true, true>(w, g, c, m, n, k);              \
    if (m != nullptr) return apply<true, false>(w, g, c, m, n, k);                               \
    if (k.round.random) return apply<false, true>(w, g, c, m, n, k);                             \
    apply<false, false>(w, g, c, m, n, k);                                                       \
  }                                                                                              \
  MEMFIT_CLONES void apply_vector_of(                                                            \
      Element *w, const Element *g, const Number *v, Number *m, int64_t n,                       \
      const Step<Number> &k) {                                                                   \
    if (m != nullptr && k.round.random) return apply_vector<true, true>(w, g, v, m, n, k);       \
    if (m != nullptr) return apply_vector<true, false>(w, g, v, m, n, k);                        \
    if (k.round.random) return apply_vector<false, true>(w, g, v, m, n, k);                      \
    apply_vector<false, false>(w, g, v, m, n, k);                                                \
  }
MEMFIT_KERNELS(float, float)
MEMFIT_KERNELS(double, double)
MEMFIT_KERNELS(c10::BFloat16, float)
MEMFIT_KERNELS(c10::Half, float)
#undef MEMFIT_KERNELS

}  // namespace adafactor
}  // namespace memfit
