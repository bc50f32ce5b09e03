// One pass over many gradients: measure, widen. On the CPU in fixed chunks, so
// that a sum has the same bits whatever the number of threads.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <map>
#include <vector>

#include "lanes.h"
#include "memfit.h"
#include "parallel.h"

namespace {

using memfit::Double16;
using memfit::Float16;

constexpr int64_t kChunk = 1 << 15;

struct Chunk {
  const at::Tensor *tensor;
  int64_t start, length;
};

// Dense in memory: the order of its elements does not matter to what is done here.
bool dense(const at::Tensor &tensor) { return tensor.is_non_overlapping_and_dense(); }

std::vector<Chunk> chunks_of(const std::vector<at::Tensor> &tensors) {
  std::vector<Chunk> chunks;
  for (const at::Tensor &tensor : tensors) {
    for (int64_t start = 0; start < tensor.numel(); start += kChunk) {
      chunks.push_back({&tensor, start, std::min(kChunk, tensor.numel() - start)});
    }
  }
  return chunks;
}

template <class Body>
void each_chunk(const std::vector<Chunk> &chunks, Body &&body) {
  memfit::parallel(static_cast<int64_t>(chunks.size()), [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) body(i);
  });
}

MEMFIT_INLINE double finish(const Double16 &sums) {
  double sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += sums[lane];
  return sum;
}

// The square of an fp32 number is exact in a double and cannot overflow it: the sum is not
// finite where, and only where, a number is not.
template <class Element>
MEMFIT_INLINE double squares(const Element *values, int64_t length, float factor) {
  Double16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) {
    Float16 scaled = memfit::load(values + i) * factor;
    Double16 wide = __builtin_convertvector(scaled, Double16);
    sums += wide * wide;
  }
  double sum = finish(sums);
  for (; i < length; ++i) {
    double wide = memfit::widen(values[i]) * factor;
    sum += wide * wide;
  }
  return sum;
}

MEMFIT_CLONES double squares_of(const float *v, int64_t n, float f) { return squares(v, n, f); }
MEMFIT_CLONES double squares_of(const c10::BFloat16 *v, int64_t n, float f) {
  return squares(v, n, f);
}
MEMFIT_CLONES double squares_of(const c10::Half *v, int64_t n, float f) { return squares(v, n, f); }

double squares_of(const Chunk &chunk, double factor, bool &finite) {
  const at::Tensor &tensor = *chunk.tensor;
  float narrow = static_cast<float>(factor);
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return squares_of(tensor.const_data_ptr<float>() + chunk.start, chunk.length, narrow);
    case at::kBFloat16:
      return squares_of(tensor.const_data_ptr<at::BFloat16>() + chunk.start, chunk.length, narrow);
    case at::kHalf:
      return squares_of(tensor.const_data_ptr<at::Half>() + chunk.start, chunk.length, narrow);
    default: {
      const double *values = tensor.const_data_ptr<double>() + chunk.start;
      double sum = 0;
      for (int64_t i = 0; i < chunk.length; ++i) {
        double value = values[i] * factor;
        finite = finite && std::isfinite(value);
        sum += value * value;
      }
      return sum;
    }
  }
}

bool supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

void measure_cpu(const std::vector<at::Tensor> &tensors, double factor, mf_measured *out) {
  std::vector<Chunk> chunks = chunks_of(tensors);
  std::vector<double> sums(chunks.size());
  std::vector<char> finite(chunks.size(), 1);
  each_chunk(chunks, [&](int64_t i) {
    bool all = true;
    sums[i] = squares_of(chunks[i], factor, all);
    bool wide = chunks[i].tensor->scalar_type() == at::kDouble;
    finite[i] = wide ? all : std::isfinite(sums[i]);
  });
  for (size_t i = 0; i < sums.size(); ++i) {
    out->squared_norm += sums[i];
    if (!finite[i]) out->non_finite = 1;
  }
}

// A tensor with gaps or overlaps, a chunk's worth at a time.
void measure_pieces(const at::Tensor &tensor, double factor, mf_measured *out) {
  if (dense(tensor)) return measure_cpu({tensor}, factor, out);
  if (tensor.numel() <= kChunk) return measure_cpu({tensor.contiguous()}, factor, out);
  for (int64_t i = 0; i < tensor.size(0); ++i) measure_pieces(tensor.select(0, i), factor, out);
}

