#include "walk.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>

#include "parallel.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

namespace {

using memfit::Draw;
using memfit::Elements;
using memfit::narrow;
using memfit::Walked;

// Elements that one thread takes at a time.
constexpr int64_t kChunk = 16 * memfit::kRow;
constexpr int64_t kMostDimensions = 64;

Elements elements_of(const at::Tensor &tensor, bool written) {
  // A pointer to write through gives a copy-on-write tensor memory of its own: only then.
  void *data = written ? tensor.mutable_data_ptr() : const_cast<void *>(tensor.const_data_ptr());
  return {data, tensor.scalar_type(), tensor.strides().data()};
}

void check(const mf_moving &moving, const at::Tensor &parameter, const at::Tensor &grad) {
  TORCH_CHECK(
      parameter.is_cpu(), "memfit: this update runs on the CPU, not on ", parameter.device());
  TORCH_CHECK(
      grad.layout() == at::kStrided && parameter.layout() == at::kStrided,
      "memfit: a sparse gradient; give the embedding dense gradients");
  TORCH_CHECK(!parameter.is_inference(), "memfit: a parameter made in inference mode");
  TORCH_CHECK(
      grad.scalar_type() == parameter.scalar_type() && grad.sizes() == parameter.sizes() &&
          grad.device() == parameter.device(),
      "memfit: a gradient of shape ", grad.sizes(), ", ", grad.scalar_type(),
      " for a parameter of shape ", parameter.sizes(), ", ", parameter.scalar_type());
  TORCH_CHECK(
      at::has_internal_overlap(parameter) != at::MemOverlap::Yes,
      "memfit: elements of a parameter share memory; train the tensor it was expanded from");
  TORCH_CHECK(parameter.dim() <= kMostDimensions, "memfit: a parameter of too many dimensions");
  for (mf_tensor state : moving.state) {
    TORCH_CHECK(
        state == nullptr || state->is_cpu(), "memfit: state away from its parameter's device");
  }
}

void check_kept(const at::Tensor &parameter, const at::Tensor &kept) {
  bool wide = parameter.scalar_type() == at::kDouble;
  at::ScalarType type = kept.scalar_type();
  TORCH_CHECK(
      kept.sizes() == parameter.sizes() && kept.layout() == at::kStrided &&
          (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf ||
           (wide && type == at::kDouble)),
      "memfit: optimizer state of shape ", kept.sizes(), ", ", type, " for a parameter of shape ",
      parameter.sizes(), ", ", parameter.scalar_type());
}

// Leaves the strides out where the elements follow each other in the order of the walk.
void straighten(Walked &walked, const std::vector<const at::Tensor *> &tensors) {
  Elements *elements[] = {&walked.weight, &walked.slope, &walked.kept[0], &walked.kept[1]};
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]->is_contiguous()) elements[i]->strides = nullptr;
  }
}

// Calls visit(offset, stride, length) for the runs of elements that lie evenly.
template <class Visit>
MEMFIT_INLINE void each_run(
    const Walked &of, const Elements &elements, int64_t start, int64_t length, Visit &&visit) {
  auto sizes = of.parameter.sizes();
  int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  int64_t index[kMostDimensions];
  int64_t offset = 0;
  for (int64_t d = last; d >= 0; --d) {
    index[d] = start % sizes[d];
    start /= sizes[d];
    offset += index[d] * elements.strides[d];
  }
  while (length > 0) {
    int64_t run = std::min(length, sizes[last] - index[last]);
    visit(offset, elements.strides[last], run);
    length -= run;
    index[last] += run;
    offset += run * elements.strides[last];
    for (int64_t d = last; d > 0 && index[d] == sizes[d]; --d) {
      index[d] = 0;
      index[d - 1] += 1;
      offset += elements.strides[d - 1] - sizes[d] * elements.strides[d];
    }
  }
}

template <class Word>
void gather(const Walked &of, const Elements &from, int64_t start, int64_t length, void *to) {
  auto *out = static_cast<Word *>(to);
  each_run(of, from, start, length, [&](int64_t offset, int64_t stride, int64_t run) {
    const Word *in = static_cast<const Word *>(from.data) + offset;
    for (int64_t i = 0; i < run; ++i) *out++ = in[i * stride];
  });
}

template <class Word>
void scatter(const Walked &of, const Elements &to, int64_t start, int64_t length, const void *from) {
  const auto *in = static_cast<const Word *>(from);
  each_run(of, to, start, length, [&](int64_t offset, int64_t stride, int64_t run) {
    Word *out = static_cast<Word *>(to.data) + offset;
    for (int64_t i = 0; i < run; ++i) out[i * stride] = *in++;
  });
}

size_t width(at::ScalarType type) {
  return type == at::kDouble ? 8 : type == at::kFloat ? 4 : 2;
}

// A function must be no template to be compiled for several instruction sets.
#define MEMFIT_CONVERSIONS(Element, Number)                                                   \
  MEMFIT_CLONES void widen_all(const Element *__restrict from, int64_t n, Number *__restrict to) { \
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Number>(memfit::widen(from[i]));               \
  }                                                                                           \
  MEMFIT_CLONES void narrow_all(const Number *__restrict from, int64_t n, Element *__restrict to) { \
    for (int64_t i = 0; i < n; ++i) narrow(to + i, static_cast<float>(from[i]));              \
  }                                                                                           \
  MEMFIT_CLONES void round_all(                                                               \
      const Number *__restrict from, int64_t n, Element *__restrict to, Draw draw, uint32_t at) { \
    for (int64_t i = 0; i < n; ++i) {                                                         \
      narrow(to + i, static_cast<float>(from[i]), memfit::random_of(draw, at + uint32_t(i))); \
    }                                                                                         \
  }
