// Which storages are parameters and buffers: a set of StorageImpls, held weakly, so that no
// later storage can take a registered one's address.
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memfit.h"
#include "saved.h"

namespace memfit {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Entry {
  WeakStorage storage;
  WeakTensor tensor;  // the first one registered with this storage
  std::string name;
  size_t count;
};

using Entries = std::unordered_map<const c10::StorageImpl *, std::shared_ptr<Entry>>;

// Registrations change the master; each thread reads its own copy without a lock and renews
// it when the generation has moved.
struct Master {
  std::mutex mutex;
  Entries entries;
  std::shared_ptr<const Entries> copy;
  std::atomic<uint64_t> generation{0};
};

Master &master() {
  static auto *leaked = new Master;  // other threads may still look when statics go
  return *leaked;
}

const Entries *current() {
  thread_local uint64_t seen = 0;
  thread_local std::shared_ptr<const Entries> copy;
  Master &all = master();
  if (all.generation.load(std::memory_order_acquire) == seen) return copy.get();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (!all.copy) all.copy = std::make_shared<const Entries>(all.entries);
  copy = all.copy;
  seen = all.generation.load(std::memory_order_relaxed);
  return copy.get();
}

const Entry *find(const at::Tensor &tensor) {
  const Entries *entries = current();
  if (!entries || entries->empty() || !tensor.has_storage()) return nullptr;
  auto found = entries->find(tensor.storage().unsafeGetStorageImpl());
  return found == entries->end() ? nullptr : found->second.get();
}

struct Registration {
  std::vector<std::shared_ptr<Entry>> entries;
  std::vector<const c10::StorageImpl *> keys;
};

void changed(Master &all) {
  all.copy.reset();
  all.generation.fetch_add(1, std::memory_order_release);
}

}  // namespace

bool is_registered(const at::Tensor &tensor) { return find(tensor) != nullptr; }

bool any_registered_frozen() {
  const Entries *entries = current();
  if (!entries) return false;
  for (const auto &[storage, entry] : *entries) {
    auto tensor = entry->tensor.lock();
    if (tensor && !tensor->requires_grad()) return true;
  }
  return false;
}

bool is_parameter(const at::Tensor &tensor) {
  if (tensor.requires_grad()) {
    if (tensor.is_leaf()) return true;
    if (tensor.is_view()) {
      const at::TensorBase &base = tensor._base();
      if (base.is_leaf() && base.requires_grad()) return true;
    }
  }
  return is_registered(tensor);
}

std::string describe(const at::Tensor &tensor) {
  if (const Entry *entry = find(tensor)) return "`" + entry->name + "`";
  std::string text = "a saved tensor of shape [";
  for (size_t axis = 0; axis < tensor.sizes().size(); ++axis) {
    if (axis) text += ", ";
    text += std::to_string(tensor.sizes()[axis]);
  }
  return text + "] and dtype " + c10::toString(tensor.scalar_type());
}

}  // namespace memfit

int mf_register(
    const mf_tensor *tensors, const char *const *names, size_t count, void **registration) noexcept {
  return memfit::guarded([&] {
    auto made = std::make_unique<memfit::Registration>();
    memfit::Master &all = memfit::master();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (size_t i = 0; i < count; ++i) {
      if (!tensors[i]->defined() || !tensors[i]->has_storage()) continue;
      const c10::Storage &storage = tensors[i]->storage();
      auto &entry = all.entries[storage.unsafeGetStorageImpl()];
      if (!entry) {
        memfit::WeakStorage weak(
            c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(storage.unsafeGetStorageImpl()));
        entry = std::make_shared<memfit::Entry>(
            memfit::Entry{std::move(weak), memfit::WeakTensor(tensors[i]->getIntrusivePtr()), names[i], 0});
      }
      entry->count += 1;
      made->entries.push_back(entry);
      made->keys.push_back(storage.unsafeGetStorageImpl());
    }
    memfit::changed(all);
    *registration = made.release();
  });
}

void mf_unregister(void *registration) noexcept {
  std::unique_ptr<memfit::Registration> given(static_cast<memfit::Registration *>(registration));
  memfit::Master &all = memfit::master();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (size_t i = 0; i < given->entries.size(); ++i) {
    if (--given->entries[i]->count == 0) all.entries.erase(given->keys[i]);
  }
  memfit::changed(all);
}

int mf_is_parameter(mf_tensor tensor) noexcept {
  return tensor->defined() && memfit::is_parameter(*tensor);
}
