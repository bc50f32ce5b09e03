#include <ATen/ops/full_like.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/autograd.h>

#include "memfit.h"

mf_tensor mf_grad_get(mf_tensor tensor) noexcept {
  const at::Tensor &grad = tensor->grad();
  return grad.defined() ? new at::Tensor(grad) : nullptr;
}

mf_tensor mf_grad_take(mf_tensor tensor) noexcept {
  at::Tensor &grad = tensor->mutable_grad();
  if (!grad.defined()) return nullptr;
  auto taken = new at::Tensor(std::move(grad));
  grad = at::Tensor();
  return taken;
}

void mf_grads_drop(const mf_tensor *tensors, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) {
    at::Tensor &grad = tensors[i]->mutable_grad();
    if (grad.defined()) grad.reset();
  }
}

int mf_grad_set(mf_tensor tensor, mf_tensor grad) noexcept {
  return memfit::guarded([&] {
    TORCH_CHECK(
        grad->sizes() == tensor->sizes() && grad->scalar_type() == tensor->scalar_type() &&
            grad->device() == tensor->device(),
        "a gradient has the shape, dtype and device of its parameter");
    tensor->mutable_grad() = *grad;
  });
}

int mf_backward(mf_tensor root, double seed, int keep_graph, int create_graph) noexcept {
  return memfit::guarded([&] {
    at::Tensor start = at::full(root->sizes(), seed, root->options().requires_grad(false));
    torch::autograd::backward({*root}, {start}, keep_graph != 0, create_graph != 0);
  });
}
