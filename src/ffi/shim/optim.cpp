// Fused optimizer steps: what can fail is done first, then every parameter moves.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "copying.h"
#include "memfit.h"
#include "moments.h"

namespace {

using memfit::copy_without_memory;
using Tensors = std::vector<at::Tensor>;

struct Entry {
  mf_moving *moving;
  at::Tensor parameter, grad;
  // Gradient and parameter lie in memory in the same order, without gaps.
  bool aligned;
};

// Parameters that one call of a fused kernel may take together.
struct Bucket {
  c10::Device device;
  at::ScalarType type;
  double lr, weight_decay;
  uint64_t count;
  std::vector<Entry *> entries;
};

bool same_place(const at::Tensor &a, const at::Tensor &b) {
  return a.is_non_overlapping_and_dense() && a.strides() == b.strides();
}

void check_state(const Entry &entry, const at::Tensor &state) {
  const at::Tensor &parameter = entry.parameter;
  TORCH_CHECK(
      state.sizes() == parameter.sizes() && state.scalar_type() == parameter.scalar_type() &&
          state.device() == parameter.device(),
      "memfit: optimizer state of shape ", state.sizes(), ", ", state.scalar_type(), " on ",
      state.device(), " for a parameter of shape ", parameter.sizes(), ", ",
      parameter.scalar_type(), " on ", parameter.device());
}

std::vector<Entry> entries_of(mf_moving *moving, size_t count) {
  std::vector<Entry> entries;
  entries.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor &parameter = *moving[i].parameter;
    if (!parameter.requires_grad() || !parameter.grad().defined()) continue;
    Entry entry{&moving[i], parameter, parameter.grad(), false};
    TORCH_CHECK(
        entry.grad.layout() == at::kStrided && parameter.layout() == at::kStrided,
        "memfit: a sparse gradient; give the embedding dense gradients");
    TORCH_CHECK(!parameter.is_inference(), "memfit: a parameter made in inference mode");
    TORCH_CHECK(
        entry.grad.scalar_type() == parameter.scalar_type() &&
            entry.grad.sizes() == parameter.sizes() && entry.grad.device() == parameter.device(),
        "memfit: a gradient of shape ", entry.grad.sizes(), ", ", entry.grad.scalar_type(),
        " for a parameter of shape ", parameter.sizes(), ", ", parameter.scalar_type());
    entry.aligned = same_place(parameter, entry.grad);
    for (mf_tensor state : moving[i].state) {
      if (state == nullptr) continue;
      check_state(entry, *state);
      entry.aligned = entry.aligned && same_place(parameter, *state);
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

// `alike` says which counts a kernel may mix.
template <class Alike>
std::vector<Bucket> buckets_of(std::vector<Entry> &entries, Alike &&alike) {
  std::vector<Bucket> buckets;
  for (Entry &entry : entries) {
    const mf_moving &moving = *entry.moving;
    Bucket wanted{
        entry.parameter.device(), entry.parameter.scalar_type(), moving.lr,
        moving.weight_decay,      moving.count,                  {}};
    auto fits = [&](const Bucket &bucket) {
      return bucket.device == wanted.device && bucket.type == wanted.type &&
          bucket.lr == wanted.lr && bucket.weight_decay == wanted.weight_decay &&
          alike(bucket.count, wanted.count);
    };
    auto found = std::find_if(buckets.begin(), buckets.end(), fits);
    if (found == buckets.end()) found = buckets.insert(buckets.end(), std::move(wanted));
    found->entries.push_back(&entry);
  }
  return buckets;
}

// The numbers that an accelerator's kernel takes as tensors.
struct Numbers {
  at::Tensor step;
  std::optional<at::Tensor> divisor;
};

Numbers numbers_of(const Bucket &bucket, double divisor) {
  if (bucket.device.is_cpu()) return {};
  auto options = at::TensorOptions().dtype(at::kFloat).device(bucket.device);
  Numbers numbers{at::full({}, double(bucket.count + 1), options), std::nullopt};
  if (divisor != 1.0) numbers.divisor = at::full({}, divisor, options);
  return numbers;
}

constexpr int64_t kPiece = 1 << 18;

// Contiguous stand-ins for parts of tensors whose elements lie in different orders: small,
// made once, used for one part after the other.
class Scratch {
 public:
  explicit Scratch(const std::vector<Bucket> &buckets) {
    for (const Bucket &bucket : buckets) {
      int64_t most = 0;
      for (const Entry *entry : bucket.entries) {
        if (!entry->aligned) most = std::max(most, std::min(kPiece, entry->parameter.numel()));
      }
      if (most > 0) reserve(bucket, most);
    }
  }

  // The stand-in number `slot`, filled from `part`.
  at::Tensor fill(const at::Tensor &part, int64_t slot) const {
    for (const at::Tensor &memory : memory_) {
      if (memory.device() != part.device() || memory.scalar_type() != part.scalar_type()) continue;
      at::Tensor copy = memory.select(0, slot).narrow(0, 0, part.numel()).view(part.sizes());
      copy_without_memory(copy, part);
      return copy;
    }
    TORCH_CHECK(false, "memfit: no scratch for this parameter");
  }

 private:
  void reserve(const Bucket &bucket, int64_t most) {
    for (at::Tensor &memory : memory_) {
      if (memory.device() != bucket.device || memory.scalar_type() != bucket.type) continue;
      if (memory.size(1) >= most) return;
      memory = at::Tensor();
      memory = at::empty({4, most}, options(bucket));
      return;
    }
    memory_.push_back(at::empty({4, most}, options(bucket)));
  }

  static at::TensorOptions options(const Bucket &bucket) {
    return at::TensorOptions().dtype(bucket.type).device(bucket.device);
  }

  Tensors memory_;
};

using memfit::Lists;
using memfit::Scalars;

void append(Lists &lists, const Entry &entry) {
  lists.parameters.push_back(entry.parameter);
  lists.grads.push_back(entry.grad);
  for (int i = 0; i < 2; ++i) {
    if (mf_tensor state = entry.moving->state[i]) lists.states[i].push_back(*state);
  }
}

template <class Kernel>
void move_part(const Lists &part, const Scratch &scratch, const Kernel &kernel) {
  const at::Tensor &shape = part.parameters[0];
  if (shape.numel() > kPiece) {
    int64_t rows = shape.size(0);
    int64_t some = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, shape.numel() / rows));
    for (int64_t start = 0; start < rows; start += some) {
      int64_t taken = std::min(some, rows - start);
      auto cut = [&](const Tensors &list) {
        Tensors parts;
        for (const at::Tensor &tensor : list) {
          parts.push_back(taken == 1 ? tensor.select(0, start) : tensor.narrow(0, start, taken));
        }
        return parts;
      };
      Lists smaller{cut(part.parameters), cut(part.grads), {cut(part.states[0]), cut(part.states[1])}};
      move_part(smaller, scratch, kernel);
    }
    return;
  }
  Lists copies;
  copies.parameters.push_back(scratch.fill(shape, 0));
  copies.grads.push_back(scratch.fill(part.grads[0], 1));
  for (int i = 0; i < 2; ++i) {
    if (!part.states[i].empty()) copies.states[i].push_back(scratch.fill(part.states[i][0], 2 + i));
  }
  kernel(copies);
  copy_without_memory(part.parameters[0], copies.parameters[0]);
  for (int i = 0; i < 2; ++i) {
    if (!part.states[i].empty()) copy_without_memory(part.states[i][0], copies.states[i][0]);
  }
}

void moved_one(const Entry &entry, const Numbers &numbers, size_t *moved) {
  entry.parameter.unsafeGetTensorImpl()->bump_version();
  // An accelerator's kernel writes the divided gradient back.
  if (numbers.divisor) entry.grad.unsafeGetTensorImpl()->bump_version();
  for (mf_tensor state : entry.moving->state) {
    if (state) state->unsafeGetTensorImpl()->bump_version();
  }
  entry.moving->count += 1;
  *moved += 1;
}

template <class Kernel>
void move_bucket(
    const Bucket &bucket, const Numbers &numbers, const Scratch &scratch, const Kernel &kernel,
    size_t *moved) {
  Scalars now{bucket.lr, bucket.weight_decay, bucket.count};
  auto run = [&](const Lists &lists) { kernel(lists, now, numbers); };
  Lists together;
  for (const Entry *entry : bucket.entries) {
    if (entry->aligned) append(together, *entry);
  }
  if (!together.parameters.empty()) run(together);
  for (const Entry *entry : bucket.entries) {
    if (!entry->aligned) {
      Lists alone;
      append(alone, *entry);
      move_part(alone, scratch, run);
    }
    moved_one(*entry, numbers, moved);
  }
}

template <class Kernel, class Alike>
void step(
    mf_moving *moving, size_t count, double divisor, size_t *moved, Alike &&alike,
    const Kernel &kernel) {
  *moved = 0;
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Entry> entries = entries_of(moving, count);
  std::vector<Bucket> buckets = buckets_of(entries, alike);
  Scratch scratch(buckets);
  std::vector<Numbers> numbers;
  for (const Bucket &bucket : buckets) numbers.push_back(numbers_of(bucket, divisor));
  try {
    for (size_t i = 0; i < buckets.size(); ++i) {
      move_bucket(buckets[i], numbers[i], scratch, kernel, moved);
    }
  } catch (...) {
    // A kernel may have moved something before it failed.
    *moved = std::max<size_t>(*moved, 1);
    throw;
  }
  // Casts of the old weights must not serve the next forward of this autocast scope.
  if (*moved > 0) mf_autocast_clear();
}

}  // namespace

