// file: one thread's last few casts of activations
#include "cache/activation_cache.h"

#include <algorithm>
#include <utility>

namespace torch_promote {

namespace {

// Empties the place first: destroying a tensor may run Python, which may call the cache.
void drop(std::shared_ptr<CastEntry>& place) {
  const std::shared_ptr<CastEntry> gone = std::exchange(place, nullptr);
}

} // namespace

std::shared_ptr<CastEntry> ActivationCache::find(const Source& source, at::ScalarType dtype) {
  for (auto& place : entries_) {
    if (place != nullptr && place->is_dead()) {
      drop(place);
    }
    if (place == nullptr || !place->is_owned_by(source.impl) || place->dtype() != dtype) {
      continue;
    }
    if (place->is_fresh(source) && place->data().lock()) {
      return place;
    }
    drop(place);
  }
  return nullptr;
}

void ActivationCache::insert(std::shared_ptr<CastEntry> entry) {
  const auto empty = std::find(entries_.begin(), entries_.end(), nullptr);
  if (empty != entries_.end()) {
    *empty = std::move(entry);
    return;
  }
  const std::shared_ptr<CastEntry> gone = std::exchange(entries_[next_], std::move(entry));
  next_ = (next_ + 1) % kCount;
}

void ActivationCache::take_out(const WritesSince& writes, std::vector<std::shared_ptr<CastEntry>>& gone) {
  for (auto& place : entries_) {
    if (place != nullptr && place->is_among(writes)) {
      gone.push_back(std::exchange(place, nullptr));
    }
  }
}

void ActivationCache::drop_if(bool (*test)(const CastEntry&)) {
  for (auto& place : entries_) {
    if (place != nullptr && test(*place)) {
      drop(place);
    }
  }
}

void ActivationCache::swap(ActivationCache& other) {
  entries_.swap(other.entries_);
  std::swap(next_, other.next_);
}

void ActivationCache::clear() {
  for (auto& place : entries_) {
    drop(place);
  }
}

size_t ActivationCache::count() const {
  return kCount - static_cast<size_t>(std::count(entries_.begin(), entries_.end(), nullptr));
}

size_t ActivationCache::bytes() const {
  size_t bytes = 0;
  for (const auto& place : entries_) {
    bytes += place != nullptr ? place->data().bytes() : 0;
  }
  return bytes;
}

} // namespace torch_promote
