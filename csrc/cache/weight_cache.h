// file: one thread's casts of weights, until its outermost region ends
#pragma once

#include "cache/entry.h"

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_promote {

// What an entry is found by.
struct WeightKey {
  WeightKey(const Source& source, const Weight& of, c10::ScalarType to);
  bool operator==(const WeightKey& other) const = default;

  const at::TensorImpl* weight;
  size_t part; // a hash of the geometry of a view; 0 for the weight itself
  c10::ScalarType dtype;
  // The CUDA graph that PyTorch captures; see cache/capture.h.
  uint64_t capture;
  Reuse reuse; // one leaf may be used in both ways, and uses with their own nodes must not get the shared one
};

struct HashOfWeightKey {
  size_t operator()(const WeightKey& key) const {
    return reinterpret_cast<uintptr_t>(key.weight) ^ key.part ^ (static_cast<size_t>(key.dtype) << 56) ^
           (static_cast<size_t>(key.reuse) << 48) ^ (key.capture << 32);
  }
};

// `find` returns shared entries, and what is dropped is destroyed only when the cache is consistent again: using an
// entry and destroying a tensor may both run Python, which may call the cache.
class WeightCache {
 public:
  WeightCache() = default;
  WeightCache(const WeightCache&) = delete;
  WeightCache& operator=(const WeightCache&) = delete;
  ~WeightCache();

  // Null if there is none. Drops it if the source has changed.
  // `on_another_stream`: takes the entry that only another stream may use, which is dropped.
  std::shared_ptr<CastEntry> find(
      const Source& source,
      const WeightKey& key,
      uint64_t epoch,
      std::shared_ptr<CastEntry>* on_another_stream = nullptr);
  // Of one weight, the casts that stock would make again (its views, for example) take at most as many bytes as the
  // weight, or as one cast. A program may use thousands of views of a weight. The oldest go first, as with persistent
  // casts, so that both caches hold the same data.
  void insert(const WeightKey& key, std::shared_ptr<CastEntry> entry, const CastTime& made);
  // Takes out the casts of what was written to.
  void take_out(const WritesSince& writes, std::vector<std::shared_ptr<CastEntry>>& gone);
  void drop_if(bool (*test)(const CastEntry&));
  void clear();

  // For other threads, under casts_mutex, as is `swap`. See NOTE [ Casts and other threads ].
  void take_memory(std::vector<CastMemory>& gone);
  struct Copy {
    std::shared_ptr<CastEntry> entry; // null if there is none that is fresh, apart from writes
    uint64_t writes = 0;              // the epoch at which the cast began
  };
  Copy copy(const Source& source, const WeightKey& key) const;
  // Exchanges the casts, and not the counts.
  void swap(WeightCache& other);

  size_t count() const {
    return places_.size();
  }
  size_t bytes() const;
  uint64_t stale() const { // dropped because the source had changed
    return stale_;
  }
  uint64_t dropped() const { // because the weight had died
    return dropped_;
  }

 private:
  struct Place {
    WeightKey key;
    std::shared_ptr<CastEntry> entry;
    uint64_t number; // in the order of insertion
    CastTime made;
  };

  std::shared_ptr<CastEntry> take_out(size_t at);
  void make_room(const WeightKey& key, size_t bytes, std::vector<std::shared_ptr<CastEntry>>& gone);
  void sweep(std::vector<std::shared_ptr<CastEntry>>& gone);
  void take_out_other_captures(uint64_t capture, std::vector<std::shared_ptr<CastEntry>>& gone);

  std::vector<Place> places_;
  ska::flat_hash_map<WeightKey, size_t, HashOfWeightKey> index_;         // into places_
  ska::flat_hash_map<const at::TensorImpl*, size_t> bytes_beyond_stock_; // by weight
  size_t next_to_sweep_ = 0;
  uint64_t last_capture_ = 0;
  uint64_t inserted_ = 0;
  uint64_t stale_ = 0;
  uint64_t dropped_ = 0;
};

} // namespace torch_promote
