// file: the last few casts of activations, for their next consumers
#include "activation_casts.h"

#include <algorithm>
#include <utility>

namespace torch_promote {

namespace {

// Kept until nothing refers to the place any more: what dies may run Python, and come back.
void drop(std::optional<CastEntry>& place) {
  const std::optional<CastEntry> gone = std::exchange(place, std::nullopt);
}

} // namespace

CastEntry* ActivationCasts::find(const at::Tensor& source, at::ScalarType dtype) {
  const at::TensorImpl& impl = *source.unsafeGetTensorImpl();
  for (auto& place : entries_) {
    if (place.has_value() && place->is_dead()) {
      drop(place);
    }
    if (!place.has_value() || !place->is_owned_by(impl) || place->dtype() != dtype) {
      continue;
    }
    if (place->is_fresh(impl)) {
      return &*place;
    }
    drop(place);
  }
  return nullptr;
}

void ActivationCasts::insert(CastEntry entry) {
  const auto empty = std::find(entries_.begin(), entries_.end(), std::nullopt);
  if (empty != entries_.end()) {
    empty->emplace(std::move(entry));
    return;
  }
  const std::optional<CastEntry> gone = std::exchange(entries_[next_], std::move(entry));
  next_ = (next_ + 1) % kCount;
}

void ActivationCasts::clear() {
  for (auto& place : entries_) {
    if (place.has_value()) {
      drop(place);
    }
  }
}

size_t ActivationCasts::count() const {
  return static_cast<size_t>(
      std::count_if(entries_.begin(), entries_.end(), [](const auto& place) { return place.has_value(); }));
}

size_t ActivationCasts::bytes() const {
  size_t bytes = 0;
  for (const auto& place : entries_) {
    bytes += place.has_value() ? place->data().bytes() : 0;
  }
  return bytes;
}

} // namespace torch_promote
