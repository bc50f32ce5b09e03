// Loops on libtorch's own threads.
//
// at::parallel_for is a template: in a file that is compiled without OpenMP it is a plain loop.
// This one runs inside libtorch, with whatever threads that was built with.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace memfit {

// Calls body(from, to) for parts of 0..count, each on one of torch's threads; as many as
// tch::set_num_threads says. What the body throws is thrown here. Takes nothing from
// libtorch's allocators.
void parallel(int64_t count, c10::function_ref<void(int64_t, int64_t)> body);

}  // namespace memfit
