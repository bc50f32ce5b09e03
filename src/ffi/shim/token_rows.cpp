#include "token_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "parallel.h"

namespace memfit {
namespace {

constexpr float kEndless = std::numeric_limits<float>::infinity();

MEMFIT_INLINE Bits16 bits_of(const Float16 &lanes) {
  Bits16 bits;
  std::memcpy(&bits, &lanes, sizeof bits);
  return bits;
}
MEMFIT_INLINE Float16 lanes_of(const Bits16 &bits) {
  Float16 lanes;
  std::memcpy(&lanes, &bits, sizeof lanes);
  return lanes;
}

// e^x for x <= 0, within 2 units of the last place: x = n ln 2 + r with |r| <= 0.35, and the
// series of e^r to r^7. Results below fp32's normal numbers are 0.
MEMFIT_INLINE Float16 exp_of(const Float16 &x) {
  const float shift = 0x1.8p23f;  // adding it leaves the integer in the lowest bits
  Float16 shifted = x * 0x1.715476p0f + shift;
  Float16 n = shifted - shift;
  Float16 r = x - n * 0x1.62ep-1f;  // few enough bits that the product is exact
  r -= n * 0x1.0bfbe8p-15f;
  Float16 sum = r * (1.0f / 5040) + (1.0f / 720);
  sum = sum * r + (1.0f / 120);
  sum = sum * r + (1.0f / 24);
  sum = sum * r + (1.0f / 6);
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  Float16 power = lanes_of((bits_of(shifted) << 23) + 0x3f800000);
  Bits16 lost = (Bits16)(x < -87.3f);
  return lanes_of(bits_of(sum * power) & ~lost);
}

MEMFIT_INLINE void store(c10::BFloat16 *to, const Float16 &lanes) {
  Bits16 bits = bits_of(lanes);
  Bits16 nan = (Bits16)(lanes != lanes);
  Bits16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = (rounded & ~nan) | (nan & 0x7fc0);
  Words16 words = __builtin_convertvector(rounded, Words16);
  std::memcpy(to, &words, sizeof words);
}
MEMFIT_INLINE void store(c10::Half *to, const Float16 &lanes) {
  for (int i = 0; i < 16; ++i) to[i] = c10::Half(lanes[i]);
}

template <class T>
MEMFIT_INLINE Float16 take(const T *from, int64_t left, float fill) {
  if (left >= 16) return load(from);
  Float16 few;
  for (int i = 0; i < 16; ++i) few[i] = i < left ? widen(from[i]) : fill;
  return few;
}

template <class T>
MEMFIT_INLINE void put(T *to, int64_t left, const Float16 &lanes) {
  if (left >= 16) {
    memfit::store(to, lanes);
  } else {
    for (int i = 0; i < left; ++i) to[i] = T(lanes[i]);
  }
}
template <>
MEMFIT_INLINE void put(c10::BFloat16 *to, int64_t left, const Float16 &lanes) {
  if (left >= 16) return store(to, lanes);
  for (int i = 0; i < left; ++i) to[i] = c10::BFloat16(lanes[i]);
}
template <>
MEMFIT_INLINE void put(c10::Half *to, int64_t left, const Float16 &lanes) {
  if (left >= 16) return store(to, lanes);
  for (int i = 0; i < left; ++i) to[i] = c10::Half(lanes[i]);
}

template <class T>
MEMFIT_INLINE float largest(const T *row, int64_t n) {
  Float16 most = Float16{} - kEndless;
  for (int64_t i = 0; i < n; i += 16) {
    Float16 x = take(row + i, n - i, -kEndless);
    most = x > most ? x : most;
  }
  float one = most[0];
  for (int lane = 1; lane < 16; ++lane) one = std::max(one, most[lane]);
  return one;
}

// Lanes in fp32 for 64 turns at a time, then in double: the error does not grow with n.
MEMFIT_INLINE double flush(Float16 &lanes) {
  double sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += lanes[lane];
  lanes = Float16{};
  return sum;
}

template <class T>
MEMFIT_INLINE double sum_of(const T *row, int64_t n) {
  double sum = 0;
  Float16 lanes = {};
  for (int64_t i = 0; i < n; i += 16) {
    lanes += take(row + i, n - i, 0.0f);
    if ((i & 1023) == 1008) sum += flush(lanes);
  }
  return sum + flush(lanes);
}

// Sums e^(x - most). fp32 rows keep the powers in place of the logits; a narrower dtype would
// round them, so the gradient computes them again.
template <bool kKeep, class T>
MEMFIT_INLINE double exp_sum(T *row, int64_t n, float most) {
  double sum = 0;
  Float16 lanes = {};
  for (int64_t i = 0; i < n; i += 16) {
    Float16 power = exp_of(take(row + i, n - i, -kEndless) - most);
    lanes += power;
    if constexpr (kKeep) put(row + i, n - i, power);
    if ((i & 1023) == 1008) sum += flush(lanes);
  }
  return sum + flush(lanes);
}

template <class T>
MEMFIT_INLINE void gradient(T *row, int64_t n, float most, float scale, float shift) {
  for (int64_t i = 0; i < n; i += 16) {
    Float16 power = take(row + i, n - i, -kEndless);
    if constexpr (!std::is_same_v<T, float>) power = exp_of(power - most);
    put(row + i, n - i, power * scale - shift);
  }
}

// What the loss and the gradient need of a row, and both from it.
struct Found {
  double most, own, sum_of_powers, sum;
  double log_sum() const { return most + std::log(sum_of_powers); }
  double loss(const TokenRow &token, int64_t n) const {
    double log_of = std::log(sum_of_powers), all = most + log_of;
    double loss = (1 - token.smoothing) * ((most - own) + log_of);
    if (token.smoothing != 0) loss += token.smoothing * (all - sum / n);
    if (token.z != 0) loss += token.z * all * all;
    return token.weight * loss;
  }
  double scale(const TokenRow &token) const {
    double factor = token.weight * token.factor / sum_of_powers;
    return token.z != 0 ? factor * (1 + 2 * token.z * log_sum()) : factor;
  }
};

template <class T>
MEMFIT_INLINE bool first_highest(const T *row, int64_t label, double own, double most) {
  if (own != most) return false;
  for (int64_t i = 0; i < label; ++i) {
    if (double(row[i]) == most) return false;
  }
  return true;
}

template <class T>
MEMFIT_INLINE TokenLoss narrow_row(T *row, int64_t n, const TokenRow &token) {
  float most = largest(row, n);
  Found found{most, widen(row[token.label]), 0, 0};
  bool correct = token.top1 && first_highest(row, token.label, found.own, found.most);
  if (token.smoothing != 0) found.sum = sum_of(row, n);
  constexpr bool kKeeps = std::is_same_v<T, float>;
  if (!token.gradient) {
    found.sum_of_powers = exp_sum<false>(row, n, most);
    return {found.loss(token, n), correct};
  }
  found.sum_of_powers = exp_sum<kKeeps>(row, n, most);
  double scale = found.scale(token), factor = token.weight * token.factor;
  double shift = factor * token.smoothing / n;
  gradient(row, n, most, float(scale), float(shift));
  double own = std::exp(found.own - found.most) * scale - shift - factor * (1 - token.smoothing);
  row[token.label] = T(float(own));
  return {found.loss(token, n), correct};
}

MEMFIT_CLONES TokenLoss row_of(float *x, int64_t n, const TokenRow &t) { return narrow_row(x, n, t); }
MEMFIT_CLONES TokenLoss row_of(c10::BFloat16 *x, int64_t n, const TokenRow &t) {
  return narrow_row(x, n, t);
}
MEMFIT_CLONES TokenLoss row_of(c10::Half *x, int64_t n, const TokenRow &t) {
  return narrow_row(x, n, t);
}

TokenLoss row_of(double *row, int64_t n, const TokenRow &token) {
  Found found{row[0], row[token.label], 0, 0};
  for (int64_t i = 1; i < n; ++i) found.most = std::max(found.most, row[i]);
  bool correct = token.top1 && first_highest(row, token.label, found.own, found.most);
  for (int64_t i = 0; i < n; ++i) found.sum += row[i];
  for (int64_t i = 0; i < n; ++i) {
    double power = std::exp(row[i] - found.most);
    found.sum_of_powers += power;
    if (token.gradient) row[i] = power;
  }
  if (token.gradient) {
    double scale = found.scale(token), factor = token.weight * token.factor;
    double shift = factor * token.smoothing / n;
    for (int64_t i = 0; i < n; ++i) row[i] = row[i] * scale - shift;
    row[token.label] -= factor * (1 - token.smoothing);
  }
  return {found.loss(token, n), correct};
}

template <class T>
TokenLoss typed_row(void *logits, int64_t classes, const TokenRow &token) {
  auto *row = static_cast<T *>(logits);
  if (token.weight != 0) return row_of(row, classes, token);
  if (token.gradient) std::fill(row, row + classes, T(0.0f));
  return {0, false};
}

template <class T>
MEMFIT_INLINE void add(float *sums, const T *row, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) memfit::store(sums + i, load(sums + i) + load(row + i));
  for (; i < n; ++i) sums[i] += widen(row[i]);
}
MEMFIT_CLONES void add_of(float *s, const float *r, int64_t n) { add(s, r, n); }
MEMFIT_CLONES void add_of(float *s, const c10::BFloat16 *r, int64_t n) { add(s, r, n); }
MEMFIT_CLONES void add_of(float *s, const c10::Half *r, int64_t n) { add(s, r, n); }
void add_of(double *s, const double *r, int64_t n) {
  for (int64_t i = 0; i < n; ++i) s[i] += r[i];
}

template <class Sum, class T>
void add_typed(const at::Tensor &rows, const at::Tensor &sums) {
  int64_t count = rows.size(0), classes = rows.size(1);
  const T *from = rows.const_data_ptr<T>();
  Sum *to = sums.mutable_data_ptr<Sum>();
  memfit::parallel(classes, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < count; ++r) add_of(to + begin, from + r * classes + begin, end - begin);
  });
}

}  // namespace

TokenLoss token_row(void *logits, at::ScalarType dtype, int64_t classes, const TokenRow &token) {
  switch (dtype) {
    case at::kFloat: return typed_row<float>(logits, classes, token);
    case at::kDouble: return typed_row<double>(logits, classes, token);
    case at::kBFloat16: return typed_row<c10::BFloat16>(logits, classes, token);
    default: return typed_row<c10::Half>(logits, classes, token);
  }
}

void add_rows(const at::Tensor &rows, const at::Tensor &sums) {
  switch (rows.scalar_type()) {
    case at::kFloat: return add_typed<float, float>(rows, sums);
    case at::kDouble: return add_typed<double, double>(rows, sums);
    case at::kBFloat16: return add_typed<float, c10::BFloat16>(rows, sums);
    default: return add_typed<float, c10::Half>(rows, sums);
  }
}

}  // namespace memfit
