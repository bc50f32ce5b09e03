// Cross-entropy of rows of logits on the CPU, in place. For the .cpp files only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace memfit {

// One token: its row of logits becomes, where wanted, the row's gradient.
struct TokenRow {
  int64_t label;
  double weight;  // of the token's loss; 0: does not count, its gradient is zeros
  double factor;  // what the gradient is multiplied by beside the weight
  double smoothing, z;
  bool gradient, top1;
};
struct TokenLoss {
  double loss;
  bool correct;
};

// `logits` is one contiguous row, `classes` long, of fp32, fp64, bf16 or fp16. Computes in
// fp32 (fp64 for fp64), sums in double.
TokenLoss token_row(void *logits, at::ScalarType dtype, int64_t classes, const TokenRow &token);

// sums[v] += rows[r][v] for each r in turn; both contiguous, sums in fp32 (fp64 for fp64).
void add_rows(const at::Tensor &rows, const at::Tensor &sums);

}  // namespace memfit