MEMFIT_CONVERSIONS(c10::BFloat16, float)
MEMFIT_CONVERSIONS(c10::Half, float)
MEMFIT_CONVERSIONS(c10::BFloat16, double)
MEMFIT_CONVERSIONS(c10::Half, double)
MEMFIT_CONVERSIONS(float, double)
#undef MEMFIT_CONVERSIONS

// Calls body with a typed null pointer for an element that is no number yet.
template <class Number, class Body>
void by_type(at::ScalarType type, Body &&body) {
  if (type == at::kBFloat16) return body(static_cast<c10::BFloat16 *>(nullptr));
  if (type == at::kHalf) return body(static_cast<c10::Half *>(nullptr));
  if constexpr (std::is_same_v<Number, double>) return body(static_cast<float *>(nullptr));
}

template <class Number>
constexpr at::ScalarType kNumber = std::is_same_v<Number, double> ? at::kDouble : at::kFloat;

char *at_element(const Elements &elements, int64_t start) {
  return static_cast<char *>(elements.data) + start * static_cast<int64_t>(width(elements.type));
}

}  // namespace

std::vector<Walked> memfit::walked_of(
    mf_moving *moving, size_t count, size_t kept,
    c10::function_ref<bool(const mf_moving &)> quantised) {
  std::vector<Walked> all;
  all.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor &parameter = *moving[i].parameter;
    if (!parameter.requires_grad() || !parameter.grad().defined()) continue;
    Walked one{&moving[i], parameter, parameter.grad(), {}, {}, {}, parameter.numel()};
    check(moving[i], parameter, one.grad);
    bool own = quantised(moving[i]);
    std::vector<const at::Tensor *> tensors{&one.parameter, &one.grad};
    for (size_t k = 0; k < kept && !own; ++k) {
      TORCH_CHECK(moving[i].state[k] != nullptr, "memfit: a parameter without its state");
      check_kept(parameter, *moving[i].state[k]);
      tensors.push_back(moving[i].state[k]);
      one.kept[k] = elements_of(*moving[i].state[k], true);
    }
    one.weight = elements_of(parameter, true);
    one.slope = elements_of(one.grad, false);
    straighten(one, tensors);
    all.push_back(std::move(one));
  }
  return all;
}

void memfit::walk(
    std::vector<Walked> &walked, size_t *moved,
    c10::function_ref<void(const Walked &, int64_t, int64_t)> body) {
  struct Chunk {
    const Walked *of;
    int64_t start, end;
  };
  std::vector<Chunk> chunks;
  for (const Walked &one : walked) {
    for (int64_t start = 0; start < one.numel; start += kChunk) {
      chunks.push_back({&one, start, std::min(start + kChunk, one.numel)});
    }
  }
  parallel(static_cast<int64_t>(chunks.size()), [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Chunk &chunk = chunks[static_cast<size_t>(i)];
      for (int64_t at = chunk.start; at < chunk.end; at += kRow) {
        body(*chunk.of, at, std::min(kRow, chunk.end - at));
      }
    }
  });
  for (Walked &one : walked) {
    one.parameter.unsafeGetTensorImpl()->bump_version();
    for (mf_tensor state : one.moving->state) {
      if (state) state->unsafeGetTensorImpl()->bump_version();
    }
    one.moving->count += 1;
    *moved += 1;
  }
  // Casts of the old weights must not serve the next forward of this autocast scope.
  if (!walked.empty()) mf_autocast_clear();
}

template <class Number>
Number *memfit::Row<Number>::read(
    const Walked &of, const Elements &from, int64_t start, int64_t length) {
  void *source = at_element(from, start);
  if (from.strides) {
    source = raw_;
    switch (width(from.type)) {
      case 8: gather<uint64_t>(of, from, start, length, raw_); break;
      case 4: gather<uint32_t>(of, from, start, length, raw_); break;
      default: gather<uint16_t>(of, from, start, length, raw_);
    }
  }
  if (from.type == kNumber<Number>) return static_cast<Number *>(source);
  by_type<Number>(from.type, [&](auto *type) {
    widen_all(static_cast<decltype(type)>(source), length, numbers_);
  });
  return numbers_;
}

template <class Number>
void memfit::Row<Number>::write(
    const Walked &of, const Elements &to, int64_t start, int64_t length, const Rounding &rounding) {
  void *target = to.strides ? static_cast<void *>(raw_) : at_element(to, start);
  if (to.type != kNumber<Number>) {
    by_type<Number>(to.type, [&](auto *type) {
      auto *typed = static_cast<decltype(type)>(target);
      if (!rounding.random) return narrow_all(numbers_, length, typed);
      const mf_moving &moving = *of.moving;
      auto index = static_cast<uint64_t>(start);
      Draw draw = draw_of(rounding.seed, moving.key, moving.count, rounding.use, index >> 32);
      round_all(numbers_, length, typed, draw, static_cast<uint32_t>(index));
    });
  }
  if (!to.strides) return;
  switch (width(to.type)) {
    case 8: return scatter<uint64_t>(of, to, start, length, raw_);
    case 4: return scatter<uint32_t>(of, to, start, length, raw_);
    default: return scatter<uint16_t>(of, to, start, length, raw_);
  }
}

template class memfit::Row<float>;
template class memfit::Row<double>;
