// file: casts of weights that outlive regions
#include "cache/persistent_casts.h"

#include "policy/process.h"

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace torch_promote {

namespace {

// A cast, which any thread may use on any stream.
struct PersistentCast {
  SourceSignature signature;
  at::Tensor cast;
  uint32_t version; // of the cast, when it was made
  uint8_t format;   // as in CastRequest
  // On a GPU: when it is made, and on which stream.
  std::optional<c10::Event> made;
  c10::StreamId stream = 0;

  bool is_fresh(const Source& source) const {
    return signature.matches(source) && cast.unsafeGetTensorImpl()->version_counter().current_version() == version;
  }
};

// Shared, so that a cast is copied and destroyed outside of the lock: both may run Python, or wait for the GIL.
using PersistentCasts = std::vector<std::shared_ptr<const PersistentCast>>; // at most one of each dtype and format

// The casts of one weight. Also made for a weight that has none, to learn when a tensor is made that shares its data.
class CastsOfWeight final : public c10::BackendMeta {
 public:
  CastsOfWeight() = default;
  CastsOfWeight(const CastsOfWeight&) = delete;
  CastsOfWeight& operator=(const CastsOfWeight&) = delete;
  ~CastsOfWeight() override;

  // PyTorch calls this when it makes a tensor that shares the weight's data and may have its own version counter. The
  // copy gets no BackendMeta.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override;

  // The caller holds the mutex of the registry, and destroys the result without it.
  PersistentCasts begin_epoch() const {
    epoch = next_epoch();
    return std::exchange(casts, PersistentCasts());
  }

  mutable PersistentCasts casts;
  mutable uint64_t epoch = next_epoch();

 private:
  // Unique in the process: `weight.data = other` replaces the BackendMeta, and the new one must not repeat an old
  // epoch.
  static uint64_t next_epoch() {
    static std::atomic<uint64_t> last = 0;
    return last.fetch_add(1, std::memory_order_relaxed) + 1;
  }
};

// All weights with such a BackendMeta. The mutex guards what they hold, and their slots.
struct PersistentWeights {
  ForkSafeMutex mutex;
  std::unordered_set<const CastsOfWeight*> weights;
};

// Never destroyed; see NOTE [ Fork ]. Tensors may be freed after static destructors have run, too.
PersistentWeights& registry_of_weights = *new PersistentWeights;

CastsOfWeight::~CastsOfWeight() {
  const Lock lock(registry_of_weights.mutex);
  registry_of_weights.weights.erase(this);
}

c10::intrusive_ptr<c10::BackendMeta> CastsOfWeight::clone(const c10::intrusive_ptr<c10::BackendMeta>& /*self*/) const {
  PersistentCasts gone;
  const Lock lock(registry_of_weights.mutex);
  gone = begin_epoch();
  return {};
}

// Null if the weight has no BackendMeta, or another library's. The caller holds the mutex.
const CastsOfWeight* casts_of(const at::Tensor& weight) {
  const c10::BackendMeta* meta = weight.unsafeGetTensorImpl()->get_backend_meta();
  return meta != nullptr && typeid(*meta) == typeid(CastsOfWeight) ? static_cast<const CastsOfWeight*>(meta) : nullptr;
}

// The cast of a weight that is asked for, or null. The caller holds the mutex.
std::shared_ptr<const PersistentCast>* find_cast(const CastsOfWeight& weight, const CastRequest& wanted) {
  const auto place = std::find_if(weight.casts.begin(), weight.casts.end(), [&wanted](const auto& kept) {
    return kept->cast.scalar_type() == wanted.dtype && kept->format == wanted.format;
  });
  return place == weight.casts.end() ? nullptr : &*place;
}

template <class Function>
void for_each_weight(const Function& function) {
  const Lock lock(registry_of_weights.mutex);
  for (const CastsOfWeight* weight : registry_of_weights.weights) {
    function(*weight);
  }
}

} // namespace

uint64_t alias_epoch(const at::Tensor& weight) {
  {
    const Lock lock(registry_of_weights.mutex);
    if (const CastsOfWeight* const casts = casts_of(weight)) {
      return casts->epoch;
    }
  }
  auto made = c10::make_intrusive<CastsOfWeight>();
  const Lock lock(registry_of_weights.mutex);
  if (weight.unsafeGetTensorImpl()->get_backend_meta() == nullptr) {
    registry_of_weights.weights.insert(made.get());
    weight.unsafeGetTensorImpl()->set_backend_meta(made); // a copy, so that none is destroyed under the mutex
  }
  const CastsOfWeight* const casts = casts_of(weight);
  return casts != nullptr ? casts->epoch : 0;
}

// --- Who else may write to the memory?

bool has_unique_storage(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  // After the first `untyped_storage()` in Python, its object stays with the storage and counts as an owner.
  const auto& python = *storage.unsafeGetStorageImpl()->pyobj_slot();
  if (python.load_pyobj() != nullptr) {
    return python.has_unique_reference() && storage.use_count() == 2;
  }
  return storage.use_count() == 1;
}

namespace {

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

} // namespace

void recognize_slices(const at::Tensor& whole, const at::Tensor& slice) {
  const c10::DataPtr& data = slice.storage().data_ptr();
  if (data.get_context() == whole.storage().unsafeGetStorageImpl()) {
    slice_deleter = data.get_deleter();
  }
}

bool has_outside_writers(const at::Tensor& tensor) {
  const c10::StorageImpl& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (const at::MapAllocator* map = at::MapAllocator::fromDataPtr(data_of_whole(storage))) {
    return (map->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) != 0;
  }
  // Memory of PyTorch's own has the allocator's deleter, also where the storage names no allocator (torch.load). CUDA
  // IPC and slices of storage objects have other deleters.
  const bool is_named = storage.allocator() != nullptr;
  const c10::Allocator* allocator = is_named ? storage.allocator() : c10::GetAllocator(storage.device_type());
  const c10::DeleterFnPtr deleter = allocator->raw_deleter();
  return deleter != nullptr ? storage.data_ptr().get_deleter() != deleter : !is_named;
}

// --- Finding, storing and dropping

at::Tensor find_persistent(const CastRequest& wanted) {
  std::shared_ptr<const PersistentCast> found;
  {
    const Lock lock(registry_of_weights.mutex);
    const CastsOfWeight* const weight = casts_of(wanted.source.tensor);
    if (const auto* const place = weight == nullptr ? nullptr : find_cast(*weight, wanted)) {
      found = *place;
    }
  }
  if (found == nullptr) {
    return {};
  }
  if (!found->is_fresh(wanted.source)) {
    const Lock lock(registry_of_weights.mutex);
    if (const CastsOfWeight* const weight = casts_of(wanted.source.tensor)) {
      std::erase(weight->casts, found);
    }
    return {};
  }
  if (found->made.has_value()) {
    const c10::Stream stream = current_stream(wanted.source.impl);
    if (stream.id() != found->stream) {
      found->made->block(stream);
      c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(found->cast.storage().data_ptr(), stream);
    }
  }
  return found->cast;
}

void store_persistent(
    const CastRequest& wanted, const SourceSignature& signature, const at::Tensor& cast, uint64_t epoch_before) {
  if (cast.nbytes() > wanted.source.tensor.nbytes()) {
    return;
  }
  auto made = std::make_shared<PersistentCast>(PersistentCast{
      signature, cast, cast.unsafeGetTensorImpl()->version_counter().current_version(), wanted.format, {}, 0});
  if (cast.is_cuda()) {
    const c10::Stream stream = current_stream(wanted.source.impl);
    made->stream = stream.id();
    made->made.emplace(c10::DeviceType::CUDA);
    made->made->record(stream);
  }
  std::shared_ptr<const PersistentCast> gone;
  const Lock lock(registry_of_weights.mutex);
  const CastsOfWeight* const weight = casts_of(wanted.source.tensor);
  if (weight == nullptr || weight->epoch != epoch_before) {
    return;
  }
  if (auto* const same = find_cast(*weight, wanted)) {
    gone = std::exchange(*same, std::move(made));
  } else {
    weight->casts.push_back(std::move(made));
  }
}

void forget_persistent(const std::vector<at::Tensor>& written) {
  std::vector<PersistentCasts> gone;
  const Lock lock(registry_of_weights.mutex);
  for (const at::Tensor& tensor : written) {
    if (const CastsOfWeight* const weight = casts_of(tensor)) {
      gone.push_back(weight->begin_epoch());
    }
  }
}

void forget_beyond_stock() {
  std::vector<PersistentCasts> gone;
  for_each_weight([&gone](const CastsOfWeight& weight) { gone.push_back(weight.begin_epoch()); });
}

std::pair<uint64_t, uint64_t> persistent_casts() {
  std::pair<uint64_t, uint64_t> sum;
  for_each_weight([&sum](const CastsOfWeight& weight) {
    for (const auto& kept : weight.casts) {
      ++sum.first;
      sum.second += kept->cast.storage().nbytes();
    }
  });
  return sum;
}

} // namespace torch_promote
