// file: casts of weights that outlive regions
#include "persistent_casts.h"

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace torch_promote {

namespace {

using c10::BackendMeta;

class WeightCasts;

// All weights that have casts. Never destroyed: tensors outlive everything.
struct Registry {
  std::mutex mutex; // guards the casts of every weight too
  std::unordered_set<const WeightCasts*> weights;
};

Registry& registry() {
  static Registry* instance = new Registry;
  return *instance;
}

// The casts of one weight. What is taken out is let go after the lock: a tensor may have a Python object.
class WeightCasts final : public BackendMeta {
 public:
  WeightCasts() {
    registry().weights.insert(this); // its maker has the lock
  }
  ~WeightCasts() override {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().weights.erase(this);
  }
  WeightCasts(const WeightCasts&) = delete;
  WeightCasts& operator=(const WeightCasts&) = delete;

  // A tensor is being made that shares the weight's data and may have a version of its own.
  c10::intrusive_ptr<BackendMeta> clone(const c10::intrusive_ptr<BackendMeta>& /*self*/) const override {
    std::vector<CastData> gone;
    const std::lock_guard<std::mutex> lock(registry().mutex);
    gone.swap(casts_);
    return {};
  }

  std::vector<CastData>& casts() const {
    return casts_;
  }

 private:
  mutable std::vector<CastData> casts_; // oldest first
};

// Null if the weight has none, or what it has is somebody else's.
c10::intrusive_ptr<WeightCasts> casts_of(const at::TensorBase& weight) {
  auto* casts = dynamic_cast<WeightCasts*>(weight.unsafeGetTensorImpl()->get_backend_meta());
  return casts == nullptr ? c10::intrusive_ptr<WeightCasts>() : c10::intrusive_ptr<WeightCasts>::reclaim_copy(casts);
}

// Whether it was cast to this dtype, and from the weight, or a view of it, as the tensor is.
bool is_of(const CastData& cast, at::ScalarType dtype, const Weight& weight, const at::TensorImpl& tensor) {
  return cast.dtype() == dtype && (weight.is_view ? cast.is_of_view_like(tensor) : !cast.is_of_view());
}

} // namespace

std::optional<at::Tensor> find_persistent(const at::Tensor& tensor, const Weight& weight, at::ScalarType dtype) {
  std::vector<CastData> gone;
  c10::intrusive_ptr<WeightCasts> owner;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  owner = casts_of(*weight.owner);
  if (owner == nullptr) {
    return std::nullopt;
  }
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
  if (cast.nbytes() > bound) {
    return;
  }
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  CastData data(std::move(stamp), weight.is_view ? std::make_unique<const Geometry>(impl) : nullptr, tensor, cast);
  std::vector<CastData> gone;
  c10::intrusive_ptr<WeightCasts> owner;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  owner = casts_of(*weight.owner);
  if (owner == nullptr) {
    at::TensorImpl* const owner_impl = weight.owner->unsafeGetTensorImpl();
    if (owner_impl->get_backend_meta() != nullptr) {
      return;
    }
    owner = c10::make_intrusive<WeightCasts>();
    owner_impl->set_backend_meta(owner);
  }
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
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const WeightCasts* weight : registry().weights) {
    std::vector<CastData>& casts = weight->casts();
    const auto end = std::stable_partition(casts.begin(), casts.end(), [&](auto& cast) { return !test(cast); });
    std::move(end, casts.end(), std::back_inserter(gone));
    casts.erase(end, casts.end());
  }
}

} // namespace

void forget_persistent(const std::vector<at::Tensor>& tensors) {
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
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const WeightCasts* weight : registry().weights) {
    info.entries += weight->casts().size();
    for (const CastData& cast : weight->casts()) {
      info.bytes += cast.bytes();
    }
  }
  return info;
}

} // namespace torch_promote
