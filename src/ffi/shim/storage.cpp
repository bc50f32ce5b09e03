#include <ATen/SequenceNumber.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <memory>
#include <type_traits>

#include "memfit.h"

namespace {

c10::StorageImpl *storage_of(mf_tensor tensor) {
  TORCH_CHECK(tensor->defined() && tensor->has_storage(), "this tensor has no storage");
  return tensor->storage().unsafeGetStorageImpl();
}

at::Tensor bytes_over(c10::Storage storage, at::Device device) {
  int64_t size = static_cast<int64_t>(storage.nbytes());
  at::Tensor bytes = at::empty({0}, at::TensorOptions(at::kByte).device(device));
  bytes.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return bytes;
}

// Older libtorches can set the refusal but not lift it; there bytes that are away are a
// null pointer.
template <class S, class = void>
struct Refusal {
  static void set(S &, const char *) {}
  static void lift(S &) {}
};
template <class S>
struct Refusal<S, std::void_t<decltype(std::declval<S &>().clear_data_ptr_access_error_msg_())>> {
  static void set(S &storage, const char *message) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
  }
  static void lift(S &storage) { storage.clear_data_ptr_access_error_msg_(); }
};

c10::DataPtr exchange(c10::StorageImpl &storage, c10::DataPtr next) {
  c10::DataPtr previous = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(std::move(next));
  return previous;
}

}  // namespace

struct mf_weak_storage {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
};

struct mf_version {
  c10::VariableVersion counter;
};

int mf_tensor_dtype(mf_tensor tensor) noexcept {
  return static_cast<int>(tensor->scalar_type());
}

uint64_t mf_storage_nbytes(mf_tensor tensor) noexcept {
  if (!tensor->defined() || !tensor->has_storage()) return 0;
  return tensor->storage().nbytes();
}

mf_weak_storage *mf_storage_watch(mf_tensor tensor) noexcept {
  if (!tensor->defined() || !tensor->has_storage()) return nullptr;
  c10::Storage storage = tensor->storage();
  return new mf_weak_storage{storage.getWeakStorageImpl()};
}

void mf_storage_unwatch(mf_weak_storage *watch) noexcept { delete watch; }

size_t mf_storage_holders(mf_tensor tensor) noexcept {
  if (!tensor->defined() || !tensor->has_storage()) return 0;
  size_t holders = tensor->storage().use_count();
  // Pairs with the release of whoever let go: the count itself may be read without order.
  std::atomic_thread_fence(std::memory_order_acquire);
  return holders;
}

int mf_storage_over(
    void *data, int dtype, const int64_t *sizes, size_t dims, void *context, void (*release)(void *),
    mf_tensor *tensor) noexcept {
  std::shared_ptr<void> held;
  return memfit::guarded([&] {
    held = std::shared_ptr<void>(context, release);
    at::TensorOptions options(static_cast<at::ScalarType>(dtype));
    auto drop = [held](void *) mutable { held.reset(); };
    *tensor = new at::Tensor(at::from_blob(data, at::IntArrayRef(sizes, dims), drop, options));
  });
}

int mf_storage_base(mf_tensor tensor, mf_tensor *base) noexcept {
  return memfit::guarded([&] {
    storage_of(tensor);
    *base = new at::Tensor(bytes_over(tensor->storage(), tensor->device()));
  });
}

int mf_storage_view(
    mf_tensor base, int dtype, int64_t offset, const int64_t *sizes, const int64_t *strides,
    size_t dims, mf_tensor *view) noexcept {
  return memfit::guarded([&] {
    storage_of(base);
    at::Tensor made = at::empty(
        {0}, at::TensorOptions(static_cast<at::ScalarType>(dtype)).device(base->device()));
    at::IntArrayRef shape(sizes, dims), steps(strides, dims);
    int64_t last = offset;
    bool empty = false;
    for (size_t dim = 0; dim < dims; ++dim) {
      TORCH_CHECK(sizes[dim] >= 0 && strides[dim] >= 0, "a view with a negative size or stride");
      empty = empty || sizes[dim] == 0;
      last += (sizes[dim] - 1) * strides[dim];
    }
    int64_t end = empty ? 0 : (last + 1) * static_cast<int64_t>(made.element_size());
    TORCH_CHECK(
        offset >= 0 && end <= static_cast<int64_t>(base->storage().nbytes()),
        "a view beyond its storage");
    at::TensorImpl *impl = made.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(base->storage());
    impl->set_sizes_and_strides(shape, steps, offset);
    *view = new at::Tensor(std::move(made));
  });
}

int mf_storage_take(mf_tensor tensor, const char *message, mf_tensor *bytes) noexcept {
  return memfit::guarded([&] {
    c10::StorageImpl *storage = storage_of(tensor);
    TORCH_CHECK(storage->data() != nullptr, "the bytes are away already");
    at::Device device = storage->device();
    size_t size = storage->nbytes();
    auto holder = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), size, c10::DataPtr(nullptr, device),
        storage->allocator(), false);
    at::Tensor taken = bytes_over(c10::Storage(holder), device);
    exchange(*holder, exchange(*storage, c10::DataPtr(nullptr, device)));
    Refusal<c10::StorageImpl>::set(*storage, message);
    *bytes = new at::Tensor(std::move(taken));
  });
}

int mf_storage_give(mf_tensor tensor, mf_tensor bytes) noexcept {
  return memfit::guarded([&] {
    c10::StorageImpl *storage = storage_of(tensor);
    c10::StorageImpl *source = storage_of(bytes);
    auto &absent = storage->_mutable_data_ptr_no_checks();
    TORCH_CHECK(absent.get() == nullptr, "the bytes are there already");
    TORCH_CHECK(
        source->nbytes() == storage->nbytes() && source->device() == absent.device(),
        "other bytes than those that left");
    TORCH_CHECK(bytes->storage().use_count() == 1, "the bytes have another owner");
    c10::Device device = source->device();
    c10::DataPtr data = exchange(*source, c10::DataPtr(nullptr, device));
    source->set_nbytes(0);
    Refusal<c10::StorageImpl>::lift(*storage);
    exchange(*storage, std::move(data));
  });
}

int mf_storage_away(mf_tensor tensor) noexcept {
  if (!tensor->defined() || !tensor->has_storage()) return 0;
  c10::StorageImpl *storage = tensor->storage().unsafeGetStorageImpl();
  return storage->nbytes() != 0 && storage->_mutable_data_ptr_no_checks().get() == nullptr;
}

void *mf_storage_data(mf_tensor base) noexcept {
  if (!base->defined() || !base->has_storage() || !base->device().is_cpu()) return nullptr;
  return base->storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

mf_version *mf_version_watch(mf_tensor tensor) noexcept {
  if (!tensor->defined() || tensor->is_inference()) return nullptr;
  return new mf_version{tensor->unsafeGetTensorImpl()->version_counter()};
}

uint64_t mf_version_now(const mf_version *watch) noexcept { return watch->counter.current_version(); }

void mf_version_unwatch(mf_version *watch) noexcept { delete watch; }

uint64_t mf_operator_number() noexcept { return at::sequence_number::peek(); }
