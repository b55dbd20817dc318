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

// All weights that have casts. Never destroyed: tensors outlive everything.
struct WeightRegistry {
  std::mutex mutex; // guards the casts of every weight too
  std::unordered_set<const WeightCasts*> weights;
  std::atomic<size_t> size = 0; // of these
};

WeightRegistry& weight_registry() {
  static WeightRegistry* instance = new WeightRegistry;
  return *instance;
}

// Never the same twice: `weight.data = other` puts another BackendMeta in the place of the one before.
uint64_t next_watch() {
  static std::atomic<uint64_t> last = 0;
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// The casts of one weight. What is taken out is let go after the lock: a tensor may have a Python object.
class WeightCasts final : public BackendMeta {
 public:
  WeightCasts() {
    weight_registry().weights.insert(this); // its maker has the lock
    ++weight_registry().size;
  }
  ~WeightCasts() override {
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    weight_registry().weights.erase(this);
    --weight_registry().size;
  }
  WeightCasts(const WeightCasts&) = delete;
  WeightCasts& operator=(const WeightCasts&) = delete;

  // A tensor is being made that shares the weight's data and may have a version of its own.
  c10::intrusive_ptr<BackendMeta> clone(const c10::intrusive_ptr<BackendMeta>& /*self*/) const override {
    std::vector<CastData> gone;
    const std::lock_guard<std::mutex> lock(weight_registry().mutex);
    gone.swap(casts_);
    watch_.store(next_watch(), std::memory_order_relaxed);
    return {};
  }

  uint64_t watch() const {
    return watch_.load(std::memory_order_relaxed);
  }

  std::vector<CastData>& casts() const {
    return casts_;
  }

 private:
  mutable std::vector<CastData> casts_; // oldest first
  mutable std::atomic<uint64_t> watch_ = next_watch();
};

// Null if the weight has none, or what it has is somebody else's.
WeightCasts* casts_of(const at::TensorBase& weight) {
  BackendMeta* meta = weight.unsafeGetTensorImpl()->get_backend_meta();
  return meta != nullptr && typeid(*meta) == typeid(WeightCasts) ? static_cast<WeightCasts*>(meta) : nullptr;
}

// The same, made if there is none. (Hanging it on a tensor that another thread copies at this moment is a race inside
// PyTorch; tensors' metadata are not made to be changed while they are read.)
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

// Whether it was cast to this dtype, and from the weight, or a view of it, as the tensor is.
bool is_of(const CastData& cast, at::ScalarType dtype, const Weight& weight, const at::TensorImpl& tensor) {
  const at::TensorImpl& whole = *weight.owner->unsafeGetTensorImpl();
  return cast.dtype() == dtype && cast.stamp().is_same_part(weight.is_view ? tensor : whole);
}

} // namespace

uint64_t watch_weight(const at::TensorBase& weight) {
  const WeightCasts* const casts = make_casts_of(weight);
  return casts != nullptr ? casts->watch() : 0;
}

bool is_alone(const at::Tensor& tensor, const Weight& weight) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  size_t owners = weight.is_view ? 2 : 1;
  // Once it has been asked for in Python, `untyped_storage()` stays with the storage, and is an owner too.
  const auto& python = *storage.unsafeGetStorageImpl()->pyobj_slot();
  if (python.load_pyobj() != nullptr) {
    if (!python.has_unique_reference()) {
      return false;
    }
    ++owners;
  }
  return static_cast<size_t>(storage.use_count()) == owners;
}

std::optional<at::Tensor> find_persistent(const at::Tensor& tensor, const Weight& weight, at::ScalarType dtype) {
  WeightCasts* const owner = casts_of(*weight.owner);
  if (owner == nullptr) {
    return std::nullopt;
  }
  std::vector<CastData> gone;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  std::vector<CastData>& casts = owner->casts();
  const auto found =
      std::find_if(casts.begin(), casts.end(), [&](auto& cast) { return is_of(cast, dtype, weight, impl); });
  if (found == casts.end()) {
    return std::nullopt;
  }
  if (found->is_fresh(impl)) {
    return found->held(impl);
  }
  gone.push_back(std::move(*found));
  casts.erase(found);
  return std::nullopt;
}

void keep_persistent(const at::Tensor& tensor, const Weight& weight, Stamp stamp, const at::Tensor& cast) {
  const size_t bound = weight.owner->nbytes();
  WeightCasts* const owner = make_casts_of(*weight.owner);
  if (owner == nullptr || cast.nbytes() > bound) {
    return;
  }
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  CastData data(std::move(stamp), tensor, cast);
  std::vector<CastData> gone;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  std::vector<CastData>& casts = owner->casts();
  const auto drop = [&](auto cast_position) {
    gone.push_back(std::move(*cast_position));
    casts.erase(cast_position);
  };
  const auto same = [&](const CastData& other) { return is_of(other, cast.scalar_type(), weight, impl); };
  if (const auto found = std::find_if(casts.begin(), casts.end(), same); found != casts.end()) {
    drop(found); // made by another thread, or by code that ran inside this cast
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

// Drops the casts for which `test` holds.
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
  drop_if([&written](const CastData& cast) { return written.count(cast.stamp().storage()) != 0; });
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
