#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "memfit.h"

namespace {

// A closure that several owners may call: one call at a time, none after it was closed.
class Shared {
 public:
  explicit Shared(mf_closure given) : closure_(std::make_unique<memfit::Closure>(given)) {}

  void call() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!closure_ || closed_) return;
    TORCH_CHECK(!running_, "a gradient hook ran inside itself");
    running_ = true;
    mf_args args{};
    try {
      closure_->call(args);
    } catch (...) {
      running_ = false;
      throw;
    }
    running_ = false;
  }

  void close() noexcept {
    closed_ = true;
    // A running call keeps the closure; it goes with the last owner then.
    std::unique_lock<std::recursive_mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && !running_) closure_.reset();
  }

  bool closed() const { return closed_; }

 private:
  std::recursive_mutex mutex_;
  std::unique_ptr<memfit::Closure> closure_;
  std::atomic<bool> closed_{false};
  bool running_ = false;
};

// All hooks of one leaf: libtorch has room for one.
struct LeafHooks : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor &tensor) override {
    if (before) (*before)(tensor);
    std::vector<std::shared_ptr<Shared>> now;
    {
      std::lock_guard<std::mutex> lock(mutex);
      drop_closed();
      now = hooks;
    }
    for (auto &hook : now) hook->call();
  }

  void add(std::shared_ptr<Shared> hook) {
    std::lock_guard<std::mutex> lock(mutex);
    drop_closed();
    hooks.push_back(std::move(hook));
  }

  void drop_closed() {
    auto end = std::remove_if(hooks.begin(), hooks.end(), [](auto &hook) { return hook->closed(); });
    hooks.erase(end, hooks.end());
  }

  std::unique_ptr<torch::autograd::PostAccumulateGradHook> before;
  std::mutex mutex;
  std::vector<std::shared_ptr<Shared>> hooks;
};

}  // namespace

struct mf_hook {
  std::shared_ptr<Shared> shared;
};

int mf_hook_on_gradient(mf_tensor leaf, mf_closure closure, mf_hook **hook) noexcept {
  auto shared = std::make_shared<Shared>(closure);
  return memfit::guarded([&] {
    TORCH_CHECK(leaf->is_leaf() && leaf->requires_grad(), "only a leaf that requires a gradient");
    auto &slot = torch::autograd::impl::post_acc_grad_hooks(*leaf);
    auto *ours = dynamic_cast<LeafHooks *>(slot.get());
    if (!ours) {
      auto made = std::make_unique<LeafHooks>();
      made->before = std::move(slot);
      ours = made.get();
      torch::autograd::impl::set_post_acc_grad_hooks(*leaf, std::move(made));
    }
    ours->add(shared);
    *hook = new mf_hook{std::move(shared)};
  });
}

int mf_hook_before_backward(mf_tensor tensor, mf_closure closure) noexcept {
  auto shared = std::make_shared<Shared>(closure);
  return memfit::guarded([&] {
    TORCH_CHECK(tensor->requires_grad(), "only a tensor that requires a gradient");
    tensor->register_hook([shared](const at::Tensor &) { shared->call(); });
  });
}

int mf_hook_after_backward(mf_closure closure) noexcept {
  auto shared = std::make_shared<Shared>(closure);
  return memfit::guarded([&] {
    torch::autograd::Engine::get_default_engine().queue_callback([shared] { shared->call(); });
  });
}

void mf_hook_drop(mf_hook *hook) noexcept {
  hook->shared->close();
  delete hook;
}
