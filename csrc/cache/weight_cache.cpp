// file: one thread's casts of weights, until its outermost region ends
#include "cache/weight_cache.h"

#include "cache/capture.h"
#include "cache/casts_mutex.h"
#include "cache/stock_cache.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace torch_promote {

namespace {

size_t hash_of_part(const at::TensorImpl& view) {
  size_t result = static_cast<size_t>(view.storage_offset()) + 1;
  for (const auto numbers : {view.sizes(), view.strides()}) {
    for (const int64_t number : numbers) {
      result = c10::hash_combine(result, static_cast<size_t>(number));
    }
  }
  return result;
}

} // namespace

WeightKey::WeightKey(const Source& source, const Weight& of, c10::ScalarType to)
    : weight(of.owner->unsafeGetTensorImpl()),
      part(of.is_view ? hash_of_part(source.impl) : 0),
      dtype(to),
      capture(current_capture(source)),
      reuse(of.reuse) {}

WeightCache::~WeightCache() {
  for (const Place& place : places_) {
    place.entry->data().leak_unless_plain();
  }
}

std::shared_ptr<CastEntry> WeightCache::find(
    const Source& source, const WeightKey& key, uint64_t epoch, std::shared_ptr<CastEntry>* on_another_stream) {
  const auto found = index_.find(key);
  if (found == index_.end()) {
    return nullptr;
  }
  const std::shared_ptr<CastEntry>& entry = places_[found->second].entry;
  if (entry->is_fresh(source, epoch)) {
    return entry;
  }
  if (on_another_stream != nullptr && entry->is_unchanged(source, epoch)) {
    *on_another_stream = entry;
  }
  ++stale_;
  std::shared_ptr<CastEntry> gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  gone = take_out(found->second);
  return nullptr;
}

void WeightCache::insert(const WeightKey& key, std::shared_ptr<CastEntry> entry, const CastTime& made) {
  std::vector<std::shared_ptr<CastEntry>> gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  if (made.stock_clears != stock_clears) {
    return; // too late for the thread that frees all casts
  }
  if (const auto found = index_.find(key); found != index_.end()) {
    gone.push_back(take_out(found->second)); // inserted by code that ran inside this cast
  }
  sweep(gone);
  take_out_other_captures(key.capture, gone);
  if (key.reuse == Reuse::data_only) {
    const size_t bytes = entry->data().bytes();
    make_room(key, bytes, gone);
    bytes_beyond_stock_[key.weight] += bytes;
  }
  places_.push_back({key, std::move(entry), inserted_++, made});
  index_.emplace(key, places_.size() - 1); // if this throws, the entry is merely not found
}

void WeightCache::take_out(const WritesSince& writes, std::vector<std::shared_ptr<CastEntry>>& gone) {
  const std::lock_guard<std::mutex> lock(casts_mutex());
  for (size_t at = places_.size(); at-- > 0;) {
    if (places_[at].entry->is_among(writes)) {
      ++stale_;
      gone.push_back(take_out(at));
    }
  }
}

void WeightCache::drop_if(bool (*test)(const CastEntry&)) {
  std::vector<std::shared_ptr<CastEntry>> gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  for (size_t at = places_.size(); at-- > 0;) {
    if (test(*places_[at].entry)) {
      gone.push_back(take_out(at));
    }
  }
}

void WeightCache::swap(WeightCache& other) {
  places_.swap(other.places_);
  index_.swap(other.index_);
  std::swap(next_to_sweep_, other.next_to_sweep_);
  bytes_beyond_stock_.swap(other.bytes_beyond_stock_);
  std::swap(last_capture_, other.last_capture_);
  std::swap(inserted_, other.inserted_);
}

void WeightCache::clear() {
  std::vector<Place> gone;
  {
    const std::lock_guard<std::mutex> lock(casts_mutex());
    gone.swap(places_);
    index_.clear();
    bytes_beyond_stock_.clear();
    next_to_sweep_ = 0;
  }
  gone.clear();
  const std::lock_guard<std::mutex> lock(casts_mutex());
  if (places_.capacity() == 0) {
    places_.swap(gone); // for its memory: the next region casts about as many weights
  }
}

