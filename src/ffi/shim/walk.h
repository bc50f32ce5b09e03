// Elements of a parameter, its gradient and its state in one order, whatever their dtypes and
// strides: rows of numbers on the stack, so that nothing can fail once a parameter has moved.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <vector>

#include "memfit.h"
#include "numbers.h"

namespace memfit {

// Elements that are numbers at the same time; a multiple of a quantised block.
constexpr int64_t kRow = 1024;

// Where one tensor has its elements. They are walked by the last dimension first; without
// strides they lie so.
struct Elements {
  void *data = nullptr;
  at::ScalarType type = at::kFloat;
  const int64_t *strides = nullptr;
};

// One parameter of a step.
struct Walked {
  mf_moving *moving;
  at::Tensor parameter, grad;
  Elements weight, slope, kept[2];  // `kept`: state of the parameter's shape
  int64_t numel;
};

// How a number becomes an element again.
struct Rounding {
  bool random = false;
  uint64_t seed = 0, use = 0;
};

// The parameters that need a gradient and have one, on the CPU; checks them, and that the
// first `kept` state tensors have their shapes, unless `quantised` says that a parameter's
// have not. Throws; nothing has moved.
std::vector<Walked> walked_of(
    mf_moving *moving, size_t count, size_t kept,
    c10::function_ref<bool(const mf_moving &)> quantised);

// Calls body(parameter, start, length) for all elements of all parameters, at most kRow of
// them at a time, the starts multiples of kRow, on all threads. Then each has moved: counts,
// versions, the autocast cache.
void walk(
    std::vector<Walked> &walked, size_t *moved,
    c10::function_ref<void(const Walked &, int64_t, int64_t)> body);

// Part of one tensor as numbers: its own memory where that holds them in a row, else a copy.
template <class Number>
class Row {
 public:
  Number *read(const Walked &of, const Elements &from, int64_t start, int64_t length);
  // Puts back what `read` gave, where that is a copy.
  void write(
      const Walked &of, const Elements &to, int64_t start, int64_t length, const Rounding &rounding);

 private:
  alignas(64) Number numbers_[kRow];
  alignas(64) unsigned char raw_[kRow * sizeof(Number)];
};

}  // namespace memfit