// Norms and largest magnitudes in one readback. The factor acts on the results; a magnitude
// that it takes out of fp32's range is as little finite as on the CPU.
void measure_device(const std::vector<at::Tensor> &tensors, double factor, mf_measured *out) {
  auto norms = at::_foreach_norm(tensors, 2, at::kFloat);
  auto largest = at::_foreach_norm(tensors, INFINITY, at::kFloat);
  norms.insert(norms.end(), largest.begin(), largest.end());
  at::Tensor read = at::stack(norms).cpu();
  const float *values = read.const_data_ptr<float>();
  for (size_t i = 0; i < tensors.size(); ++i) {
    double norm = double(values[i]) * factor;
    double most = double(values[tensors.size() + i]) * factor;
    if (!std::isfinite(static_cast<float>(most))) out->non_finite = 1;
    out->squared_norm += norm * norm;
  }
}

// f is applied to each element, widened to fp32 (fp64 stays), and rounded back.
template <class Element>
MEMFIT_INLINE void add(float *sums, const Element *values, int64_t length) {
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) {
    memfit::store(sums + i, memfit::load(sums + i) + memfit::load(values + i));
  }
  for (; i < length; ++i) sums[i] += memfit::widen(values[i]);
}

MEMFIT_CLONES void add_of(float *s, const c10::BFloat16 *v, int64_t n) { add(s, v, n); }
MEMFIT_CLONES void add_of(float *s, const c10::Half *v, int64_t n) { add(s, v, n); }

void bump(const mf_tensor *tensors, size_t count) {
  for (size_t i = 0; i < count; ++i) tensors[i]->unsafeGetTensorImpl()->bump_version();
}

bool fast(const at::Tensor &tensor) {
  return tensor.is_cpu() && dense(tensor) && supported(tensor.scalar_type());
}

}  // namespace

int mf_measure(const mf_tensor *tensors, size_t count, double factor, mf_measured *out) noexcept {
  return memfit::guarded([&] {
    at::AutoDispatchBelowADInplaceOrView below;
    *out = {0.0, 0};
    std::vector<at::Tensor> host;
    std::map<c10::DeviceIndex, std::vector<at::Tensor>> devices;
    for (size_t i = 0; i < count; ++i) {
      at::Tensor tensor = *tensors[i];
      TORCH_CHECK(
          tensor.layout() == at::kStrided,
          "memfit: a sparse gradient; give the embedding dense gradients");
      TORCH_CHECK(
          supported(tensor.scalar_type()), "memfit: a gradient of dtype ", tensor.scalar_type(),
          " cannot be measured");
      if (!tensor.is_cpu()) {
        devices[tensor.device().index()].push_back(tensor);
      } else if (dense(tensor)) {
        host.push_back(tensor);
      } else {
        measure_pieces(tensor, factor, out);
      }
    }
    measure_cpu(host, factor, out);
    for (auto &[device, list] : devices) measure_device(list, factor, out);
  });
}

int mf_add_to(const mf_tensor *sums, const mf_tensor *tensors, size_t count) noexcept {
  return memfit::guarded([&] {
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<at::Tensor> narrow;
    std::vector<const at::Tensor *> wide;
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &sum = *sums[i], &tensor = *tensors[i];
      TORCH_CHECK(sum.sizes() == tensor.sizes(), "a sum of shape ", sum.sizes(), " for ", tensor.sizes());
      auto type = tensor.scalar_type();
      bool quick = fast(sum) && fast(tensor) && sum.strides() == tensor.strides() &&
          sum.scalar_type() == at::kFloat && (type == at::kBFloat16 || type == at::kHalf);
      if (!quick) {
        sum.add_(tensor);
        continue;
      }
      narrow.push_back(tensor);
      wide.push_back(&sum);
    }
    std::vector<Chunk> chunks = chunks_of(narrow);
    each_chunk(chunks, [&](int64_t i) {
      const Chunk &chunk = chunks[i];
      float *sum = wide[chunk.tensor - narrow.data()]->mutable_data_ptr<float>() + chunk.start;
      if (chunk.tensor->scalar_type() == at::kHalf) {
        add_of(sum, chunk.tensor->const_data_ptr<at::Half>() + chunk.start, chunk.length);
      } else {
        add_of(sum, chunk.tensor->const_data_ptr<at::BFloat16>() + chunk.start, chunk.length);
      }
    });
    bump(sums, count);
  });
}

int mf_cast_into(mf_tensor to, mf_tensor from) noexcept {
  return memfit::guarded([&] {
    at::AutoDispatchBelowADInplaceOrView below;
    to->copy_(*from);
    to->unsafeGetTensorImpl()->bump_version();
  });
}
