// The optimizers' arithmetic on the CPU, over lists of dense tensors whose elements lie in
// the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "memfit.h"

namespace memfit {

// What a step works on: states[i] is empty where the rule keeps no i-th state.
struct Lists {
  std::vector<at::Tensor> parameters, grads, states[2];
};

struct Scalars {
  double lr, weight_decay;
  uint64_t count;  // steps before this one
};

// One parallel region for all; allocates nothing through libtorch, leaves gradients alone.
void adam_on_cpu(const Lists &lists, const Scalars &now, const mf_adam &options);
void sgd_on_cpu(const Lists &lists, const Scalars &now, const mf_sgd &options);

}  // namespace memfit
