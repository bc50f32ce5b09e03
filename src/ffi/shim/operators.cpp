// Operator boundaries: libtorch's RecordFunction, as a watch over one thread.
#include "operators.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "memfit.h"
#include "saved.h"

namespace memfit {
namespace {

thread_local Watch *innermost = nullptr;
thread_local bool undoing = false;  // inside an operator that changes state in place
// The running statistics that the operator moves and that its backward does not read.
thread_local const void *moving[2] = {};
// Integer scalars that operators made while they were watched: nobody's state.
thread_local std::vector<const void *> made;

// Copies of what an operator will overwrite, written back when it has returned. The writing
// goes behind the version counter: the same bytes come back.
struct Undo final : at::ObserverContext {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;

  void add(const at::Tensor &target) { copies.emplace_back(target.variable_data(), target.detach().clone()); }

  void write_back() const {
    for (const auto &[target, copy] : copies) target.copy_(copy);
  }
};

// Work of our own: no gradients, no links, no records.
struct Aside {
  Place wall{nullptr};
  at::NoGradGuard no_grad;
  at::RecordFunctionGuard unrecorded{false};
};

bool tensor_at(c10::ArrayRef<const c10::IValue> inputs, size_t index) {
  return index < inputs.size() && inputs[index].isTensor() && inputs[index].toTensor().defined();
}

// Where an operator that normalises with running statistics has the first of the two, or 0.
size_t statistics_of(const char *name, c10::ArrayRef<const c10::IValue> inputs) {
  if (!std::strstr(name, "batch_norm") && !std::strstr(name, "instance_norm")) return 0;
  if (std::strstr(name, "backward") || std::strstr(name, "elemt")) return 0;
  if (std::strstr(name, "batch_norm_update_stats")) return 1;
  // In evaluation the statistics are only read.
  if (inputs.size() > 5 && inputs[5].isBool() && !inputs[5].toBool()) return 0;
  return 3;
}

// Whether the tensor keeps its bytes from one step to the next: a step counter, or a
// registered buffer.
const void *storage_of(const at::Tensor &tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool is_integer_scalar(const at::Tensor &tensor) {
  return tensor.defined() && tensor.dim() == 0 && c10::isIntegralType(tensor.scalar_type(), false);
}

bool is_state(const at::Tensor &tensor) {
  if (tensor.requires_grad()) return false;
  if (is_registered(tensor)) return true;
  return is_integer_scalar(tensor) && std::find(made.begin(), made.end(), storage_of(tensor)) == made.end();
}

void remember_made(const std::vector<c10::IValue> &outputs) {
  for (const c10::IValue &output : outputs) {
    if (output.isTensor() && is_integer_scalar(output.toTensor())) made.push_back(storage_of(output.toTensor()));
  }
}

// The storage that the operator overwrites by its name, if any: in a recompute that is undone,
// so what it held before is of no interest.
const void *overwritten_by(const at::RecordFunction &fn) {
  const char *name = fn.name();
  size_t length = std::strlen(name);
  auto inputs = fn.inputs();
  if (inputs.empty()) return nullptr;
  bool in_place = length && name[length - 1] == '_';
  if (!in_place && !std::strstr(fn.overload_name(), "out")) return nullptr;
  size_t index = in_place ? 0 : inputs.size() - 1;
  return tensor_at(inputs, index) ? storage_of(inputs[index].toTensor()) : nullptr;
}

// Not null where the operator changes state; with copies where they are wanted.
std::unique_ptr<Undo> undo_of(const at::RecordFunction &fn, bool copies) {
  const char *name = fn.name();
  size_t length = std::strlen(name);
  auto inputs = fn.inputs();
  std::unique_ptr<Undo> undo;
  auto add = [&](size_t index) {
    if (!undo) undo = std::make_unique<Undo>();
    undo->add(inputs[index].toTensor());
  };
  if (size_t first = statistics_of(name, inputs)) {
    Aside aside;
    undo = std::make_unique<Undo>();
    for (size_t index : {first, first + 1}) {
      if (!tensor_at(inputs, index)) continue;
      moving[index - first] = storage_of(inputs[index].toTensor());
      if (copies) add(index);
    }
  } else if (!copies) {
    return nullptr;
  } else if (length && name[length - 1] == '_') {
    if (tensor_at(inputs, 0) && is_state(inputs[0].toTensor())) {
      Aside aside;
      add(0);
    }
  } else if (std::strstr(fn.overload_name(), "out")) {
    size_t last = inputs.size() - 1;
    if (!inputs.empty() && tensor_at(inputs, last) && is_state(inputs[last].toTensor())) {
      Aside aside;
      add(last);
    }
  }
  return undo;
}

}  // namespace

bool Watch::unfinished() const {
  if (!questionable_ || !just_entered_) return false;
  auto schema = just_entered_->operator_schema();
  return !schema || schema->is_mutable();
}

void Watch::enter(const at::RecordFunction &fn) noexcept {
  ++depth_;
  questionable_ = false;
  just_entered_ = &fn;
  if (!sees_.frozen_reads) return;
  try {
    auto inputs = fn.inputs();
    size_t statistics = statistics_of(fn.name(), inputs);
    const void *overwritten = overwritten_by(fn);
    auto tell = [&](const at::Tensor &tensor) {
      if (!tensor.defined() || tensor.requires_grad() || !is_registered(tensor)) return;
      if (!overwritten || storage_of(tensor) != overwritten) watcher_.reads_frozen(tensor);
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (statistics && (i == statistics || i == statistics + 1)) continue;
      if (inputs[i].isTensor()) {
        tell(inputs[i].toTensor());
      } else if (inputs[i].isTensorList()) {
        for (const at::Tensor &tensor : inputs[i].toTensorList()) tell(tensor);
      }
    }
  } catch (const std::exception &error) {
    if (failure_.empty()) failure_ = error.what();
  }
}

void Watch::leave() noexcept {
  just_entered_ = nullptr;
  if (depth_ == 0) return;
  // The bytes are final once the state has been put back.
  if (!undoing) tell_final(depth_);
  --depth_;
}

struct WatchCallbacks {
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction &fn) {
    Watch *undoer = nullptr;
    for (Watch *watch = innermost; watch; watch = watch->outer_) {
      watch->enter(fn);
      if (watch->sees_.undo) undoer = watch;
    }
    if (undoing || !innermost) return nullptr;
    try {
      std::unique_ptr<Undo> undo = undo_of(fn, undoer != nullptr);
      undoing = undo != nullptr;
      return undo;
    } catch (const std::exception &error) {
      if (undoer && undoer->failure_.empty()) undoer->failure_ = error.what();
      return nullptr;
    }
  }

