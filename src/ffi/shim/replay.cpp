#include "replay.h"

#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <memory>

namespace memfit {

Generators::Generators(const std::vector<int> &devices) : cpu_(mf_rng_capture()) {
  for (int device : devices) {
    mf_tensor state = nullptr;
    if (mf_rng_device_state(device, &state) != 0) {
      mf_rng_free(cpu_);
      throw Uncaptured();
    }
    devices_.emplace_back(device, std::move(*std::unique_ptr<at::Tensor>(state)));
  }
}

bool Generators::moved() const {
  if (mf_rng_moved(cpu_)) return true;
  for (const auto &[device, state] : devices_) {
    mf_tensor now = nullptr;
    if (mf_rng_device_state(device, &now) != 0) return true;
    if (!std::unique_ptr<at::Tensor>(now)->equal(state)) return true;
  }
  return false;
}

void Generators::restore() const {
  mf_rng_restore(cpu_);
  for (const auto &[device, state] : devices_) {
    at::Tensor handle = state;
    if (mf_rng_set_device_state(device, &handle) != 0) throw Uncaptured();
  }
}

std::vector<int> Generators::devices() const {
  std::vector<int> all;
  for (const auto &[device, state] : devices_) all.push_back(device);
  return all;
}

Autocast Autocast::now() {
  Autocast now{};
  mf_autocast_get(-1, &now.cpu);
  mf_autocast_get(0, &now.accelerator);
  return now;
}

ReplayAutocast::ReplayAutocast(const Autocast &captured) : former_{} {
  if (!captured.any() && !Autocast::now().any()) return;
  mf_autocast_enter(-1, &captured.cpu, &former_.cpu);
  mf_autocast_enter(0, &captured.accelerator, &former_.accelerator);
  entered_ = true;
}

ReplayAutocast::~ReplayAutocast() {
  if (!entered_) return;
  mf_autocast_leave(0, &former_.accelerator);
  mf_autocast_leave(-1, &former_.cpu);
}

PlainTorchScript::PlainTorchScript() : before_(torch::jit::getGraphExecutorOptimize()) {
  if (before_) torch::jit::setGraphExecutorOptimize(false);
}

PlainTorchScript::~PlainTorchScript() {
  if (before_) torch::jit::setGraphExecutorOptimize(true);
}

}  // namespace memfit
