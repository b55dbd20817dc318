// file: the casts that this thread keeps for later uses: of weights, while a region is open, and of activations
#include "cache/thread_cache.h"

#include "cache/activation_cache.h"
#include "cache/entry.h"
#include "cache/key_index.h"
#include "cache/persistent_cache.h"
#include "cache/weight.h"
#include "cast/cast.h"
#include "policy/torch_declarations.h"
#include "region/region.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

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

// What an entry is found by.
struct Key {
  const at::TensorImpl* weight;
  size_t part; // a hash of which view of it; 0 for itself
  c10::ScalarType dtype;
  Reuse reuse; // a leaf may be used as both, and the uses that share a node know nothing of the others

  Key(const at::Tensor& source, const Weight& of, c10::ScalarType to)
      : weight(of.owner->unsafeGetTensorImpl()),
        part(of.is_view ? hash_of_part(*source.unsafeGetTensorImpl()) : 0),
        dtype(to),
        reuse(of.reuse) {}
  bool operator==(const Key& other) const = default;
  size_t hash() const {
    // Addresses of tensors differ in their middle bits most.
    const auto address = reinterpret_cast<uintptr_t>(weight);
    return (address >> 4) ^ (address >> 12) ^ part ^ (static_cast<size_t>(dtype) << 3) ^ static_cast<size_t>(reuse);
  }
};

// Entries are shared with whoever uses one at the moment, and let go when the cache is whole again: both may run
// Python, which may come back.
class Cache {
 public:
  Cache() = default;
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  ~Cache() {
    for (const auto& entry : entries_) {
      entry->data().leak_unless_plain();
    }
  }

  std::shared_ptr<CastEntry> find(const at::Tensor& source, const Key& key, uint64_t watch) {
    const size_t found = index_.find(keys_, key);
    if (found == index_.kNone) {
      return nullptr;
    }
    if (!entries_[found]->is_fresh(*source.unsafeGetTensorImpl(), watch)) {
      ++info.stale;
      const std::shared_ptr<CastEntry> gone = take_out(found);
      return nullptr;
    }
    ++info.hits;
    return entries_[found];
  }

  void insert(const Key& key, std::shared_ptr<CastEntry> entry) {
    std::shared_ptr<CastEntry> gone;
    if (const size_t found = index_.find(keys_, key); found != index_.kNone) {
      gone = take_out(found); // made by code that ran inside this cast
    }
    const auto dead = sweep();
    // All that may throw comes first.
    index_.make_room(keys_);
    keys_.push_back(key);
    try {
      entries_.push_back(std::move(entry));
    } catch (...) {
      keys_.pop_back();
      throw;
    }
    index_.added(keys_);
    tls_has_casts = true;
  }

  void forget(const std::vector<at::Tensor>& tensors) {
    std::vector<std::shared_ptr<CastEntry>> gone;
    for (size_t at = entries_.size(); at-- > 0;) {
      const bool written = std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
        return tensor.defined() && entries_[at]->is_cast_of(*tensor.unsafeGetTensorImpl());
      });
      if (written) {
        ++info.stale;
        gone.push_back(take_out(at));
      }
    }
  }

  void clear() {
    std::vector<std::shared_ptr<CastEntry>> gone;
    gone.swap(entries_);
    index_.clear();
    keys_.clear();
    next_to_sweep_ = 0;
    gone.clear();
    if (entries_.capacity() == 0) {
      entries_.swap(gone); // for its room: the next region casts about as many
    }
  }

  void count_into(CacheInfo& result) const {
    result.entries += entries_.size();
    for (const auto& entry : entries_) {
      result.bytes += entry->data().bytes();
    }
  }

  CacheInfo info; // what has been done, and nothing held

 private:
  // Swapped with the last, then taken off the end.
  std::shared_ptr<CastEntry> take_out(size_t at) {
    std::shared_ptr<CastEntry> gone = std::move(entries_[at]);
    index_.removed(keys_, at);
    if (const size_t last = entries_.size() - 1; at != last) {
      index_.moved(keys_, last, at);
      entries_[at] = std::move(entries_[last]);
      keys_[at] = keys_[last];
    }
    entries_.pop_back();
    keys_.pop_back();
    return gone;
  }

  // Looks at two entries at each insertion, round and round: dead ones never outnumber the living by much, and no
  // insertion pays for a walk over all of them.
  std::array<std::shared_ptr<CastEntry>, 2> sweep() {
    std::array<std::shared_ptr<CastEntry>, 2> dead;
    for (auto& place : dead) {
      if (entries_.empty()) {
        break;
      }
      if (next_to_sweep_ >= entries_.size()) {
        next_to_sweep_ = 0;
      }
      if (entries_[next_to_sweep_]->is_dead()) {
        ++info.dropped;
        place = take_out(next_to_sweep_);
      } else {
        ++next_to_sweep_;
      }
    }
    return dead;
  }

  KeyIndex<Key> index_; // of keys_
  std::vector<std::shared_ptr<CastEntry>> entries_;
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

