// The last linear layer and the cross-entropy, a chunk of rows at a time, as one node.
// src/loss/mod.rs tells the rules.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "memfit.h"
#include "parallel.h"
#include "plain.h"
#include "saved.h"
#include "token_rows.h"

namespace {

using memfit::Plain;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }
at::ScalarType wide(at::ScalarType dtype) { return half(dtype) ? at::kFloat : dtype; }

// A piece of a half-precision weight's gradient, before it joins the fp32 sum.
constexpr int64_t kPiece = int64_t(1) << 21;

struct Gradients {
  at::Tensor hidden, weight, bias;  // undefined: not wanted
};

class Pass {
 public:
  Pass(const mf_head &head, const mf_loss_options &options)
      : options_(options), dtype_(static_cast<at::ScalarType>(options.dtype)) {
    const at::Tensor &hidden = *head.hidden;
    int64_t width = hidden.size(-1);
    tokens_ = width ? hidden.numel() / width : head.labels->numel();
    classes_ = head.weight->size(0);
    hidden_ = hidden.reshape({tokens_, width});
    weight_ = head.weight->to(dtype_);
    if (head.bias) bias_ = head.bias->to(dtype_);
    labels_ = head.labels->reshape({tokens_}).contiguous();
    if (head.token_weights) weights_ = head.token_weights->reshape({tokens_}).contiguous();
    operators_ = options.by_operators != 0 || !hidden.is_cpu();
  }

  void run(Gradients *gradients, bool top1) {
    top1_ = top1;
    gradients_ = gradients;
    if (tokens_ == 0) return;
    int64_t chunks = (tokens_ + options_.rows - 1) / options_.rows;
    int64_t rows = (tokens_ + chunks - 1) / chunks;
    at::Tensor buffer = at::empty({rows, classes_}, weight_.options());
    for (int64_t start = 0; start < tokens_; start += rows) {
      int64_t count = std::min(rows, tokens_ - start);
      chunk(start, buffer.narrow(0, 0, count));
    }
  }

  // Not read back on an accelerator.
  at::Tensor loss() const {
    auto like = weight_.options().dtype(wide(dtype_));
    if (operators_ && sum_.defined()) return sum_.mul(options_.norm).to(like.dtype());
    return at::full({}, total_ * options_.norm, like);
  }
  void read(double *sum, int64_t *correct) const {
    *sum = operators_ && sum_.defined() ? sum_.item().toDouble() : total_;
    *correct = operators_ && hits_.defined() ? hits_.item().toLong() : correct_;
  }

  // What gradients are not multiplied by yet; `src/loss/range.rs` chooses the scales.
  static double left_over(const mf_loss_options &options) { return options.norm / options.scale; }

 private:
  void chunk(int64_t start, at::Tensor logits) {
    int64_t count = logits.size(0);
    at::Tensor rows = hidden_.narrow(0, start, count).to(dtype_);
    if (bias_.defined()) {
      at::addmm_out(logits, bias_, rows, weight_.t());
    } else {
      at::mm_out(logits, rows, weight_.t());
    }
    operators_ ? by_operators(start, logits) : by_rows(start, logits);
    if (!gradients_) return;
    if (gradients_->hidden.defined()) to_hidden(start, logits);
    if (gradients_->weight.defined()) to_weight(start == 0, logits, scaled(std::move(rows)));
    if (gradients_->bias.defined()) to_bias(logits);
  }