void WeightCache::take_memory(std::vector<CastMemory>& gone) {
  for (const Place& place : places_) {
    gone.push_back(place.entry->data().take_memory());
  }
}

WeightCache::Copy WeightCache::copy(const Source& source, const WeightKey& key) const {
  const auto found = index_.find(key);
  if (found == index_.end()) {
    return {};
  }
  const Place& place = places_[found->second];
  const bool current = place.made.stock_clears == stock_clears && place.made.hand_clears == hand_clears;
  if (!current || !place.entry->data().is_plain() || !place.entry->is_fresh(source)) {
    return {};
  }
  return {place.entry->copy(), place.made.writes};
}

size_t WeightCache::bytes() const {
  size_t bytes = 0;
  for (const Place& place : places_) {
    bytes += place.entry->data().bytes();
  }
  return bytes;
}

// Casts of earlier captures have no more uses.
void WeightCache::take_out_other_captures(uint64_t capture, std::vector<std::shared_ptr<CastEntry>>& gone) {
  if (capture == 0 || capture == std::exchange(last_capture_, capture)) {
    return;
  }
  for (size_t at = places_.size(); at-- > 0;) {
    if (places_[at].key.capture != 0 && places_[at].key.capture != capture) {
      gone.push_back(take_out(at));
    }
  }
}

// Moves the last entry to the place that becomes free.
std::shared_ptr<CastEntry> WeightCache::take_out(size_t at) {
  std::shared_ptr<CastEntry> gone = std::move(places_[at].entry);
  const WeightKey& key = places_[at].key;
  if (key.reuse == Reuse::data_only) {
    // None if the last cast with elements went before this one, which has none.
    const auto held = bytes_beyond_stock_.find(key.weight);
    if (held != bytes_beyond_stock_.end() && (held->second -= gone->data().bytes()) == 0) {
      bytes_beyond_stock_.erase(held);
    }
  }
  index_.erase(key);
  if (at != places_.size() - 1) {
    places_[at] = std::move(places_.back());
    index_[places_[at].key] = at;
  }
  places_.pop_back();
  return gone;
}

void WeightCache::make_room(const WeightKey& key, size_t bytes, std::vector<std::shared_ptr<CastEntry>>& gone) {
  const size_t bound = static_cast<size_t>(key.weight->numel()) * key.weight->itemsize();
  const auto is_in_the_way = [&key](const Place& place) {
    return place.key.weight == key.weight && place.key.reuse == Reuse::data_only;
  };
  for (;;) {
    const auto held = bytes_beyond_stock_.find(key.weight);
    if (held == bytes_beyond_stock_.end() || held->second + bytes <= bound) {
      return;
    }
    size_t oldest = places_.size();
    for (size_t at = 0; at < places_.size(); ++at) {
      if (is_in_the_way(places_[at]) && (oldest == places_.size() || places_[at].number < places_[oldest].number)) {
        oldest = at;
      }
    }
    if (oldest == places_.size()) {
      return; // GCOVR_EXCL_LINE: a weight that holds bytes has a place
    }
    gone.push_back(take_out(oldest));
  }
}

// Examines two entries at each insertion, round robin. Dead entries therefore stay few, and no insertion pays for a
// walk over all of them.
void WeightCache::sweep(std::vector<std::shared_ptr<CastEntry>>& gone) {
  for (int i = 0; i < 2 && !places_.empty(); ++i) {
    if (next_to_sweep_ >= places_.size()) {
      next_to_sweep_ = 0;
    }
    if (places_[next_to_sweep_].entry->is_dead()) {
      ++dropped_;
      gone.push_back(take_out(next_to_sweep_));
    } else {
      ++next_to_sweep_;
    }
  }
}

} // namespace torch_promote
