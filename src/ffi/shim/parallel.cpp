#include "parallel.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <vector>

#include <dlfcn.h>

#include "memfit.h"

void memfit::parallel(int64_t count, c10::function_ref<void(int64_t, int64_t)> body) {
  if (count <= 0) return;
  if (count == 1) return body(0, 1);
  // An iterator over one byte per index: where a part stands in it tells its indices.
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<char> places(static_cast<size_t>(count));
  at::Tensor tensor = at::from_blob(places.data(), {count}, at::TensorOptions(at::kByte));
  auto iterator = at::TensorIteratorConfig()
                      .set_check_mem_overlap(false)
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .add_output(tensor)
                      .build();
  auto loop = [&](char **data, const int64_t *, int64_t length, int64_t) {
    int64_t from = data[0] - places.data();
    body(from, from + length);
  };
  iterator.for_each(loop, 1);
}

void mf_threads_alone() noexcept {
  // libtorch's loops ask OpenMP, which keeps the number per thread; whichever OpenMP it came with.
  // The first loop of a thread sets the number that the process has; after this one has, no more.
  (void)at::get_num_threads();
  using Setter = void (*)(int);
  auto set = reinterpret_cast<Setter>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set != nullptr) set(1);
}
