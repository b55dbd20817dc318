// file: casts of weights that outlive regions
#include "cache/persistent_cache.h"

#include "cache/write_log.h"
#include "policy/fork_safe_mutex.h"

#include <c10/core/Event.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace torch_promote {

namespace {

using c10::BackendMeta;

class WeightCasts;

// All weights with casts. Never destroyed, because tensors may be freed after static destructors have run.
struct WeightRegistry {
  ForkSafeMutex mutex; // locked before that of a weight, if both are
  std::unordered_set<const WeightCasts*> weights;
  std::atomic<size_t> size = 0; // of `weights`, to be read without the lock
};

WeightRegistry& weight_registry() {
  static WeightRegistry* instance = new WeightRegistry;
  return *instance;
}

// Guards a weight's slot and its casts. Weights share a fixed number of mutexes, for a fork has to lock them all.
ForkSafeMutex& mutex_of(const at::TensorImpl* weight) {
  struct alignas(64) Place {
    ForkSafeMutex mutex;
  };
  static auto* places = new std::array<Place, 32>;
  return (*places)[(reinterpret_cast<uintptr_t>(weight) >> 6) % places->size()].mutex;
}

// Made at import: see NOTE [ Fork ].
[[maybe_unused]] const WeightRegistry& weight_registry_at_import = weight_registry();
[[maybe_unused]] const ForkSafeMutex& mutexes_at_import = mutex_of(nullptr);

// Unique in the process: `weight.data = other` replaces the BackendMeta, and the new one must not repeat an old epoch.
uint64_t next_epoch() {
  static std::atomic<uint64_t> last = 0;
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// A cast, which any thread may use on any stream.
class PersistentCast {
 public:
  PersistentCast(CastData data, const at::TensorImpl& source) : data_(std::move(data)) {
    if (source.is_cuda()) {
      made_.emplace(c10::DeviceType::CUDA);
      made_->record(current_stream(source));
    }
  }

  const CastData& data() const {
    return data_;
  }
  // Lets the current stream, if it is not that of the cast, wait until the cast is done, and keeps the memory from
  // being reused before the stream is. `mutex` is that of the weight.
  void prepare_for_current_stream(const at::TensorImpl& source, ForkSafeMutex& mutex) {
    if (!made_.has_value()) {
      return;
    }
    const c10::Stream stream = current_stream(source);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (data_.stream() == stream.id() || std::find(prepared_.begin(), prepared_.end(), stream) != prepared_.end()) {
        return;
      }
    }
    made_->block(stream);
    data_.record_on(stream);
    const std::lock_guard<std::mutex> lock(mutex);
    prepared_.push_back(stream);
  }

 private:
  CastData data_;
  std::optional<c10::Event> made_;
  std::vector<c10::Stream> prepared_;
};

// Shared, so that a cast is copied and destroyed outside of the lock: both may run Python, or wait for the GIL.
using PersistentCasts = std::vector<std::shared_ptr<PersistentCast>>;

// The casts of one weight.
class WeightCasts final : public BackendMeta {
 public:
  explicit WeightCasts(const at::TensorImpl* weight) : mutex_(mutex_of(weight)) {
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    weight_registry().weights.insert(this);
    ++weight_registry().size;
  }
  ~WeightCasts() override {
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    weight_registry().weights.erase(this);
    --weight_registry().size;
  }
  WeightCasts(const WeightCasts&) = delete;
  WeightCasts& operator=(const WeightCasts&) = delete;

  // The weight has died, and an entry of a region still refers to this weakly.
  void release_resources() override {
    PersistentCasts gone;
    const std::lock_guard<std::mutex> lock(mutex_);
    gone.swap(casts_);
  }

  // PyTorch calls this when it makes a tensor that shares the weight's data and may have its own version counter. The
  // copy gets no BackendMeta.
  c10::intrusive_ptr<BackendMeta> clone(const c10::intrusive_ptr<BackendMeta>& /*self*/) const override {
    drop();
    return {};
  }

  void drop() const {
    PersistentCasts gone;
    const std::lock_guard<std::mutex> lock(mutex_);
    gone.swap(casts_);
    begin_epoch();
  }

  void begin_epoch() const {
    epoch_.store(next_epoch(), std::memory_order_relaxed);
  }

  uint64_t epoch() const {
    return epoch_.load(std::memory_order_relaxed);
  }
  // Guards `casts`. A swap of tensors moves the casts to another TensorImpl; the mutex stays.
  ForkSafeMutex& mutex() const {
    return mutex_;
  }
  PersistentCasts& casts() const {
    return casts_;
  }

 private:
  ForkSafeMutex& mutex_;
  mutable PersistentCasts casts_; // oldest first
  mutable std::atomic<uint64_t> epoch_ = next_epoch();
};

// Null if the weight has no BackendMeta, or another library's.
WeightCasts* casts_of(const at::TensorBase& weight) {
  at::TensorImpl* const impl = weight.unsafeGetTensorImpl();
  const std::lock_guard<std::mutex> lock(mutex_of(impl));
  BackendMeta* meta = impl->get_backend_meta();
  return meta != nullptr && typeid(*meta) == typeid(WeightCasts) ? static_cast<WeightCasts*>(meta) : nullptr;
}

// Makes them if the slot is empty. (If another thread copies the tensor at this moment, that is a race inside PyTorch:
// a tensor's metadata must not be written while it is read.)
WeightCasts* make_casts_of(const at::TensorBase& weight) {
  if (WeightCasts* const casts = casts_of(weight)) {
    return casts;
  }
  at::TensorImpl* const impl = weight.unsafeGetTensorImpl();
  auto made = c10::make_intrusive<WeightCasts>(impl); // locks the registry, so not below
  {
    const std::lock_guard<std::mutex> lock(mutex_of(impl));
    if (impl->get_backend_meta() == nullptr) {
      impl->set_backend_meta(std::move(made));
    }
  }
  return casts_of(weight);
}

// Whether `cast` has this dtype, and was made from the same part of the weight.
bool is_of(const CastData& cast, at::ScalarType dtype, const Weight& weight, const at::TensorImpl& tensor) {
  const at::TensorImpl& whole = *weight.owner->unsafeGetTensorImpl();
  return cast.dtype() == dtype && cast.signature().is_same_part(weight.is_view ? tensor : whole);
}

} // namespace

