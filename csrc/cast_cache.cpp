// file: the cache of casts of trainable weights, one per thread
#include "cast_cache.h"

#include "cast_entry.h"
#include "fast_cast.h"
#include "region.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

namespace torch_promote {

namespace {

class Cache {
 public:
  Cache() = default;
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  ~Cache() {
    for (CastEntry& entry : entries_) {
      entry.leak_unless_plain();
    }
  }

  std::optional<at::Tensor> find(const at::Tensor& source, c10::ScalarType dtype) {
    const auto found = index_.find({source.unsafeGetTensorImpl(), dtype});
    if (found == index_.end()) {
      return std::nullopt;
    }
    CastEntry& entry = entries_[found->second];
    if (!entry.is_fresh(*source.unsafeGetTensorImpl())) {
      ++info_.stale;
      erase(found->second);
      return std::nullopt;
    }
    ++info_.hits;
    return entry.use(source);
  }

  // `stamp` is the source's from before the cast.
  void insert(const at::Tensor& source, Stamp stamp, c10::ScalarType dtype, const at::Tensor& cast) {
    ++info_.misses;
    const Key key{source.unsafeGetTensorImpl(), dtype};
    const auto found = index_.find(key);
    if (found != index_.end()) { // made by code that ran inside this cast
      erase(found->second);
    }
    index_.emplace(key, entries_.size());
    entries_.emplace_back(source, std::move(stamp), cast);
    keys_.push_back(key);
    sweep();
  }

  void forget(const std::vector<at::Tensor>& tensors) {
    for (size_t at = entries_.size(); at-- > 0;) {
      const bool written = std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
        return tensor.defined() && entries_[at].is_cast_of(*tensor.unsafeGetTensorImpl());
      });
      if (written) {
        ++info_.stale;
        erase(at);
      }
    }
  }

  void clear() {
    // Taken out first: what dies here may run Python, and come back.
    std::vector<CastEntry> entries;
    entries.swap(entries_);
    index_.clear();
    keys_.clear();
    next_to_sweep_ = 0;
  }

  CacheInfo info() const {
    CacheInfo result = info_;
    result.entries = entries_.size();
    for (const CastEntry& entry : entries_) {
      result.bytes += entry.bytes();
    }
    return result;
  }

 private:
  struct Key {
    const at::TensorImpl* source;
    c10::ScalarType dtype;
    bool operator==(const Key& other) const {
      return source == other.source && dtype == other.dtype;
    }
  };
  struct HashKey {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.source) * 31 + static_cast<size_t>(key.dtype);
    }
  };

  void erase(size_t at) {
    // Swapped with the last, then taken off the end; kept alive until the maps agree again.
    const CastEntry gone = std::move(entries_[at]);
    index_.erase(keys_[at]);
    if (at + 1 != entries_.size()) {
      entries_[at] = std::move(entries_.back());
      keys_[at] = keys_.back();
      index_[keys_[at]] = at;
    }
    entries_.pop_back();
    keys_.pop_back();
  }

  // Looks at two entries at each insertion, round and round: dead ones never outnumber the living by much, and no
  // insertion pays for a walk over all of them.
  void sweep() {
    for (int looked = 0; looked < 2 && !entries_.empty(); ++looked) {
      if (next_to_sweep_ >= entries_.size()) {
        next_to_sweep_ = 0;
      }
      if (entries_[next_to_sweep_].is_dead()) {
        ++info_.dropped;
        erase(next_to_sweep_);
      } else {
        ++next_to_sweep_;
      }
    }
  }

  std::unordered_map<Key, size_t, HashKey> index_;
  std::vector<CastEntry> entries_;
  std::vector<Key> keys_; // of entries_, position by position
  size_t next_to_sweep_ = 0;
  CacheInfo info_;
};

Cache& cache() {
  static thread_local Cache instance;
  return instance;
}

// Stock's conditions for caching, and two of ours: this thread has a region, whose end will clear the cache (an
// autograd device thread has none); and jit.trace is not at work, which would take a cast that it did not see for a
// constant.
bool may_cache(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() &&
         at::autocast::is_autocast_cache_enabled() && !tensor.is_inference() && !c10::InferenceMode::is_enabled() &&
         !at::caching::is_cached_tensor(tensor) && depth() != 0 &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

} // namespace

at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (!may_cache(tensor)) {
    return cast(tensor, dtype);
  }
  if (std::optional<at::Tensor> hit = cache().find(tensor, dtype)) {
    return *std::move(hit);
  }
  Stamp stamp(*tensor.unsafeGetTensorImpl());
  // With grad mode on, as stock, so that a use after no_grad is differentiable. The cast may run Python (a dispatch
  // mode, a subclass) which may itself cast, enter and leave regions: nothing of the cache is held across it.
  at::Tensor result = [&] {
    const at::AutoGradMode grad(true);
    return cast(tensor, dtype);
  }();
  const bool plain = is_plain(*tensor.unsafeGetTensorImpl());
  // Not kept: what a mode answered with a tensor of its own kind (a fake one, say); and a tensor held whole that was
  // cast below autograd, which would cut later uses off from their gradient.
  const bool good_for_others = plain == is_plain(*result.unsafeGetTensorImpl()) && (plain || result.requires_grad());
  if (good_for_others && depth() != 0) {
    cache().insert(tensor, std::move(stamp), dtype, result);
  }
  return result;
}

void forget_casts_of(const std::vector<at::Tensor>& tensors) {
  cache().forget(tensors);
}

CacheInfo cast_cache_info() {
  return cache().info();
}

void clear_cast_cache() {
  cache().clear();
}

} // namespace torch_promote