  void by_rows(int64_t start, const at::Tensor &logits) {
    int64_t count = logits.size(0);
    std::vector<memfit::TokenLoss> losses(count);
    auto *data = static_cast<char *>(logits.data_ptr());
    int64_t stride = classes_ * static_cast<int64_t>(logits.element_size());
    const int64_t *labels = labels_.const_data_ptr<int64_t>() + start;
    std::vector<double> weights = weights_of(start, count);
    memfit::parallel(count, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        memfit::TokenRow token{labels[i], weights[i], options_.scale, options_.smoothing, options_.z,
                               gradients_ != nullptr, top1_};
        losses[i] = memfit::token_row(data + i * stride, dtype_, classes_, token);
      }
    });
    for (const memfit::TokenLoss &one : losses) {
      total_ += one.loss;
      correct_ += one.correct;
    }
  }

  std::vector<double> weights_of(int64_t start, int64_t count) const {
    std::vector<double> weights(count, 1.0);
    if (weights_.defined()) {
      at::Tensor part = weights_.narrow(0, start, count).to(at::kDouble);
      std::copy_n(part.const_data_ptr<double>(), count, weights.begin());
    }
    const int64_t *labels = labels_.const_data_ptr<int64_t>() + start;
    for (int64_t i = 0; i < count; ++i) {
      if (labels[i] == options_.ignored) weights[i] = 0;
    }
    return weights;
  }

  void by_operators(int64_t start, at::Tensor &logits) {
    int64_t count = logits.size(0);
    at::Tensor labels = labels_.narrow(0, start, count);
    at::Tensor ignored = labels.eq(options_.ignored);
    at::Tensor own_at = labels.masked_fill(ignored, 0).unsqueeze(1);
    at::Tensor x = half(dtype_) ? logits.to(at::kFloat) : logits;
    at::Tensor weights = at::full({count}, 1.0, x.options());
    if (weights_.defined()) weights.copy_(weights_.narrow(0, start, count));
    weights.masked_fill_(ignored, 0);
    at::Tensor idle = weights.eq(0);

    if (top1_) add_to(hits_, x.argmax(1).eq(own_at.squeeze(1)).logical_and_(idle.logical_not()).sum());
    at::Tensor mean = options_.smoothing != 0 ? x.mean(1) : at::Tensor();
    at::Tensor most = x.amax(1, true);
    at::Tensor own = x.gather(1, own_at).sub_(most).squeeze(1);
    x.sub_(most).exp_();
    at::Tensor powers = x.sum(1);
    at::Tensor log_of = powers.log(), all = log_of.add(most.squeeze(1));
    at::Tensor loss = log_of.sub(own).mul_(1 - options_.smoothing);
    if (mean.defined()) loss.add_(all.sub(mean).mul_(options_.smoothing));
    if (options_.z != 0) loss.add_(all.square().mul_(options_.z));
    auto sum_dtype = x.device().type() == at::kMPS ? at::kFloat : at::kDouble;
    add_to(sum_, loss.mul_(weights).masked_fill_(idle, 0).sum(sum_dtype));
    if (!gradients_) return;

    at::Tensor factor = weights.mul(options_.scale);
    at::Tensor scale = factor.div(powers);
    if (options_.z != 0) scale.mul_(all.mul(2 * options_.z).add_(1));
    x.mul_(scale.unsqueeze(1));
    if (mean.defined()) x.sub_(factor.mul(options_.smoothing / double(classes_)).unsqueeze(1));
    x.scatter_add_(1, own_at, factor.mul(options_.smoothing - 1).unsqueeze(1));
    x.masked_fill_(idle.unsqueeze(1), 0);
    if (half(dtype_)) logits.copy_(x);
  }

  static void add_to(at::Tensor &sum, at::Tensor value) {
    if (sum.defined()) {
      sum.add_(value);
    } else {
      sum = std::move(value);
    }
  }

  void to_hidden(int64_t start, const at::Tensor &logits) {
    at::Tensor into = gradients_->hidden.view({tokens_, -1}).narrow(0, start, logits.size(0));
    if (into.scalar_type() == dtype_) {
      at::mm_out(into, logits, weight_);
    } else {
      into.copy_(at::mm(logits, weight_));
    }
  }

  // In place where they are a copy.
  at::Tensor scaled(at::Tensor rows) const {
    if (options_.rows_scale == 1) return rows;
    return rows.is_alias_of(hidden_) ? rows.mul(options_.rows_scale) : rows.mul_(options_.rows_scale);
  }

  void to_weight(bool first, const at::Tensor &logits, const at::Tensor &rows) {
    at::Tensor &sum = gradients_->weight;
    if (sum.scalar_type() == dtype_) {
      at::addmm_out(sum, sum, logits.t(), rows, first ? 0 : 1, 1);
      return;
    }
    int64_t row_bytes = std::max<int64_t>(1, rows.size(1) * static_cast<int64_t>(rows.element_size()));
    int64_t step = std::clamp<int64_t>(kPiece / row_bytes, 1, classes_);
    if (!piece_.defined()) piece_ = at::empty({step, rows.size(1)}, rows.options());
    for (int64_t start = 0; start < classes_; start += step) {
      int64_t count = std::min(step, classes_ - start);
      at::Tensor piece = piece_.narrow(0, 0, count), into = sum.narrow(0, start, count);
      at::mm_out(piece, logits.narrow(1, start, count).t(), rows);
      if (first) {
        into.copy_(piece);
      } else {
        mf_tensor to = &into, from = &piece;
        if (mf_add_to(&to, &from, 1) != 0) throw std::runtime_error(mf_last_error());
      }
    }
  }

  void to_bias(const at::Tensor &logits) {
    if (operators_) {
      gradients_->bias.add_(logits.sum({0}, false, gradients_->bias.scalar_type()));
    } else {
      memfit::add_rows(logits, gradients_->bias);
    }
  }

  const mf_loss_options &options_;
  at::ScalarType dtype_;
  int64_t tokens_, classes_;
  bool operators_, top1_ = false;
  at::Tensor hidden_, weight_, bias_, labels_, weights_, piece_;
  Gradients *gradients_ = nullptr;
  double total_ = 0;
  int64_t correct_ = 0;
  at::Tensor sum_, hits_;
};

