#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <cstring>
#include <mutex>

#include "memfit.h"

struct mf_rng_ {
  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

namespace {

at::CPUGeneratorImpl &cpu() {
  static auto *generator = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  return *generator;
}

// Bits, not values: a cached NaN is equal to itself.
template <class Number>
bool same(const std::optional<Number> &a, const std::optional<Number> &b) {
  return a.has_value() == b.has_value() && (!a || std::memcmp(&*a, &*b, sizeof(Number)) == 0);
}

bool same(const at::mt19937 &a, const at::mt19937 &b) {
  auto left = a.data(), right = b.data();
  return left.left_ == right.left_ && left.next_ == right.next_ && left.seed_ == right.seed_ &&
      left.seeded_ == right.seeded_ && left.state_ == right.state_;
}

at::Generator of_device(int device) {
  auto type = at::accelerator::getAccelerator(false);
  TORCH_CHECK(type.has_value(), "memfit: no accelerator");
  return at::globalContext().defaultGenerator({*type, static_cast<c10::DeviceIndex>(device)});
}

}  // namespace

mf_rng mf_rng_capture() noexcept {
  auto &generator = cpu();
  std::lock_guard<std::mutex> lock(generator.mutex_);
  return new mf_rng_{
      generator.engine(), generator.next_float_normal_sample(),
      generator.next_double_normal_sample()};
}

void mf_rng_restore(mf_rng saved) noexcept {
  auto &generator = cpu();
  std::lock_guard<std::mutex> lock(generator.mutex_);
  generator.set_engine(saved->engine);
  generator.set_next_float_normal_sample(saved->next_float);
  generator.set_next_double_normal_sample(saved->next_double);
}

int mf_rng_moved(mf_rng saved) noexcept {
  auto &generator = cpu();
  std::lock_guard<std::mutex> lock(generator.mutex_);
  return same(generator.engine(), saved->engine) &&
          same(generator.next_float_normal_sample(), saved->next_float) &&
          same(generator.next_double_normal_sample(), saved->next_double)
      ? 0
      : 1;
}

size_t mf_rng_bytes() noexcept { return sizeof(mf_rng_); }

void mf_rng_free(mf_rng saved) noexcept { delete saved; }

int mf_rng_pack(mf_rng saved, mf_tensor *out) noexcept {
  return memfit::guarded([&] {
    auto scratch = at::make_generator<at::CPUGeneratorImpl>();
    auto *copy = scratch.get<at::CPUGeneratorImpl>();
    copy->set_engine(saved->engine);
    copy->set_next_float_normal_sample(saved->next_float);
    copy->set_next_double_normal_sample(saved->next_double);
    *out = new at::Tensor(scratch.get_state());
  });
}

int mf_rng_unpack(mf_tensor state, mf_rng *out) noexcept {
  return memfit::guarded([&] {
    auto scratch = at::make_generator<at::CPUGeneratorImpl>();
    scratch.set_state(*state);
    auto *copy = scratch.get<at::CPUGeneratorImpl>();
    *out = new mf_rng_{
        copy->engine(), copy->next_float_normal_sample(), copy->next_double_normal_sample()};
  });
}

int mf_rng_device_state(int device, mf_tensor *out) noexcept {
  return memfit::guarded([&] {
    at::Generator generator = of_device(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    *out = new at::Tensor(generator.get_state());
  });
}

int mf_rng_set_device_state(int device, mf_tensor state) noexcept {
  return memfit::guarded([&] {
    at::Generator generator = of_device(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*state);
  });
}
