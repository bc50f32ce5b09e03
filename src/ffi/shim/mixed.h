// Adam with moments of a dtype of their own, for the files that move parameters so.
#pragma once

#include "adam.h"
#include "walk.h"

namespace memfit {

// What is rounded at random: each draws bits of its own.
enum Use : uint64_t { kWeight = 0, kFirst = 1, kSecond = 2 };

// Weights are rounded as asked, half-precision moments always at random.
inline Rounding of_weights(const mf_rounding &rounding) {
  return {rounding.weights != 0, rounding.seed, kWeight};
}

// Moves elements start..start+length, at most kRow, of a parameter that keeps both moments.
void move_mixed(
    const Walked &of, int64_t start, int64_t length, const mf_adam &options,
    const mf_rounding &rounding);

}  // namespace memfit
