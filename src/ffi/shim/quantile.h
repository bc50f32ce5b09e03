// Blockwise dynamic quantisation: one byte per number and one fp32 scale per block, the
// largest magnitude in it.
//
// The 256 values of a map lie in the seven decades below 1, evenly within each, twice as many
// in a decade as in the one below: the middles of 2^i parts (unsigned: 2^(i+1)) of
// 10^(i-7)..10^(i-6), beside 0 and 1. The signed map has the negatives of all but 1.
#pragma once

#include "numbers.h"

namespace memfit {

constexpr int64_t kBlock = 256;
constexpr int kDecades = 7;

// A map's decades, in fp32; `parts`, as a number, is also the first code of a decade (unsigned:
// the one after it).
template <bool kSigned>
struct Map {
  float parts[kDecades]{}, slope[kDecades]{}, start[kDecades]{}, one = 0;

  static constexpr double top(int decade) {
    double ten = 1;
    for (int i = decade; i < kDecades - 1; ++i) ten /= 10;
    return ten;
  }
  static constexpr double parts_of(int decade) { return (kSigned ? 1 : 2) << decade; }
  // The value in the middle of a part.
  static constexpr double middle(int decade, double part) {
    return top(decade) * (0.1 + 0.9 * (part + 0.5) / parts_of(decade));
  }

  constexpr Map() {
    for (int i = 0; i < kDecades; ++i) {
      parts[i] = static_cast<float>(parts_of(i));
      slope[i] = static_cast<float>(parts_of(i) / (0.9 * top(i)));
      if (i == 0) continue;
      double below = middle(i - 1, parts_of(i - 1) - 1);
      start[i] = static_cast<float>((below + middle(i, 0)) / 2);
    }
    one = static_cast<float>((middle(kDecades - 1, parts_of(kDecades - 1) - 1) + 1) / 2);
  }
};

template <bool kSigned>
constexpr Map<kSigned> kMap{};

// The 256 values, ascending.
template <bool kSigned>
struct Book {
  float values[256]{};
  constexpr Book() {
    int zero = kSigned ? 127 : 0, code = 1;
    for (int i = 0; i < kDecades; ++i) {
      for (int part = 0; part < Map<kSigned>::parts_of(i); ++part, ++code) {
        float value = static_cast<float>(Map<kSigned>::middle(i, part));
        values[zero + code] = value;
        if (kSigned) values[zero - code] = -value;
      }
    }
    values[255] = 1;
  }
};

template <bool kSigned>
constexpr Book<kSigned> kBook{};

// Eight, since a compiler makes no comparison of vectors wider than the machine has.
typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));

template <class To, class From>
MEMFIT_INLINE To as_bits(const From &from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

MEMFIT_INLINE Float8 lanes_at(const float *numbers) {
  Float8 lanes;
  std::memcpy(&lanes, numbers, sizeof lanes);
  return lanes;
}

// The codes whose values are nearest to numbers in units of their block's scale, of two that
// are equally near the one further from zero. A positive number of the unsigned map is never
// coded as 0, also where its ratio to the scale is: a second moment of zero would let its
// element's step explode.
template <bool kSigned>
MEMFIT_INLINE Ints8 codes_of(const Float8 &unscaled, const Float8 &numbers) {
  constexpr const Map<kSigned> &map = kMap<kSigned>;
  const Float8 none = {};
  Float8 sizes = as_bits<Float8>(as_bits<Ints8>(numbers) & 0x7fffffff);
  Float8 slope = none + map.slope[0], parts = none + map.parts[0];
  for (int i = 1; i < kDecades; ++i) {
    Ints8 above = sizes >= map.start[i];
    slope = above ? none + map.slope[i] : slope;
    parts = above ? none + map.parts[i] : parts;
  }
  Float8 place = sizes * slope + parts * static_cast<float>(8. / 9.);
  place = place > parts ? place : parts;
  Float8 last = parts + parts - 0.5f;
  place = place < last ? place : last;
  Ints8 codes = __builtin_convertvector(place, Ints8);
  Ints8 full = numbers >= map.one;
  if constexpr (kSigned) {
    // A mask is -1 where it holds.
    codes = (codes - full) & (sizes >= static_cast<float>(Map<true>::middle(0, 0) / 2));
    Ints8 negative = numbers < none;
    return ((codes ^ negative) - negative) + 127;
  }
  return (codes - 1 - full) & (unscaled > none);
}

// Of eight numbers. Not a lambda, which would be compiled for the oldest machine only.
template <bool kSigned>
MEMFIT_INLINE void put_codes(const float *numbers, float lift, float inverse, int32_t *codes) {
  Float8 lanes = lanes_at(numbers);
  Ints8 found = codes_of<kSigned>(lanes, lanes * lift * inverse);
  std::memcpy(codes, &found, sizeof found);
}

// At most a block. A number that is not finite makes the block NaN.
template <bool kSigned>
MEMFIT_INLINE void encode(
    const float *__restrict numbers, int64_t length, uint8_t *__restrict codes,
    float *__restrict scale) {
  uint32_t most = 0;
  for (int64_t i = 0; i < length; ++i) {
    uint32_t bits = bits_of(numbers[i]) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest = float_of(most);
  *scale = most < 0x7f800000 ? largest : float_of(0x7fc00000);
  // The inverse of a tiny scale would not be finite.
  float lift = largest < 0x1p-62f ? 0x1p64f : 1.f;
  float inverse = most == 0 ? 0.f : 1 / (largest * lift);
  alignas(64) int32_t wide[kBlock];
  int64_t whole = length - length % 8;
  for (int64_t i = 0; i < whole; i += 8) {
    put_codes<kSigned>(numbers + i, lift, inverse, wide + i);
  }
  if (whole < length) {
    float rest[8] = {};
    std::memcpy(rest, numbers + whole, static_cast<size_t>(length - whole) * sizeof(float));
    put_codes<kSigned>(rest, lift, inverse, wide + whole);
  }
  for (int64_t i = 0; i < length; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

template <bool kSigned>
MEMFIT_INLINE void decode(
    const uint8_t *__restrict codes, int64_t length, float scale, float *__restrict numbers) {
  const float *book = kBook<kSigned>.values;
  for (int64_t i = 0; i < length; ++i) numbers[i] = book[codes[i]] * scale;
}

}  // namespace memfit
