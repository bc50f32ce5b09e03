// What a fused loss has to know of its labels before it begins: how many count, with which weight, and whether
// one of them cannot be. src/loss/mod.rs tells the rules.

#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "memfit.h"
#include "plain.h"

namespace {

// 0-d.
at::Tensor largest(const at::Tensor &tensor) {
  if (tensor.numel() == 0) return at::zeros({}, tensor.options().dtype(at::kDouble));
  return at::maximum(tensor.amax(), tensor.amin().neg()).to(at::kDouble);
}

void count_on_host(const mf_head &head, int64_t ignored, mf_counted &out) {
  at::Tensor labels = head.labels->contiguous(), weights;
  if (head.token_weights) weights = head.token_weights->to(at::kDouble).contiguous();
  const int64_t *label = labels.const_data_ptr<int64_t>();
  const double *weight = weights.defined() ? weights.const_data_ptr<double>() : nullptr;
  int64_t classes = head.weight->size(0);
  for (int64_t i = 0, n = labels.numel(); i < n; ++i) {
    if (label[i] == ignored) continue;
    double w = weight ? weight[i] : 1;
    bool bad = label[i] < 0 || label[i] >= classes || !(w >= 0) || !std::isfinite(w);
    if (bad) {
      out.bad_at = i;
      out.bad_label = label[i];
      out.bad_weight = w;
      return;
    }
    out.weight += w;
    out.tokens += w > 0;
    out.most_token = std::max(out.most_token, w);
  }
}

void count_by_operators(const mf_head &head, int64_t ignored, bool sizes, mf_counted &out) {
  at::Tensor labels = head.labels->flatten();
  if (labels.numel() == 0) return;
  at::Tensor counts = labels.ne(ignored);
  at::Tensor weights = head.token_weights ? head.token_weights->flatten().to(at::kDouble)
                                          : at::full_like(counts, 1.0, counts.options().dtype(at::kDouble));
  at::Tensor good = labels.ge(0).logical_and_(labels.lt(head.weight->size(0)));
  good.logical_and_(weights.ge(0)).logical_and_(weights.isfinite());
  at::Tensor bad = good.logical_not().logical_and_(counts);
  at::Tensor first = bad.to(at::kByte).argmax();
  at::Tensor valid = weights.masked_fill(counts.logical_not(), 0);
  at::Tensor none = at::zeros({}, weights.options());
  at::Tensor read = at::stack({valid.sum(), valid.gt(0).sum().to(at::kDouble), bad.any().to(at::kDouble),
                               first.to(at::kDouble), weights.take(first), valid.max(),
                               sizes ? largest(*head.hidden) : none, sizes ? largest(*head.weight) : none})
                        .cpu();
  const double *found = read.const_data_ptr<double>();
  out.weight = found[0];
  out.tokens = static_cast<int64_t>(found[1]);
  out.most_token = found[5];
  out.most_hidden = found[6];
  out.most_weight = found[7];
  if (found[2] == 0) return;
  out.bad_at = static_cast<int64_t>(found[3]);
  out.bad_label = labels.select(0, out.bad_at).item().toLong();
  out.bad_weight = found[4];
}

}  // namespace

int mf_count_tokens(const mf_head *head, int64_t ignored, int sizes, mf_counted *out) noexcept {
  return memfit::guarded([&] {
    memfit::Plain plain;
    *out = {0, 0, -1, 0, 1, 0, 0, 0};
    if (!head->labels->is_cpu()) return count_by_operators(*head, ignored, sizes != 0, *out);
    count_on_host(*head, ignored, *out);
    if (sizes == 0 || out->bad_at >= 0) return;
    out->most_hidden = largest(*head->hidden).item().toDouble();
    out->most_weight = largest(*head->weight).item().toDouble();
  });
}
