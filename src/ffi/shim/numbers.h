// Elements of any dtype as the numbers they are computed in, and back: to nearest, or up or
// down at random. Without branches, so that the compiler makes vectors of loops over them.
#pragma once

#include <cmath>
#include <type_traits>

#include "lanes.h"

namespace memfit {

MEMFIT_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
MEMFIT_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

MEMFIT_INLINE double widen(double value) { return value; }

MEMFIT_INLINE void narrow(double *to, double value) { *to = value; }
MEMFIT_INLINE void narrow(float *to, float value) { *to = value; }
// To nearest, ties to even, without a branch; a NaN stays one.
MEMFIT_INLINE void narrow(c10::BFloat16 *to, float value) {
  uint32_t bits = bits_of(value);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->x = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

constexpr uint32_t kRebias = 112u << 23;      // a half's exponent is that much shorter
constexpr uint32_t kLeastNormal = 0x38800000;  // 2^-14
constexpr uint32_t kBeyondHalf = 0x47800000;   // 2^16

// The half of a magnitude: `normal` is that of one from 2^-14 on, `tiny` of a smaller one.
MEMFIT_INLINE void half_of(c10::Half *to, uint32_t bits, uint32_t normal, uint32_t tiny) {
  uint32_t magnitude = bits & 0x7fffffff;
  uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  uint32_t half = magnitude < kLeastNormal ? tiny : normal;
  half = magnitude >= kBeyondHalf ? large : half;
  to->x = static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}

MEMFIT_INLINE void narrow(c10::Half *to, float value) {
  uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude - kRebias + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // One half has a unit in the last place of 2^-24, the smallest half.
  uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  half_of(to, bits, normal, tiny);
}

// Up with the probability of the part that is cut off: what is exact stays. 16 random bits
// decide, for halves 13.
MEMFIT_INLINE void narrow(double *to, double value, uint32_t) { *to = value; }
MEMFIT_INLINE void narrow(float *to, float value, uint32_t) { *to = value; }
MEMFIT_INLINE void narrow(c10::BFloat16 *to, float value, uint32_t random) {
  uint32_t rounded = (bits_of(value) + (random >> 16)) >> 16;
  to->x = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}
MEMFIT_INLINE void narrow(c10::Half *to, float value, uint32_t random) {
  uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude - kRebias + (random >> 19)) >> 13;
  float units = float_of(magnitude) * 0x1p24f + static_cast<float>(int32_t(random >> 19)) * 0x1p-13f;
  // Below 2^10 units wherever it is used.
  uint32_t tiny = static_cast<uint32_t>(static_cast<int32_t>(units < 2048.f ? units : 0.f));
  half_of(to, bits, normal, tiny);
}

// Random bits made of numbers alone: no state, so that a resumed run, another number of
// threads and another order of parameters draw the same.
struct Draw {
  uint32_t first, second;
};

MEMFIT_INLINE uint64_t mixed(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  return bits ^ bits >> 31;
}

// `use` tells what is rounded. For elements whose index has `high` as its upper half.
MEMFIT_INLINE Draw draw_of(uint64_t seed, uint64_t key, uint64_t step, uint64_t use, uint64_t high) {
  uint64_t bits = mixed(mixed(mixed(seed) ^ key) ^ step);
  bits = mixed(mixed(bits ^ use) ^ high);
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

MEMFIT_INLINE uint32_t random_of(Draw draw, uint32_t index) {
  uint32_t bits = index ^ draw.first;
  bits ^= bits >> 16;
  bits *= 0x7feb352d;
  bits ^= bits >> 15;
  bits += draw.second;
  bits *= 0x846ca68b;
  return bits ^ bits >> 16;
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
  // A number or a vector of them.
  template <class Grad>
  MEMFIT_INLINE Grad operator()(const Grad &grad) const {
    return exact ? grad * inverse : grad / divisor;
  }
};

}  // namespace memfit
