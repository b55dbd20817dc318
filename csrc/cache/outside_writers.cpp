// file: memory that may be written to without an op of PyTorch's, and so without a trace
#include "cache/outside_writers.h"

#include "policy/registry_sizes.h"

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <iterator>
#include <mutex>

namespace torch_promote {

namespace {

// Storages that captured graphs write to. Held weakly: the address of a dead one stays taken, and means no other.
struct CapturedWrites {
  ForkSafeMutex mutex;
  ska::flat_hash_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  std::atomic<bool> any = false; // to be read without the lock
};

CapturedWrites& captured_writes() {
  static auto* instance = new CapturedWrites; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Made at import: see NOTE [ Fork ].
[[maybe_unused]] const CapturedWrites& captured_writes_at_import = captured_writes();

[[maybe_unused]] const bool noted_captured_writes = note_registry("captured writes", [] {
  const std::lock_guard<std::mutex> lock(captured_writes().mutex);
  return captured_writes().storages.size();
});

bool is_written_by_a_graph(const c10::StorageImpl& storage) {
  CapturedWrites& captured = captured_writes();
  if (!captured.any.load(std::memory_order_relaxed)) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(captured.mutex);
  return captured.storages.count(&storage) != 0;
}

std::atomic<c10::DeleterFnPtr> slice_deleter = nullptr;

// A part of a storage object is a storage object that owns the whole one, by a deleter in libtorch_python.
const c10::DataPtr& data_of_whole(const c10::StorageImpl& storage) {
  const c10::DataPtr* data = &storage.data_ptr();
  const c10::DeleterFnPtr deleter = slice_deleter;
  while (deleter != nullptr && data->get_deleter() == deleter) {
    data = &static_cast<const c10::StorageImpl*>(data->get_context())->data_ptr();
  }
  return *data;
}

bool is_shared_or_foreign(const c10::StorageImpl& storage) {
  const c10::DataPtr& data = data_of_whole(storage);
  if (const at::MapAllocator* map = at::MapAllocator::fromDataPtr(data)) {
    return (map->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) != 0;
  }
  // Memory of PyTorch's own has the allocator's deleter, also where the storage names no allocator (torch.load). CUDA
  // IPC and slices of storage objects have other deleters.
  const bool is_named = storage.allocator() != nullptr;
  const c10::Allocator* allocator = is_named ? storage.allocator() : c10::GetAllocator(storage.device_type());
  const c10::DeleterFnPtr deleter = allocator->raw_deleter();
  return deleter != nullptr ? storage.data_ptr().get_deleter() != deleter : !is_named;
}

} // namespace

bool has_outside_writers(const c10::StorageImpl& storage) {
  return is_shared_or_foreign(storage) || is_written_by_a_graph(storage);
}

void recognize_slices(const at::Tensor& whole, const at::Tensor& slice) {
  const c10::DataPtr& data = slice.storage().data_ptr();
  if (data.get_context() == whole.storage().unsafeGetStorageImpl()) {
    slice_deleter = data.get_deleter();
  }
}

bool recognizes_slices() {
  return slice_deleter != nullptr;
}

void note_captured_writes(const std::vector<at::Tensor>& tensors) {
  CapturedWrites& captured = captured_writes();
  const std::lock_guard<std::mutex> lock(captured.mutex);
  for (auto it = captured.storages.begin(); it != captured.storages.end();) {
    it = it->second.expired() ? captured.storages.erase(it) : std::next(it);
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) {
      const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
      captured.storages.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
      captured.any.store(true, std::memory_order_relaxed);
    }
  }
}

} // namespace torch_promote
