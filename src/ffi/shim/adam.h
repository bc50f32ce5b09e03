// Adam's rule, on rows of numbers.
#pragma once

#include "moments.h"
#include "numbers.h"

namespace memfit {

// Numbers of an update, in the precision it is computed in.
template <class Number>
struct Adam {
  Divide<Number> divide;
  Number shrink, decay, rise1, beta2, rise2, root, epsilon, step;

  Adam(const Scalars &now, const mf_adam &options) : divide(options.divisor) {
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

// The same, compiled for several instruction sets (moments.cpp).
void adam_row(
    float *parameter, const float *grad, float *first, float *second, int64_t length,
    const Adam<float> &k, bool decoupled);
void adam_row(
    double *parameter, const double *grad, double *first, double *second, int64_t length,
    const Adam<double> &k, bool decoupled);

}  // namespace memfit
