// file: casts of weights that outlive regions
#include "cache/persistent_cache.h"

#include "cache/weight_casts.h"
#include "cache/write_log.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace torch_promote {

namespace {

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
  return WeakMeta(c10::intrusive_ptr<c10::BackendMeta>::reclaim_copy(make_casts_of(weight)));
}

bool is_owned_by(const c10::Storage& storage, size_t owners) {
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

bool has_unique_storage(const at::Tensor& tensor, bool is_view) {
  return is_owned_by(tensor.unsafeGetTensorImpl()->unsafe_storage(), is_view ? 2 : 1);
}

std::optional<at::Tensor> find_persistent(
    const Source& source, const Weight& weight, at::ScalarType dtype, uint64_t span) {
  auto [owner, lock] = lock_casts_of(*weight.owner);
  if (owner == nullptr) {
    return std::nullopt;
  }
  PersistentCasts& casts = owner->casts();
  const auto here = std::find_if(
      casts.begin(), casts.end(), [&](auto& cast) { return is_of(cast->data(), dtype, weight, source.impl); });
  if (here == casts.end()) {
    return std::nullopt;
  }
  const std::shared_ptr<PersistentCast> found = *here;
  if (span != 0) {
    owner->note_use_without_node(dtype, span);
  }
  const bool outdated = found->outdated;
  lock.unlock();
  if (!outdated && found->data().is_unchanged(source)) {
    found->prepare_for_current_stream(source.impl, owner->mutex());
    return found->data().tensor();
  }
  lock.lock();
  casts.erase(std::remove(casts.begin(), casts.end(), found), casts.end());
  lock.unlock(); // before `found`, the last one, is destroyed
  return std::nullopt;
}

std::optional<uint64_t> number_from_first_use(const at::TensorBase& weight, at::ScalarType dtype, uint64_t span) {
  const auto [casts, lock] = lock_casts_of(weight);
  if (casts == nullptr) {
    return std::nullopt;
  }
  const FirstUse* const use = casts->first_use(dtype, span);
  return use != nullptr ? std::optional(use->sequence_nr) : std::nullopt;
}

void store_persistent(
    const Source& source,
    const Weight& weight,
    const SourceSignature& signature,
    const at::Tensor& cast,
    Epochs began) {
  const size_t bound = weight.owner->nbytes();
  WeightCasts* const owner = make_casts_of(*weight.owner);
  if (owner == nullptr || cast.nbytes() > bound) {
    return;
  }
  const auto made = std::make_shared<PersistentCast>(CastData(signature, source, cast), source.impl);
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

template <class Function>
void for_each_weight(const Function& function) {
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  for (const WeightCasts* weight : weight_registry().weights) {
    const std::lock_guard<std::mutex> lock_weight(weight->mutex());
    function(*weight);
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
  for_each_weight([&written](const WeightCasts& weight) {
    for (const auto& cast : weight.casts()) {
      cast->outdated = cast->outdated || written.count(cast->data().signature().storage()) != 0;
    }
  });
}

bool any_persistent() {
  return weight_registry().size != 0;
}

void clear_persistent() {
  std::vector<PersistentCasts> gone;
  for_each_weight([&](const WeightCasts& weight) { weight.casts().swap(gone.emplace_back()); });
}

void forget_beyond_stock() {
  std::vector<PersistentCasts> gone;
  for_each_weight([&](const WeightCasts& weight) {
    weight.begin_epoch();
    weight.casts().swap(gone.emplace_back());
  });
}

PersistentInfo persistent_info() {
  PersistentInfo info;
  for_each_weight([&info](const WeightCasts& weight) {
    for (const auto& cast : weight.casts()) {
      info.entries += cast->outdated ? 0 : 1;
      info.bytes += cast->data().bytes();
    }
  });
  return info;
}

} // namespace torch_promote
