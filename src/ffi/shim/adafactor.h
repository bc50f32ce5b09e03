// Adafactor's arithmetic on part of a row or of a vector, side by side in memory.
#pragma once

#include <cstdint>

#include "moving.h"

namespace memfit {
namespace adafactor {

// Sums of squares of the update before it is clipped and of the parameter.
struct Found {
  double update, parameter;
};

// What the last pass multiplies by.
template <class Number>
struct Step {
  Divide<Number> divide;
  Number row;     // of the second moment: its row's factor
  Number clip;    // of the update
  Number rate;    // of the parameter's size
  Number shrink;  // of the parameter
  Number beta1, rise1;
  Rounder round;
};

// squares_of adds a row's squares to those of its columns, and tells the sums of the
// gradient's and the parameter's. updates_of tells the sum of an update's squares; `column`
// has the factors of the second moment. moment_of moves a vector's second moment. The last
// two move the parameter; m, the momentum, may be null.
#define MEMFIT_KERNELS(Element, Number)                                                          \
  Found squares_of(                                                                              \
      const Element *g, const Element *w, Number *column, int64_t n, const Divide<Number> &d);  \
  double updates_of(                                                                             \
      const Element *g, const Number *column, int64_t n, const Divide<Number> &d, Number row);  \
  Found moment_of(                                                                               \
      const Element *g, const Element *w, Number *v, int64_t n, const Divide<Number> &d,        \
      Number beta, Number rise, Number epsilon);                                                 \
  void apply_of(                                                                                 \
      Element *w, const Element *g, const Number *column, Number *m, int64_t n,                  \
      const Step<Number> &k);                                                                    \
  void apply_vector_of(                                                                          \
      Element *w, const Element *g, const Number *v, Number *m, int64_t n,                       \
      const Step<Number> &k);
MEMFIT_KERNELS(float, float)
MEMFIT_KERNELS(double, double)
MEMFIT_KERNELS(c10::BFloat16, float)
MEMFIT_KERNELS(c10::Half, float)
#undef MEMFIT_KERNELS

}  // namespace adafactor
}  // namespace memfit
