// A region's backward: the segment runs again, what it saves is collected and handed out.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "region.h"

namespace memfit {
namespace {

thread_local bool leaving = false;

// A plain exception: one of libtorch's own would gather a backtrace.
struct Leaving : std::exception {
  const char *what() const noexcept override { return "memfit: the recompute has what it needs"; }
};

template <class Value>
struct Restored {
  explicit Restored(Value &at, Value now) : at_(at), before_(at) { at = now; }
  ~Restored() { at_ = before_; }
  Value &at_;
  Value before_;
};

std::string text_of(c10::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  std::string text = "[";
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    text += (axis ? ", " : "") + std::to_string(sizes[axis]);
  }
  return text + "] " + c10::toString(dtype) + " on " + device.str();
}

}  // namespace

Collector::Collector(Region &region, const std::vector<at::Tensor> &inputs)
    : region_(region), total_(region.slots_.size()), partial_(region.forward_ != nullptr) {
  for (const at::Tensor &input : inputs) inputs_.push_back(storage_of(input));
  if (region.checked_) checksums_.resize(total_);
}

bool Collector::is_input(const at::Tensor &tensor) const {
  return std::find(inputs_.begin(), inputs_.end(), storage_of(tensor)) != inputs_.end();
}

bool Collector::take(const at::Tensor &tensor, Saved &into) {
  into = Saved::keep(tensor);
  collect(tensor, into);
  return true;
}

void Collector::collect(const at::Tensor &tensor, Saved value) {
  if (leaving) throw Leaving();
  auto fail = [&](std::string what) {
    problem = std::move(what);
    leaving = true;
    throw Leaving();
  };
  if (next_ == total_) {
    if (partial_) return;
    fail("it saved more than the " + std::to_string(total_) + " tensors of forward");
  }
  const Slot &slot = region_.slots_[next_];
  if (!slot.fits(tensor)) {
    fail(
        "saved tensor " + std::to_string(next_) + " is " +
        text_of(tensor.sizes(), tensor.scalar_type(), tensor.device()) + ", it was " +
        text_of(slot.sizes, slot.dtype, slot.device));
  }
  region_.values_[next_] = std::move(value);
  if (region_.checked_) watch->when_final(static_cast<uint32_t>(next_), detached(tensor));
  // An operator may pack what its kernel fills later, as RReLU does with its noise.
  if (!tensor.requires_grad() && !is_input(tensor) && !is_registered(tensor)) watch->mark_questionable();
  next_ += 1;
  if (next_ == total_ && region_.early_stop_ && !watch->unfinished()) {
    stopped = true;
    leaving = true;
    throw Leaving();
  }
}

void Collector::is_final(uint32_t slot, const at::Tensor &tensor) { checksums_[slot] = Checksum(tensor); }

void Collector::check() const {
  if (!problem.empty()) region_.mismatch(problem);
  if (next_ < total_) {
    region_.mismatch(
        "it saved " + std::to_string(next_) + " of the " + std::to_string(total_) + " tensors of forward");
  }
  if (!watch->failure().empty()) throw std::runtime_error(watch->failure());
  for (size_t i = 0; i < checksums_.size(); ++i) {
    const Slot &slot = region_.slots_[i];
    if (checksums_[i] != slot.checksum) {
      region_.mismatch(
          "saved tensor " + std::to_string(i) + ", " + text_of(slot.sizes, slot.dtype, slot.device) +
          ", has other values");
    }
  }
}

void Region::mismatch(const std::string &what) const {
  throw CallbackError(mf_park_mismatch(name_.c_str(), what.c_str()));
}

at::Tensor Region::unpack(uint32_t slot) {
  Saved value;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    int task = torch::autograd::get_current_graph_task_id();
    if (task != task_ || slot >= values_.size() || !values_[slot]) recompute(task);
    value = std::move(values_[slot]);
    values_[slot] = Saved();
  }
  return value.unpack();
}

void Region::check_reads() const {
  for (const Read &read : reads_) {
    if (read.version.current_version() == read.expected) continue;
    auto tensor = read.tensor.lock();
    std::string what = tensor ? describe(at::Tensor(std::move(tensor))) : "a tensor";
    throw_modified(what + ", read by segment `" + name_ + "`,", read.expected, read.version.current_version());
  }
}

std::vector<at::Tensor> Region::unpack_inputs() const {
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (const Input &input : inputs_) {
    at::Tensor tensor;
    if (input.saved) tensor = detached(input.saved.unpack());
    if (input.requires_grad) tensor.set_requires_grad(true);
    inputs.push_back(std::move(tensor));
  }
  return inputs;
}

void Region::recompute(int task) {
  if (busy_) {
    throw std::runtime_error("memfit: segment `" + name_ + "` needs itself while it is recomputed");
  }
  Restored<bool> busy(busy_, true);
  Restored<bool> not_leaving(leaving, false);
  check_reads();
  values_.clear();
  values_.resize(slots_.size());
  task_ = task;
  try {
    std::vector<at::Tensor> inputs = unpack_inputs();
    std::vector<mf_tensor> handles;
    for (at::Tensor &input : inputs) handles.push_back(&input);
    auto collector = c10::make_intrusive<Collector>(*this, inputs);

    Place wall(nullptr);
    Place place(collector);
    at::AutoGradMode grad_mode(true);
    ReplayAutocast autocast(autocast_);
    PlainTorchScript plain;
    std::optional<ReplayGenerators> generators;
    if (generators_) generators.emplace(*generators_);
    at::RecordFunctionGuard recorded(true);
    Watch::Sees sees;
    sees.undo = true;
    Watch watch(*collector, sees);
    collector->watch = &watch;

    mf_args args{};
    args.inputs = handles.data();
    args.count = handles.size();
    try {
      recompute_->call(args);
    } catch (const std::exception &) {
      if (!collector->stopped && collector->problem.empty()) throw;
    }
    collector->check();
  } catch (...) {
    values_.clear();
    throw;
  }
  forget_after(task);
}

void Region::forget_after(int task) {
  if (task < 0) return;
  // A partial backward leaves tensors behind that nobody asks for.
  auto self = c10::intrusive_ptr<Region>::unsafe_reclaim_from_nonowning(this);
  c10::weak_intrusive_ptr<Region> weak(self);
  torch::autograd::Engine::get_default_engine().queue_callback([weak, task] {
    auto region = weak.lock();
    if (!region) return;
    std::lock_guard<std::recursive_mutex> lock(region->mutex_);
    if (region->task_ == task) region->values_.clear();
  });
}

}  // namespace memfit

int mf_recompute_leaving() noexcept { return memfit::leaving ? 1 : 0; }
