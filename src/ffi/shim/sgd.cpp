// SGD whose weights are rounded at random, or shrink apart from the gradient.
#include "mixed.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

namespace {

using memfit::Divide;
using memfit::Row;
using memfit::Walked;

template <class Number>
struct Sgd {
  Divide<Number> divide;
  Number shrink, decay, momentum, rise, lr;
  bool nesterov;

  Sgd(const mf_moving &now, const mf_sgd &options, bool decoupled) : divide(options.divisor) {
    shrink = static_cast<Number>(decoupled ? 1 - now.lr * now.weight_decay : 1);
    decay = static_cast<Number>(decoupled ? 0 : now.weight_decay);
    momentum = static_cast<Number>(options.momentum);
    // A first step takes the gradient as momentum, undampened.
    rise = static_cast<Number>(now.count == 0 ? 1 : 1 - options.dampening);
    lr = static_cast<Number>(now.lr);
    nesterov = options.nesterov != 0;
  }
};

// In the order of the plain kernel's operations.
template <class Number>
MEMFIT_INLINE void sgd(
    Number *__restrict parameter, const Number *__restrict grad, Number *__restrict kept,
    int64_t length, const Sgd<Number> &k) {
  for (int64_t i = 0; i < length; ++i) {
    Number w = parameter[i];
    Number g = k.divide(grad[i]) + w * k.decay;
    Number v = k.momentum * kept[i] + k.rise * g;
    kept[i] = v;
    parameter[i] = w * k.shrink - k.lr * (k.nesterov ? g + k.momentum * v : v);
  }
}

template <class Number>
MEMFIT_INLINE void plain(
    Number *__restrict parameter, const Number *__restrict grad, int64_t length,
    const Sgd<Number> &k) {
  for (int64_t i = 0; i < length; ++i) {
    Number w = parameter[i];
    parameter[i] = w * k.shrink - k.lr * (k.divide(grad[i]) + w * k.decay);
  }
}

// A function must be no template to be compiled for several instruction sets.
#define MEMFIT_KERNELS(Number)                                                            \
  MEMFIT_CLONES void sgd_row(                                                             \
      Number *p, const Number *g, Number *m, int64_t n, const Sgd<Number> &k) {           \
    sgd(p, g, m, n, k);                                                                   \
  }                                                                                       \
  MEMFIT_CLONES void plain_row(Number *p, const Number *g, int64_t n, const Sgd<Number> &k) { \
    plain(p, g, n, k);                                                                    \
  }
MEMFIT_KERNELS(float)
MEMFIT_KERNELS(double)
#undef MEMFIT_KERNELS

template <class Number>
void move(
    const Walked &of, int64_t start, int64_t length, const Sgd<Number> &k,
    const mf_rounding &rounding) {
  Row<Number> weight, slope, momentum;
  Number *w = weight.read(of, of.weight, start, length);
  const Number *g = slope.read(of, of.slope, start, length);
  if (of.kept[0].data == nullptr) {
    plain_row(w, g, length, k);
  } else {
    Number *m = momentum.read(of, of.kept[0], start, length);
    sgd_row(w, g, m, length, k);
    momentum.write(of, of.kept[0], start, length, {true, rounding.seed, memfit::kFirst});
  }
  weight.write(of, of.weight, start, length, memfit::of_weights(rounding));
}

}  // namespace

int mf_sgd_mixed_step(
    mf_moving *moving, size_t count, const mf_sgd *options, int decoupled,
    const mf_rounding *rounding, size_t *moved) noexcept {
  return memfit::guarded([&] {
    *moved = 0;
    auto never = [](const mf_moving &) { return false; };
    auto walked = memfit::walked_of(moving, count, options->momentum == 0 ? 0 : 1, never);
    memfit::walk(walked, moved, [&](const Walked &of, int64_t start, int64_t length) {
      if (of.weight.type == at::kDouble) {
        return move<double>(of, start, length, {*of.moving, *options, decoupled != 0}, *rounding);
      }
      move<float>(of, start, length, {*of.moving, *options, decoupled != 0}, *rounding);
    });
  });
}