uint64_t alias_epoch(const at::TensorBase& weight) {
  const WeightCasts* const casts = make_casts_of(weight);
  return casts != nullptr ? casts->epoch() : 0;
}

void note_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return;
  }
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
  if (const WeightCasts* const casts = casts_of(owner)) {
    casts->drop();
  }
}

WeakMeta weak_meta_of(const at::TensorBase& weight) {
  return WeakMeta(c10::intrusive_ptr<BackendMeta>::reclaim_copy(make_casts_of(weight)));
}

bool has_unique_storage(const at::Tensor& tensor, bool is_view) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  size_t owners = is_view ? 2 : 1;
  // After the first `untyped_storage()` in Python, its object stays with the storage and counts as an owner.
  const auto& python = *storage.unsafeGetStorageImpl()->pyobj_slot();
  if (python.load_pyobj() != nullptr) {
    if (!python.has_unique_reference()) {
      return false;
    }
    ++owners;
  }
  return static_cast<size_t>(storage.use_count()) == owners;
}

std::optional<at::Tensor> find_persistent(const Source& source, const Weight& weight, at::ScalarType dtype) {
  WeightCasts* const owner = casts_of(*weight.owner);
  if (owner == nullptr) {
    return std::nullopt;
  }
  std::shared_ptr<PersistentCast> found;
  PersistentCasts& casts = owner->casts();
  {
    const std::lock_guard<std::mutex> lock(owner->mutex());
    const auto here = std::find_if(
        casts.begin(), casts.end(), [&](auto& cast) { return is_of(cast->data(), dtype, weight, source.impl); });
    if (here == casts.end()) {
      return std::nullopt;
    }
    found = *here;
  }
  if (found->data().is_unchanged(source)) {
    found->prepare_for_current_stream(source.impl, owner->mutex());
    return found->data().tensor();
  }
  const std::lock_guard<std::mutex> lock(owner->mutex());
  casts.erase(std::remove(casts.begin(), casts.end(), found), casts.end());
  return std::nullopt;
}

void store_persistent(
    const Source& source, const Weight& weight, SourceSignature signature, const at::Tensor& cast, Epochs began) {
  const size_t bound = weight.owner->nbytes();
  WeightCasts* const owner = make_casts_of(*weight.owner);
  if (owner == nullptr || cast.nbytes() > bound) {
    return;
  }
  const auto made = std::make_shared<PersistentCast>(CastData(std::move(signature), source, cast), source.impl);
  PersistentCasts gone;
  const std::lock_guard<std::mutex> lock(owner->mutex());
  if (owner->epoch() != began.aliases || was_written(source.tensor, began.writes)) {
    return;
  }
  PersistentCasts& casts = owner->casts();
  const auto drop = [&](auto cast_position) {
    gone.push_back(std::move(*cast_position));
    casts.erase(cast_position);
  };
  const auto same = [&](const auto& other) { return is_of(other->data(), cast.scalar_type(), weight, source.impl); };
  if (const auto found = std::find_if(casts.begin(), casts.end(), same); found != casts.end()) {
    drop(found); // stored by another thread, or by code that ran inside this cast
  }
  const auto weigh = [&casts] {
    size_t bytes = 0;
    for (const auto& kept : casts) {
      bytes += kept->data().bytes();
    }
    return bytes;
  };
  while (!casts.empty() && weigh() + made->data().bytes() > bound) {
    drop(casts.begin());
  }
  casts.push_back(made);
}

namespace {

// Drops the casts for which `test` is true.
template <class Test>
void drop_if(const Test& test) {
  PersistentCasts gone;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  for (const WeightCasts* weight : weight_registry().weights) {
    const std::lock_guard<std::mutex> lock_weight(weight->mutex());
    PersistentCasts& casts = weight->casts();
    const auto end = std::stable_partition(casts.begin(), casts.end(), [&](auto& cast) { return !test(cast->data()); });
    std::move(end, casts.end(), std::back_inserter(gone));
    casts.erase(end, casts.end());
  }
}

} // namespace

// After the write epoch has been increased. A cast that began before is then either in the registry by now, or its
// thread sees the new epoch when it stores the cast.
void forget_persistent(const std::vector<at::Tensor>& tensors) {
  if (weight_registry().size == 0) {
    return;
  }
  std::unordered_set<const c10::StorageImpl*> written;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) {
      written.insert(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
  }
  drop_if([&written](const CastData& cast) { return written.count(cast.signature().storage()) != 0; });
}

bool any_persistent() {
  return weight_registry().size != 0;
}

void clear_persistent() {
  drop_if([](const CastData& /*cast*/) { return true; });
}

void forget_beyond_stock() {
  {
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    for (const WeightCasts* weight : weight_registry().weights) {
      weight->begin_epoch();
    }
  }
  clear_persistent();
}

PersistentInfo persistent_info() {
  PersistentInfo info;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  for (const WeightCasts* weight : weight_registry().weights) {
    const std::lock_guard<std::mutex> lock_weight(weight->mutex());
    info.entries += weight->casts().size();
    for (const auto& cast : weight->casts()) {
      info.bytes += cast->data().bytes();
    }
  }
  return info;
}

} // namespace torch_promote
