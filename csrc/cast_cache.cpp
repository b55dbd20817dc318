// file: the casts that this thread keeps for later uses: of weights, while a region is open, and of activations
#include "cast_cache.h"

#include "activation_casts.h"
#include "cast_entry.h"
#include "fast_cast.h"
#include "key_index.h"
#include "persistent_casts.h"
#include "region.h"
#include "weight.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace torch_promote {

namespace {

// What an entry is found by.
struct Key {
  const at::TensorImpl* weight;
  size_t geometry; // of a view of it; 0 for itself
  c10::ScalarType dtype;

  Key(const at::Tensor& source, const Weight& of, c10::ScalarType to)
      : weight(of.owner->unsafeGetTensorImpl()),
        geometry(of.is_view ? Geometry::hash(*source.unsafeGetTensorImpl()) : 0),
        dtype(to) {}
  bool operator==(const Key& other) const = default;
  size_t hash() const {
    // Addresses of tensors differ in their middle bits most.
    const auto address = reinterpret_cast<uintptr_t>(weight);
    return (address >> 4) ^ (address >> 12) ^ geometry ^ (static_cast<size_t>(dtype) << 3);
  }
};

class Cache {
 public:
  Cache() = default;
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  ~Cache() {
    for (CastEntry& entry : entries_) {
      entry.data().leak_unless_plain();
    }
  }

  std::optional<at::Tensor> find(const at::Tensor& source, const Key& key) {
    const size_t found = index_.find(keys_, key);
    if (found == index_.kNone) {
      return std::nullopt;
    }
    CastEntry& entry = entries_[found];
    if (!entry.is_fresh(*source.unsafeGetTensorImpl())) {
      ++info.stale;
      erase(found);
      return std::nullopt;
    }
    ++info.hits;
    return entry.use(source);
  }

  CastEntry& insert(const Key& key, CastEntry entry) {
    if (const size_t found = index_.find(keys_, key); found != index_.kNone) {
      erase(found); // made by code that ran inside this cast
    }
    sweep();
    tls_has_casts = true;
    entries_.push_back(std::move(entry));
    keys_.push_back(key);
    index_.added(keys_);
    return entries_.back();
  }

  void forget(const std::vector<at::Tensor>& tensors) {
    for (size_t at = entries_.size(); at-- > 0;) {
      const bool written = std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
        return tensor.defined() && entries_[at].is_cast_of(*tensor.unsafeGetTensorImpl());
      });
      if (written) {
        ++info.stale;
        erase(at);
      }
    }
  }

  void clear() {
    if (entries_.empty()) {
      return;
    }
    // Taken out first: what dies here may run Python, and come back.
    std::vector<CastEntry> entries;
    entries.swap(entries_);
    index_.clear();
    keys_.clear();
    next_to_sweep_ = 0;
    entries.clear();
    if (entries_.capacity() == 0) {
      entries_.swap(entries); // for its room: the next region casts about as many
    }
  }

  void count_into(CacheInfo& result) const {
    result.entries += entries_.size();
    for (const CastEntry& entry : entries_) {
      result.bytes += entry.data().bytes();
    }
  }

  CacheInfo info; // what has been done, and nothing held

 private:
  void erase(size_t at) {
    // Swapped with the last, then taken off the end; kept alive until the maps agree again.
    const CastEntry gone = std::move(entries_[at]);
    index_.removed(keys_, at);
    if (const size_t last = entries_.size() - 1; at != last) {
      index_.moved(keys_, last, at);
      entries_[at] = std::move(entries_[last]);
      keys_[at] = keys_[last];
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
        ++info.dropped;
        erase(next_to_sweep_);
      } else {
        ++next_to_sweep_;
      }
    }
  }

  KeyIndex<Key> index_; // of keys_
  std::vector<CastEntry> entries_;
  std::vector<Key> keys_; // of entries_, position by position
  size_t next_to_sweep_ = 0;
};

Cache& cache() {
  static thread_local Cache instance;
  return instance;
}

ActivationCasts& activations() {
  static thread_local ActivationCasts instance;
  return instance;
}

