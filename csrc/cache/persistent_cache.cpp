// file: casts of weights that outlive regions
#include "cache/persistent_cache.h"

#include <algorithm>
#include <atomic>
#include <iterator>
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
  std::mutex mutex; // also guards the casts of every weight
  std::unordered_set<const WeightCasts*> weights;
  std::atomic<size_t> size = 0; // of `weights`, to be read without the lock
};

WeightRegistry& weight_registry() {
  static WeightRegistry* instance = new WeightRegistry;
  return *instance;
}

// Unique in the process: `weight.data = other` replaces the BackendMeta, and the new one must not repeat an old epoch.
uint64_t next_epoch() {
  static std::atomic<uint64_t> last = 0;
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// The casts of one weight. Casts that are dropped are destroyed after the lock is released: the Python object of a
// tensor may run code.
class WeightCasts final : public BackendMeta {
 public:
  WeightCasts() {
    weight_registry().weights.insert(this); // the caller holds the lock
    ++weight_registry().size;
  }
  ~WeightCasts() override {
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    weight_registry().weights.erase(this);
    --weight_registry().size;
  }
  WeightCasts(const WeightCasts&) = delete;
  WeightCasts& operator=(const WeightCasts&) = delete;

  // PyTorch calls this when it makes a tensor that shares the weight's data and may have its own version counter. The
  // copy gets no BackendMeta.
  c10::intrusive_ptr<BackendMeta> clone(const c10::intrusive_ptr<BackendMeta>& /*self*/) const override {
    std::vector<CastData> gone;
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    gone.swap(casts_);
    epoch_.store(next_epoch(), std::memory_order_relaxed);
    return {};
  }

  uint64_t epoch() const {
    return epoch_.load(std::memory_order_relaxed);
  }

  std::vector<CastData>& casts() const {
    return casts_;
  }

 private:
  mutable std::vector<CastData> casts_; // oldest first
  mutable std::atomic<uint64_t> epoch_ = next_epoch();
};

// Null if the weight has no BackendMeta, or another library's.
WeightCasts* casts_of(const at::TensorBase& weight) {
  BackendMeta* meta = weight.unsafeGetTensorImpl()->get_backend_meta();
  return meta != nullptr && typeid(*meta) == typeid(WeightCasts) ? static_cast<WeightCasts*>(meta) : nullptr;
}

// Makes them if the slot is empty. (If another thread copies the tensor at this moment, that is a race inside PyTorch:
// a tensor's metadata must not be written while it is read.)
WeightCasts* make_casts_of(const at::TensorBase& weight) {
  at::TensorImpl* const impl = weight.unsafeGetTensorImpl();
  if (impl->get_backend_meta() == nullptr) {
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    if (impl->get_backend_meta() == nullptr) {
      impl->set_backend_meta(c10::make_intrusive<WeightCasts>());
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
  std::vector<CastData> gone;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  std::vector<CastData>& casts = owner->casts();
  const auto found =
      std::find_if(casts.begin(), casts.end(), [&](auto& cast) { return is_of(cast, dtype, weight, source.impl); });
  if (found == casts.end()) {
    return std::nullopt;
  }
  if (found->is_fresh(source)) {
    return found->held(source.impl);
  }
  gone.push_back(std::move(*found));
  casts.erase(found);
  return std::nullopt;
}

void store_persistent(const Source& source, const Weight& weight, SourceSignature signature, const at::Tensor& cast) {
  const size_t bound = weight.owner->nbytes();
  WeightCasts* const owner = make_casts_of(*weight.owner);
  if (owner == nullptr || cast.nbytes() > bound) {
    return;
  }
  CastData data(std::move(signature), source, cast);
  std::vector<CastData> gone;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  std::vector<CastData>& casts = owner->casts();
  const auto drop = [&](auto cast_position) {
    gone.push_back(std::move(*cast_position));
    casts.erase(cast_position);
  };
  const auto same = [&](const CastData& other) { return is_of(other, cast.scalar_type(), weight, source.impl); };
  if (const auto found = std::find_if(casts.begin(), casts.end(), same); found != casts.end()) {
    drop(found); // stored by another thread, or by code that ran inside this cast
  }
  const auto weigh = [&casts] {
    size_t bytes = 0;
    for (const CastData& kept : casts) {
      bytes += kept.bytes();
    }
    return bytes;
  };
  while (!casts.empty() && weigh() + data.bytes() > bound) {
    drop(casts.begin());
  }
  casts.push_back(std::move(data));
}

namespace {

// Drops the casts for which `test` is true.
template <class Test>
void drop_if(const Test& test) {
  std::vector<CastData> gone;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  for (const WeightCasts* weight : weight_registry().weights) {
    std::vector<CastData>& casts = weight->casts();
    const auto end = std::stable_partition(casts.begin(), casts.end(), [&](auto& cast) { return !test(cast); });
    std::move(end, casts.end(), std::back_inserter(gone));
    casts.erase(end, casts.end());
  }
}

} // namespace

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

void clear_persistent() {
  drop_if([](const CastData& /*cast*/) { return true; });
}

PersistentInfo persistent_info() {
  PersistentInfo info;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  for (const WeightCasts* weight : weight_registry().weights) {
    info.entries += weight->casts().size();
    for (const CastData& cast : weight->casts()) {
      info.bytes += cast.bytes();
    }
  }
  return info;
}

} // namespace torch_promote