// Whether the data of a cast may be given to uses for which stock would cast anew: nobody follows the tensor by other
// means, nobody else can write to it, and the op hands out no view of its arguments.
bool may_give_data(const at::Tensor& tensor, const Weight& weight) {
  // Views come in threes, which nobody can tell from other tensors over the weight's data; so in a region they go by
  // the version and the watch.
  return !tls_results_may_alias && may_share_data(tensor) && (weight.is_view || is_alone(tensor, weight));
}

at::Tensor cast_of_weight(const at::Tensor& tensor, const Weight& weight, c10::ScalarType dtype, bool persistent) {
  const bool in_graph = gets_node(tensor);
  Cache& here = cache();
  // The data is all that is wanted. (Under no_grad a trainable leaf has an entry all the same: stock makes its node at
  // the first use, and that has a place in the order of the backward.)
  if (persistent && !in_graph && weight.reuse == Reuse::data) {
    if (std::optional<at::Tensor> data = find_persistent(tensor, weight, dtype)) {
      ++here.info.hits;
      return *std::move(data);
    }
  }
  // Of a trainable leaf a region uses one cast, as stock's does, whatever is written behind its back.
  const uint64_t watch = weight.reuse == Reuse::data ? watch_weight(*weight.owner) : 0;
  if (weight.reuse == Reuse::data && watch == 0) {
    return cast(tensor, dtype);
  }
  const Key key(tensor, weight, dtype);
  if (const std::shared_ptr<CastEntry> entry = here.find(tensor, key, watch)) {
    return entry->use(tensor);
  }
  Stamp stamp(*tensor.unsafeGetTensorImpl());
  if (persistent) {
    if (std::optional<at::Tensor> data = find_persistent(tensor, weight, dtype)) {
      ++here.info.hits;
      CastData kept(std::move(stamp), tensor, *data);
      const auto entry = std::make_shared<CastEntry>(*weight.owner, std::move(kept), *data, weight.reuse, watch);
      here.insert(key, entry);
      return entry->use(tensor);
    }
  }
  at::Tensor result = cast_for_others(tensor, dtype, weight.reuse);
  if (is_good_for_others(tensor, result)) {
    ++here.info.misses;
    std::optional<Stamp> second;
    if (persistent) {
      second = stamp;
    }
    CastData data(std::move(stamp), tensor, result);
    if (persistent) {
      keep_persistent(tensor, weight, *std::move(second), data.held(*tensor.unsafeGetTensorImpl()));
    }
    here.insert(key, std::make_shared<CastEntry>(*weight.owner, std::move(data), result, weight.reuse, watch));
  }
  return result;
}

at::Tensor cast_of_activation(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (const std::shared_ptr<CastEntry> entry = activations().find(tensor, dtype)) {
    ++cache().info.hits;
    return entry->use(tensor);
  }
  Stamp stamp(*tensor.unsafeGetTensorImpl());
  at::Tensor result = cast_for_others(tensor, dtype, Reuse::data);
  if (is_good_for_others(tensor, result)) {
    ++cache().info.misses;
    CastData data(std::move(stamp), tensor, result);
    activations().insert(std::make_shared<CastEntry>(tensor, std::move(data), result, Reuse::data));
    tls_has_casts = true;
  }
  return result;
}

// Memory that PyTorch did not allocate may be written by whoever did.
bool is_torchs_own(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().allocator() != nullptr;
}

} // namespace

at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (!keeps_casts() || has_tangent(tensor)) {
    return cast(tensor, dtype);
  }
  const Weight weight = weight_of(tensor);
  const bool persistent = tls_cache_mode == CacheMode::persistent;
  if (weight.reuse == Reuse::node) {
    return cast_of_weight(tensor, weight, dtype, persistent && may_give_data(tensor, weight));
  }
  if (weight.reuse == Reuse::data) {
    return may_give_data(tensor, weight) ? cast_of_weight(tensor, weight, dtype, persistent && is_alone(tensor, weight))
                                         : cast(tensor, dtype);
  }
  if (tls_cache_mode == CacheMode::all && !tls_results_may_alias && !tensor.is_inference() && may_share_data(tensor) &&
      is_torchs_own(tensor)) {
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
