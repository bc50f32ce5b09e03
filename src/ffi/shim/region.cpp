// A region's forward pass: saved tensors are dropped, what the recompute needs is kept.
#include "region.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace memfit {

const void *storage_of(const at::Tensor &tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

Region::Region(mf_closure recompute, const mf_region_options &options)
    : recompute_(std::in_place, recompute),
      name_(options.segment),
      checked_(options.checked != 0),
      early_stop_(options.early_stop != 0),
      autocast_(Autocast::now()) {}

bool Region::take(const at::Tensor &tensor, Saved &into) {
  auto slot = static_cast<uint32_t>(slots_.size());
  slots_.emplace_back(tensor);
  if (forward_) {
    // A parameter is noted here too: the segment itself may change it before it ends.
    bool read = tensor.requires_grad() ? is_parameter(tensor) : !forward_->is_input(tensor);
    if (read) note(tensor, false);
    if (checked_) forward_->watch->when_final(slot, detached(tensor));
  }
  auto self = c10::intrusive_ptr<Holder>::unsafe_reclaim_from_nonowning(this);
  into = Saved::hold(self, slot);
  if (enclosing_) enclosing_->collect(tensor, Saved::hold(std::move(self), slot));
  return true;
}

void Region::note(const at::Tensor &tensor, bool registered) {
  auto same = [&](const Read &read) { return read.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl(); };
  if (registered && std::any_of(reads_.begin(), reads_.end(), same)) return;
  const c10::VariableVersion &version = tensor.unsafeGetTensorImpl()->version_counter();
  decltype(Read::tensor) weak(tensor.getIntrusivePtr());
  reads_.push_back(Read{version, version.current_version(), registered, std::move(weak)});
}

void Region::note_leaves(
    const mf_tensor *outputs, size_t count, uint64_t first, const std::vector<const void *> &boundary) {
  using torch::autograd::AccumulateGrad;
  using torch::autograd::Node;
  constexpr uint64_t leaf = std::numeric_limits<uint64_t>::max();
  std::unordered_set<const void *> seen(boundary.begin(), boundary.end());
  std::vector<Node *> open;
  auto visit = [&](Node *node) {
    if (!node || !seen.insert(node).second) return;
    if (node->sequence_nr() != leaf) {
      open.push_back(node);
    } else if (auto *accumulate = dynamic_cast<AccumulateGrad *>(node)) {
      note(accumulate->variable, false);
    }
  };
  for (size_t i = 0; i < count; ++i) {
    if (outputs[i]->defined()) visit(torch::autograd::impl::grad_fn_unsafe(*outputs[i]));
  }
  while (!open.empty()) {
    Node *node = open.back();
    open.pop_back();
    bool inside = node->sequence_nr() >= first;
    for (const auto &edge : node->next_edges()) {
      Node *next = edge.function.get();
      // A node made before the segment is another's, but for one that stands between the
      // segment and a leaf, as the kept cast of a weight does.
      if (next && (inside || next->sequence_nr() == leaf)) visit(next);
    }
  }
}

void Region::settle() {
  if (generators_ && !generators_->moved()) generators_.reset();
}

void Region::release_resources() {
  inputs_.clear();
  values_.clear();
  reads_.clear();
  slots_.clear();
  generators_.reset();
  recompute_.reset();
}

}  // namespace memfit

mf_forward_::mf_forward_(
    c10::intrusive_ptr<memfit::Region> given, const mf_tensor *inputs, size_t count)
    : region(std::move(given)), first_node(at::sequence_number::peek()) {
  for (size_t i = 0; i < count; ++i) {
    storages.push_back(memfit::storage_of(*inputs[i]));
    if (!inputs[i]->defined()) continue;
    if (const void *node = torch::autograd::impl::grad_fn_unsafe(*inputs[i])) boundary.push_back(node);
  }
  memfit::Watch::Sees sees;
  sees.frozen_reads = memfit::any_registered_frozen();
  if (sees.frozen_reads || region->checked_) watch.emplace(*this, sees);
  place.emplace(region);
  region->forward_ = this;
}

