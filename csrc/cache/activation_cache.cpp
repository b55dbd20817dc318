// file: the last few casts of activations, for their next consumers
#include "cache/activation_cache.h"

#include <algorithm>
#include <utility>

namespace torch_promote {

namespace {

// Let go when nothing refers to the place any more: what dies may run Python, and come back.
void drop(std::shared_ptr<CastEntry>& place) {
  const std::shared_ptr<CastEntry> gone = std::exchange(place, nullptr);
}

} // namespace

std::shared_ptr<CastEntry> ActivationCasts::find(const at::Tensor& source, at::ScalarType dtype) {
  const at::TensorImpl& impl = *source.unsafeGetTensorImpl();
  for (auto& place : entries_) {
    if (place != nullptr && place->is_dead()) {
      drop(place);
    }
    if (place == nullptr || !place->is_owned_by(impl) || place->dtype() != dtype) {
      continue;
    }
    if (place->is_fresh(impl)) {
      return place;
    }
    drop(place);
  }
  return nullptr;
}

void ActivationCasts::insert(std::shared_ptr<CastEntry> entry) {
  const auto empty = std::find(entries_.begin(), entries_.end(), nullptr);
  if (empty != entries_.end()) {
    *empty = std::move(entry);
    return;
  }
  const std::shared_ptr<CastEntry> gone = std::exchange(entries_[next_], std::move(entry));
  next_ = (next_ + 1) % kCount;
}

void ActivationCasts::clear() {
  for (auto& place : entries_) {
    drop(place);
  }
}

size_t ActivationCasts::count() const {
  return kCount - static_cast<size_t>(std::count(entries_.begin(), entries_.end(), nullptr));
}

size_t ActivationCasts::bytes() const {
  size_t bytes = 0;
  for (const auto& place : entries_) {
    bytes += place != nullptr ? place->data().bytes() : 0;
  }
  return bytes;
}

} // namespace torch_promote
