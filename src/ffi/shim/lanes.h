// Sixteen numbers at a time, in the widest registers that the machine has.
//
// Functions marked MEMFIT_CLONES are compiled for several instruction sets and chosen when
// the program starts; the lanes are fixed, so that all give the same bits.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#define MEMFIT_INLINE __attribute__((always_inline)) inline

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define MEMFIT_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define MEMFIT_CLONES
#endif

// Vectors pass between inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace memfit {

typedef float Float16 __attribute__((vector_size(64)));
typedef double Double16 __attribute__((vector_size(128)));
typedef uint32_t Bits16 __attribute__((vector_size(64)));
typedef uint16_t Words16 __attribute__((vector_size(32)));

MEMFIT_INLINE float widen(float value) { return value; }
MEMFIT_INLINE float widen(c10::BFloat16 value) {
  uint32_t bits = uint32_t(value.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
// As c10's, without its branches.
MEMFIT_INLINE float widen(c10::Half value) {
  uint32_t magnitude = (value.x & 0x7fffu) << 13, bits;
  float wide;
  std::memcpy(&wide, &magnitude, 4);
  wide *= 0x1p112f;
  std::memcpy(&bits, &wide, 4);
  bits |= magnitude > 0x0f7fffffu ? 0x7f800000u : 0u;
  bits |= uint32_t(value.x & 0x8000u) << 16;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

MEMFIT_INLINE Float16 load(const float *from) {
  Float16 lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

MEMFIT_INLINE Float16 load(const c10::BFloat16 *from) {
  Words16 words;
  std::memcpy(&words, from, sizeof words);
  Bits16 bits = __builtin_convertvector(words, Bits16) << 16;
  Float16 lanes;
  std::memcpy(&lanes, &bits, sizeof lanes);
  return lanes;
}

// Half's exponent is 112 short of float's: the bits, moved up, are 2^112 times too small,
// subnormal halves included. Infinities and NaNs keep their exponent of ones.
MEMFIT_INLINE Float16 load(const c10::Half *from) {
  Words16 words;
  std::memcpy(&words, from, sizeof words);
  Bits16 bits = __builtin_convertvector(words, Bits16);
  Bits16 magnitude = (bits & 0x7fff) << 13;
  Float16 lanes;
  std::memcpy(&lanes, &magnitude, sizeof lanes);
  lanes *= 0x1p112f;
  std::memcpy(&magnitude, &lanes, sizeof lanes);
  Bits16 endless = (Bits16)((bits & 0x7fff) > 0x7bff);
  magnitude |= (endless & 0x7f800000) | ((bits & 0x8000) << 16);
  std::memcpy(&lanes, &magnitude, sizeof lanes);
  return lanes;
}

MEMFIT_INLINE void store(float *to, const Float16 &lanes) { std::memcpy(to, &lanes, sizeof lanes); }

}  // namespace memfit