int mf_adam_step(mf_moving *moving, size_t count, const mf_adam *options, size_t *moved) noexcept {
  return memfit::guarded([&] {
    auto kernel = [&](const Lists &lists, const Scalars &now, const Numbers &numbers) {
      if (lists.parameters[0].is_cpu()) return memfit::adam_on_cpu(lists, now, *options);
      auto run = options->decoupled
          ? static_cast<decltype(&at::_ops::_fused_adamw_::call)>(&at::_ops::_fused_adamw_::call)
          : &at::_ops::_fused_adam_::call;
      Tensors steps(lists.parameters.size(), numbers.step);
      run(lists.parameters, lists.grads, lists.states[0], lists.states[1], {}, steps, now.lr,
          options->beta1, options->beta2, now.weight_decay, options->epsilon, false, false,
          numbers.divisor, std::nullopt);
    };
    auto alike = [](uint64_t a, uint64_t b) { return a == b; };
    step(moving, count, options->divisor, moved, alike, kernel);
  });
}

int mf_sgd_step(mf_moving *moving, size_t count, const mf_sgd *options, size_t *moved) noexcept {
  return memfit::guarded([&] {
    auto kernel = [&](const Lists &lists, const Scalars &now, const Numbers &numbers) {
      if (lists.parameters[0].is_cpu()) return memfit::sgd_on_cpu(lists, now, *options);
      at::_fused_sgd_(
          lists.parameters, lists.grads, lists.states[0], now.weight_decay, options->momentum,
          now.lr, options->dampening, options->nesterov != 0, false, now.count == 0,
          numbers.divisor, std::nullopt);
    };
    // A first step takes the gradient as momentum, undampened.
    auto alike = [](uint64_t a, uint64_t b) { return (a == 0) == (b == 0); };
    step(moving, count, options->divisor, moved, alike, kernel);
  });
}
