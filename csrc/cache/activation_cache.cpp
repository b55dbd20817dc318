// file: one thread's last few casts of activations
#include "cache/activation_cache.h"

#include "cache/casts_mutex.h"
#include "cache/stock_cache.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace torch_promote {

namespace {

// Empties the place first: destroying a tensor may run Python, which may call the cache.
void drop(std::shared_ptr<CastEntry>& place) {
  std::shared_ptr<CastEntry> gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  gone.swap(place);
}

} // namespace

std::shared_ptr<CastEntry> ActivationCache::find(const Source& source, at::ScalarType dtype, uint64_t capture) {
  for (size_t at = 0; at < kCount; ++at) {
    std::shared_ptr<CastEntry>& place = entries_[at];
    if (place != nullptr && place->is_dead()) {
      drop(place);
    }
    if (place == nullptr || !place->is_owned_by(source.impl) || place->dtype() != dtype) {
      continue;
    }
    if (captures_[at] == capture && place->is_fresh(source) && !place->data().is_freed()) {
      return place;
    }
    drop(place);
  }
  return nullptr;
}

void ActivationCache::insert(std::shared_ptr<CastEntry> entry, uint64_t capture, const CastTime& made) {
  std::shared_ptr<CastEntry> gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  if (made.stock_clears != stock_clears) {
    return; // too late for the thread that frees all casts
  }
  auto place = std::find(entries_.begin(), entries_.end(), nullptr);
  if (place == entries_.end()) {
    place = entries_.begin() + static_cast<ptrdiff_t>(next_);
    next_ = (next_ + 1) % kCount;
  }
  gone = std::exchange(*place, std::move(entry));
  captures_[static_cast<size_t>(place - entries_.begin())] = capture;
}

void ActivationCache::take_out(const WritesSince& writes, std::vector<std::shared_ptr<CastEntry>>& gone) {
  const std::lock_guard<std::mutex> lock(casts_mutex());
  for (auto& place : entries_) {
    if (place != nullptr && place->is_among(writes)) {
      gone.push_back(std::exchange(place, nullptr));
    }
  }
}

void ActivationCache::drop_if(bool (*test)(const CastEntry&)) {
  Entries gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  for (size_t at = 0; at < kCount; ++at) {
    if (entries_[at] != nullptr && test(*entries_[at])) {
      gone[at].swap(entries_[at]);
    }
  }
}

void ActivationCache::take_memory(std::vector<CastMemory>& gone) {
  for (const auto& place : entries_) {
    if (place != nullptr) {
      gone.push_back(place->data().take_memory());
    }
  }
}

void ActivationCache::swap(ActivationCache& other) {
  entries_.swap(other.entries_);
  captures_.swap(other.captures_);
  std::swap(next_, other.next_);
}

void ActivationCache::clear() {
  if (count() != 0) {
    Entries gone;
    const std::lock_guard<std::mutex> lock(casts_mutex());
    gone.swap(entries_);
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