  static void end(const at::RecordFunction &fn, at::ObserverContext *context) {
    try {
      if (!undoing) remember_made(fn.outputs());
    } catch (const std::exception &) {
      // Out of memory for a pointer: the scalar counts as state.
    }
    if (auto *undo = static_cast<Undo *>(context)) {
      undoing = false;
      moving[0] = moving[1] = nullptr;
      try {
        Aside aside;
        undo->write_back();
      } catch (const std::exception &error) {
        if (innermost && innermost->failure_.empty()) innermost->failure_ = error.what();
      }
    }
    for (Watch *watch = innermost; watch; watch = watch->outer_) watch->leave();
  }
};

Watch::Watch(Watcher &watcher, Sees sees) : watcher_(watcher), sees_(sees), outer_(innermost) {
  handle_ = outer_ ? 0
                   : at::addThreadLocalCallback(
                         at::RecordFunctionCallback(&WatchCallbacks::start, &WatchCallbacks::end)
                             .needsInputs(true)
                             .needsOutputs(true)
                             .scopes({at::RecordScope::FUNCTION}));
  innermost = this;
}

Watch::~Watch() {
  innermost = outer_;
  if (!handle_) return;
  at::removeCallback(handle_);
  made.clear();
}

void Watch::when_final(uint32_t slot, const at::Tensor &tensor) {
  const void *storage = storage_of(tensor);
  if (storage && (storage == moving[0] || storage == moving[1])) return;
  pending_.push_back({slot, depth_, tensor});
  if (depth_ == 0) tell_final(0);
}

void Watch::tell_final(uint32_t depth) noexcept {
  if (pending_.empty()) return;
  try {
    Aside aside;
    while (!pending_.empty() && pending_.back().depth >= depth) {
      Pending last = std::move(pending_.back());
      pending_.pop_back();
      watcher_.is_final(last.slot, last.tensor);
    }
  } catch (const std::exception &error) {
    if (failure_.empty()) failure_ = error.what();
  }
}

}  // namespace memfit