// The first of them that needs an argument of its own: sums are in fp32 at least.
at::Tensor sum_like(const at::Tensor &parameter, bool zeros) {
  auto options = parameter.options().dtype(wide(parameter.scalar_type()));
  return zeros ? at::zeros_like(parameter, options) : at::empty_like(parameter, options);
}

// What backward multiplies by: the gradient that comes in times what forward left over. Only the
// CPU looks whether there is anything to do: elsewhere that would wait for the device. There it is
// 1-d, or a half-precision gradient would have it rounded to its own dtype first, to infinity
// under a loss scale of 65536.
struct Factor {
  Factor(const at::Tensor &grad, double left)
      : value(left == 1 ? grad : grad.mul(left)), one(grad.is_cpu() && value.item().toDouble() == 1) {
    if (!grad.is_cpu()) value = value.reshape({1});
  }
  at::Tensor value;
  bool one;
};

// The gradient as the engine wants it. Where the graph is kept, what forward made stays.
at::Tensor scaled(const at::Tensor &made, const Factor &factor, at::ScalarType dtype, bool keep) {
  if (!made.defined()) return made;
  if (keep) return made.mul(factor.value).to(dtype);
  return (factor.one ? made : made.mul_(factor.value)).to(dtype);
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static at::Tensor forward(
      AutogradContext *context, const at::Tensor &hidden, const at::Tensor &weight,
      const std::optional<at::Tensor> &bias, const mf_head *head, const mf_loss_options *options) {
    Plain plain;
    bool none = head->labels->numel() == 0;
    Gradients made;
    if (hidden.requires_grad()) made.hidden = at::empty_like(hidden, at::MemoryFormat::Contiguous);
    if (weight.requires_grad()) made.weight = sum_like(weight, none);
    if (bias && bias->requires_grad()) made.bias = sum_like(*bias, true);
    Pass pass(*head, *options);
    pass.run(&made, false);
    context->save_for_backward({made.hidden, made.weight, made.bias});
    context->saved_data["left"] = Pass::left_over(*options);
    context->saved_data["rows_scale"] = options->rows_scale;
    context->saved_data["hidden"] = static_cast<int64_t>(hidden.scalar_type());
    context->saved_data["weight"] = static_cast<int64_t>(weight.scalar_type());
    context->saved_data["bias"] = static_cast<int64_t>(bias ? bias->scalar_type() : at::kFloat);
    return pass.loss();
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    if (c10::GradMode::is_enabled()) throw memfit::CallbackError(mf_park_second_order());
    Plain plain;
    variable_list made = context->get_saved_variables();
    bool keep = torch::autograd::get_current_graph_task_keep_graph();
    double left = context->saved_data["left"].toDouble();
    Factor factor(grads[0], left), of_weight(grads[0], left / context->saved_data["rows_scale"].toDouble());
    auto dtype = [&](const char *of) {
      return static_cast<at::ScalarType>(context->saved_data[of].toInt());
    };
    return {scaled(made[0], factor, dtype("hidden"), keep),
            scaled(made[1], of_weight, dtype("weight"), keep),
            scaled(made[2], factor, dtype("bias"), keep), at::Tensor(), at::Tensor()};
  }
};

// What the node saves are gradients, which backward takes at once: a link that moves them away
// would only bring them back. A region still has to see them.
bool in_region() {
  for (auto *place = memfit::Place::innermost(); place && place->link(); place = place->outer()) {
    if (place->link()->kind() != memfit::Link::Kind::Other) return true;
  }
  return false;
}

bool wanted(const mf_head &head) {
  auto wants = [](mf_tensor tensor) { return tensor && tensor->requires_grad(); };
  return c10::GradMode::is_enabled() && (wants(head.hidden) || wants(head.weight) || wants(head.bias));
}

}  // namespace

int mf_linear_cross_entropy(
    const mf_head *head, const mf_loss_options *options, mf_tensor *loss) noexcept {
  return memfit::guarded([&] {
    if (!wanted(*head)) {
      Plain plain;
      Pass pass(*head, *options);
      pass.run(nullptr, false);
      *loss = new at::Tensor(pass.loss());
      return;
    }
    std::optional<memfit::Place> wall;
    if (!in_region()) wall.emplace(nullptr);
    std::optional<at::Tensor> bias;
    if (head->bias) bias = *head->bias;
    *loss = new at::Tensor(LinearCrossEntropy::apply(*head->hidden, *head->weight, bias, head, options));
  });
}

int mf_evaluate_cross_entropy(
    const mf_head *head, const mf_loss_options *options, double *sum, int64_t *correct) noexcept {
  return memfit::guarded([&] {
    Plain plain;
    Pass pass(*head, *options);
    pass.run(nullptr, true);
    pass.read(sum, correct);
  });
}
