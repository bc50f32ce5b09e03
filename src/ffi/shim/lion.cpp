// Lion: a step of one size in the direction of an average.
#include "mixed.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

namespace {

using memfit::Divide;
using memfit::Row;
using memfit::Walked;

template <class Number>
struct Lion {
  Divide<Number> divide;
  Number shrink, lr, rise1, rise2;

  Lion(const mf_moving &now, const mf_lion &options) : divide(options.divisor) {
    shrink = static_cast<Number>(1 - now.lr * now.weight_decay);
    lr = static_cast<Number>(now.lr);
    rise1 = static_cast<Number>(1 - options.beta1);
    rise2 = static_cast<Number>(1 - options.beta2);
  }
};

template <class Number>
MEMFIT_INLINE void lion(
    Number *__restrict parameter, const Number *__restrict grad, Number *__restrict momentum,
    int64_t length, const Lion<Number> &k) {
  for (int64_t i = 0; i < length; ++i) {
    Number g = k.divide(grad[i]);
    Number m = momentum[i];
    Number between = m + (g - m) * k.rise1;
    // What is neither above nor below zero is the sign itself: zero, or a NaN to be seen.
    Number sign = between > 0 ? Number(1) : between;
    sign = between < 0 ? Number(-1) : sign;
    parameter[i] = parameter[i] * k.shrink - k.lr * sign;
    momentum[i] = m + (g - m) * k.rise2;
  }
}

// A function must be no template to be compiled for several instruction sets.
MEMFIT_CLONES void lion_row(
    float *p, const float *g, float *m, int64_t n, const Lion<float> &k) {
  lion(p, g, m, n, k);
}
MEMFIT_CLONES void lion_row(
    double *p, const double *g, double *m, int64_t n, const Lion<double> &k) {
  lion(p, g, m, n, k);
}

template <class Number>
void move(
    const Walked &of, int64_t start, int64_t length, const mf_lion &options,
    const mf_rounding &rounding) {
  const Lion<Number> k(*of.moving, options);
  Row<Number> weight, slope, momentum;
  Number *w = weight.read(of, of.weight, start, length);
  const Number *g = slope.read(of, of.slope, start, length);
  Number *m = momentum.read(of, of.kept[0], start, length);
  lion_row(w, g, m, length, k);
  weight.write(of, of.weight, start, length, memfit::of_weights(rounding));
  momentum.write(of, of.kept[0], start, length, {true, rounding.seed, memfit::kFirst});
}

}  // namespace

int mf_lion_step(
    mf_moving *moving, size_t count, const mf_lion *options, const mf_rounding *rounding,
    size_t *moved) noexcept {
  return memfit::guarded([&] {
    *moved = 0;
    auto never = [](const mf_moving &) { return false; };
    auto walked = memfit::walked_of(moving, count, 1, never);
    memfit::walk(walked, moved, [&](const Walked &of, int64_t start, int64_t length) {
      if (of.weight.type == at::kDouble) return move<double>(of, start, length, *options, *rounding);
      move<float>(of, start, length, *options, *rounding);
    });
  });
}