mf_forward_::~mf_forward_() {
  region->forward_ = nullptr;
  region->enclosing_.reset();
}

void mf_forward_::is_final(uint32_t slot, const at::Tensor &tensor) {
  region->slots_[slot].checksum = memfit::Checksum(tensor);
}

bool mf_forward_::is_input(const at::Tensor &tensor) const {
  const void *storage = memfit::storage_of(tensor);
  return std::find(storages.begin(), storages.end(), storage) != storages.end();
}

int mf_region_wanted() noexcept {
  using memfit::Link;
  if (!c10::GradMode::is_enabled()) return 0;
  for (auto *place = memfit::Place::innermost(); place && place->link(); place = place->outer()) {
    if (place->link()->kind() != Link::Kind::Other) return place->link()->kind() == Link::Kind::Collect;
  }
  return 1;
}

namespace {

// The devices of the inputs, and the one that this thread works on: a segment whose inputs are
// on the CPU may draw there.
std::vector<int> accelerators_of(const mf_tensor *inputs, size_t count) {
  static const bool none = mf_device_count() == 0;
  std::vector<int> devices;
  if (none) return devices;
  devices.push_back(at::accelerator::getDeviceIndex());
  for (size_t i = 0; i < count; ++i) {
    if (!inputs[i]->defined() || inputs[i]->is_cpu() || inputs[i]->is_meta()) continue;
    int device = inputs[i]->device().index();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  }
  return devices;
}

c10::intrusive_ptr<memfit::Collector> collector_here() {
  for (auto *place = memfit::Place::innermost(); place && place->link(); place = place->outer()) {
    if (place->link()->kind() == memfit::Link::Kind::Collect) {
      auto *collector = static_cast<memfit::Collector *>(place->link());
      return c10::intrusive_ptr<memfit::Collector>::unsafe_reclaim_from_nonowning(collector);
    }
  }
  return {};
}

}  // namespace

int mf_region_begin(
    const mf_tensor *inputs, size_t count, mf_closure recompute, const mf_region_options *options,
    mf_forward *out) noexcept {
  bool uncaptured = false;
  int status = memfit::guarded([&] {
    auto region = c10::make_intrusive<memfit::Region>(recompute, *options);
    try {
      region->generators_ = std::make_unique<memfit::Generators>(accelerators_of(inputs, count));
    } catch (const memfit::Uncaptured &) {
      uncaptured = true;
      throw;
    }
    region->enclosing_ = collector_here();
    region->inputs_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &input = *inputs[i];
      memfit::Region::Input kept{{}, input.defined() && input.requires_grad()};
      if (input.defined()) {
        at::NoGradGuard no_grad;
        kept.saved = memfit::Saved::pack(input, memfit::Saved::As::RegionInput);
      }
      region->inputs_.push_back(std::move(kept));
    }
    *out = new mf_forward_(std::move(region), inputs, count);
  });
  return uncaptured ? 2 : status;
}

int mf_region_end(mf_forward forward, const mf_tensor *outputs, size_t count) noexcept {
  std::unique_ptr<mf_forward_> ended(forward);
  return memfit::guarded([&] {
    ended->place.reset();
    memfit::Region &region = *ended->region;
    if (region.slots_.empty()) return;
    if (ended->watch && !ended->watch->failure().empty()) {
      throw std::runtime_error(ended->watch->failure());
    }
    region.settle();
    region.note_leaves(outputs, count, ended->first_node, ended->boundary);
  });
}

void mf_region_abandon(mf_forward forward) noexcept {
  std::unique_ptr<mf_forward_> ended(forward);
  // An outer recompute that stopped inside this segment keeps what it has packed.
  memfit::guarded([&] { ended->region->settle(); });
}
