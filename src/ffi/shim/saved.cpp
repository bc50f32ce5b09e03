// The chain of links and the engine that asks it.
#include "saved.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <optional>

#include "memfit.h"

namespace memfit {
namespace {

thread_local Place *innermost_place = nullptr;

// One per saved variable, made by the engine before the tensor is known.
struct Hook final : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor &tensor) override { saved = Saved::pack(tensor); }
  at::Tensor call_unpack_hook() override { return saved.unpack(); }
  Saved saved;
};

struct ChainEngine final : torch::autograd::Engine {
  static Engine &instance() {
    static auto *leaked = new ChainEngine;  // its threads may outlive static destruction
    return *leaked;
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (!innermost_place || !innermost_place->link()) return nullptr;
    return std::make_unique<Hook>();
  }
};

void install() {
  static std::once_flag once;
  std::call_once(once, [] { torch::autograd::set_default_engine_stub(&ChainEngine::instance); });
}

// A closure of a link or of a tensor it took. Two threads take turns; a call from inside
// itself is refused.
class Turns {
 public:
  explicit Turns(mf_closure given) : closure_(given) {}

  void call(mf_args &args) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (busy_) throw std::runtime_error("memfit: a saved-tensor link was called from inside itself");
    Place wall(nullptr);
    at::NoGradGuard no_grad;
    at::RecordFunctionGuard unrecorded(false);
    busy_ = true;
    struct Free {
      bool &busy;
      ~Free() { busy = false; }
    } free{busy_};
    closure_.call(args);
  }

 private:
  std::recursive_mutex mutex_;
  bool busy_ = false;
  Closure closure_;
};

struct ClosureHolder final : Holder {
  explicit ClosureHolder(mf_closure given) : turns(given) {}
  at::Tensor unpack(uint32_t) override {
    mf_args args{};
    turns.call(args);
    std::unique_ptr<at::Tensor> out(args.out);
    if (!out || !out->defined()) throw std::runtime_error("memfit: a link gave no tensor back");
    return *out;
  }
  Turns turns;
};

struct ClosureLink final : Link {
  explicit ClosureLink(mf_closure given) : turns(given) {}
  bool take(const at::Tensor &tensor, Saved &into) override {
    at::Tensor in = detached(tensor);
    mf_args args{};
    args.in = &in;
    turns.call(args);
    if (!args.closure) return false;
    into = Saved::hold(c10::make_intrusive<ClosureHolder>(args.closure), 0);
    return true;
  }
  Turns turns;
};

}  // namespace

Place::Place(c10::intrusive_ptr<Link> link) : link_(std::move(link)), outer_(innermost_place) {
  if (link_) install();
  innermost_place = this;
}

Place::~Place() {
  for (Place **at = &innermost_place; *at; at = &(*at)->outer_) {
    if (*at == this) {
      *at = outer_;
      return;
    }
  }
}

Place *Place::innermost() noexcept { return innermost_place; }

at::Tensor detached(const at::Tensor &tensor) { return tensor.tensor_data(); }

uint32_t version_of(const at::Tensor &tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

void throw_modified(const std::string &what, uint64_t expected, uint64_t found) {
  throw CallbackError(mf_park_modified(what.c_str(), expected, found));
}

Saved Saved::pack(const at::Tensor &tensor, As as) {
  std::optional<bool> parameter;
  Saved saved;
  for (Place *place = innermost_place; place && place->link(); place = place->outer()) {
    Link *link = place->link();
    if (link->kind() != Link::Kind::Other) {
      if (as == As::RegionInput) break;
    } else {
      if (!parameter) parameter = is_parameter(tensor);
      if (*parameter) continue;
    }
    if (link->take(tensor, saved)) return saved;
  }
  return keep(tensor);
}

Saved Saved::keep(const at::Tensor &tensor) {
  Saved saved;
  saved.kept_ = detached(tensor);
  saved.number_ = version_of(tensor);
  return saved;
}

Saved Saved::hold(c10::intrusive_ptr<Holder> holder, uint32_t slot) {
  Saved saved;
  saved.holder_ = std::move(holder);
  saved.number_ = slot;
  return saved;
}

at::Tensor Saved::unpack() const {
  if (holder_) return holder_->unpack(number_);
  if (kept_.defined() && version_of(kept_) != number_) {
    throw_modified(describe(kept_), number_, version_of(kept_));
  }
  return kept_;
}

}  // namespace memfit

void *mf_link_new(mf_closure pack) noexcept {
  return c10::make_intrusive<memfit::ClosureLink>(pack).release();
}

void mf_link_drop(void *link) noexcept {
  c10::intrusive_ptr<memfit::ClosureLink>::reclaim(static_cast<memfit::ClosureLink *>(link));
}

void *mf_link_push(void *link) noexcept {
  auto *shared = static_cast<memfit::ClosureLink *>(link);
  return new memfit::Place(c10::intrusive_ptr<memfit::Link>::unsafe_reclaim_from_nonowning(shared));
}

void *mf_links_pause() noexcept { return new memfit::Place(nullptr); }

void mf_place_end(void *place) noexcept { delete static_cast<memfit::Place *>(place); }