// Besides what stock asks: this thread has a region, whose end will clear the cache (an autograd device thread has
// none); and jit.trace is not at work, which would take a cast that it did not see for a constant.
bool keeps_casts() {
  return at::autocast::is_autocast_cache_enabled() && depth() != 0 &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

// A cast that others may be given later. It may run Python (a dispatch mode, a subclass) which may itself cast, enter
// and leave regions: nothing of the cache is held across it.
at::Tensor cast_for_others(const at::Tensor& tensor, c10::ScalarType dtype, Reuse reuse) {
  if (reuse == Reuse::node && !is_plain(*tensor.unsafeGetTensorImpl())) {
    // Held whole: with grad mode on, as stock, so that a use after no_grad is differentiable.
    const at::AutoGradMode grad(true);
    return cast(tensor, dtype);
  }
  if (c10::InferenceMode::is_enabled()) { // an inference tensor would be no good outside of this mode
    const c10::InferenceMode ordinary(false);
    const at::AutoGradMode grad(false);
    return cast(tensor, dtype);
  }
  return cast(tensor, dtype);
}

// Not kept: what a mode answered with a tensor of its own kind (a fake one, say); and a tensor held whole that was cast
// below autograd, which would cut later uses off from their gradient.
bool is_good_for_others(const at::Tensor& tensor, const at::Tensor& cast) {
  const bool plain = is_plain(*tensor.unsafeGetTensorImpl());
  return plain == is_plain(*cast.unsafeGetTensorImpl()) && (plain || cast.requires_grad()) && depth() != 0;
}

std::unique_ptr<const Geometry> geometry_of(const at::Tensor& tensor, const Weight& weight) {
  return weight.is_view ? std::make_unique<const Geometry>(*tensor.unsafeGetTensorImpl()) : nullptr;
}

at::Tensor cast_of_weight(const at::Tensor& tensor, const Weight& weight, c10::ScalarType dtype) {
  const bool persistent = tls_cache_mode == CacheMode::persistent && may_share_data(tensor);
  const bool in_graph = gets_node(tensor);
  Cache& here = cache();
  if (persistent && !in_graph) { // the data is all that is wanted
    if (std::optional<at::Tensor> data = find_persistent(tensor, weight, dtype)) {
      ++here.info.hits;
      return *std::move(data);
    }
  }
  const Key key(tensor, weight, dtype);
  if (std::optional<at::Tensor> hit = here.find(tensor, key)) {
    return *std::move(hit);
  }
  Stamp stamp(*tensor.unsafeGetTensorImpl());
  if (persistent && in_graph) {
    if (std::optional<at::Tensor> data = find_persistent(tensor, weight, dtype)) {
      ++here.info.hits;
      CastData kept(std::move(stamp), geometry_of(tensor, weight), tensor, *data);
      return here.insert(key, CastEntry(*weight.owner, std::move(kept), *data, weight.reuse)).use(tensor);
    }
  }
  at::Tensor result = cast_for_others(tensor, dtype, weight.reuse);
  if (is_good_for_others(tensor, result)) {
    ++here.info.misses;
    std::optional<Stamp> second;
    if (persistent) {
      second = stamp;
    }
    CastData data(std::move(stamp), geometry_of(tensor, weight), tensor, result);
    if (persistent) {
      keep_persistent(tensor, weight, *std::move(second), data.held(*tensor.unsafeGetTensorImpl()));
    }
    here.insert(key, CastEntry(*weight.owner, std::move(data), result, weight.reuse));
  }
  return result;
}

at::Tensor cast_of_activation(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (CastEntry* entry = activations().find(tensor, dtype)) {
    ++cache().info.hits;
    return entry->use(tensor);
  }
  Stamp stamp(*tensor.unsafeGetTensorImpl());
  at::Tensor result = cast_for_others(tensor, dtype, Reuse::data);
  if (is_good_for_others(tensor, result)) {
    ++cache().info.misses;
    tls_has_casts = true;
    activations().insert(CastEntry(tensor, CastData(std::move(stamp), nullptr, tensor, result), result, Reuse::data));
  }
  return result;
}

} // namespace

at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (!keeps_casts()) {
    return cast(tensor, dtype);
  }
  const Weight weight = weight_of(tensor);
  if (weight.reuse == Reuse::node || (weight.reuse == Reuse::data && may_share_data(tensor))) {
    return cast_of_weight(tensor, weight, dtype);
  }
  if (tls_cache_mode == CacheMode::all && !tensor.is_inference() && may_share_data(tensor)) {
    return cast_of_activation(tensor, dtype);
  }
  return cast(tensor, dtype);
}

void forget_casts_of(const std::vector<at::Tensor>& tensors) {
  cache().forget(tensors);
  activations().clear();
  forget_persistent(tensors);
}

CacheInfo cast_cache_info() {
  CacheInfo result = cache().info;
  cache().count_into(result);
  result.entries += activations().count();
  result.bytes += activations().bytes();
  const PersistentInfo persistent = persistent_info();
  result.persistent_entries = persistent.entries;
  result.persistent_bytes = persistent.bytes;
  return result;
}

void drop_casts_of_thread() {
  tls_has_casts = false;
  cache().clear();
  activations().clear();
}

void clear_cast_cache() {
  end_cast_cache();
  clear_persistent();
}

} // namespace torch_promote
