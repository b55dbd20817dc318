// file: one cast in a cache: its validity, and the tensor that each use gets
#pragma once

#include "cache/cast_data.h"
#include "cache/weight.h"
#include "cache/write_log.h"
#include "cast/cast.h"
#include "cast/pooled.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

namespace torch_promote {

// When a cast began: after which unversioned writes, and how often PyTorch's cache, and ours by hand, had been cleared.
struct CastTime {
  uint64_t writes;
  uint64_t stock_clears;
  uint64_t hand_clears;
};

// How often `clear_cast_cache` was called.
inline constinit std::atomic<uint64_t> hand_clears = 0;

// NOTE [ What an entry holds ]
// The grad_fn of a trainable weight's cast leads to the weight's AccumulateGrad, which owns the weight. A cache that
// holds the cast therefore keeps the weight alive until the region ends, even if it refers to the weight itself weakly.
// So an entry owns the data of the cast only, as a detached alias, and refers weakly to the weight, to the cast and to
// the cast's node. A second use in the same graph gets the same node: gradients are then summed at the same place, and
// to the same bits, as under stock. If the node is gone, so is its graph, and the next use that needs a gradient gets a
// new node over the same data.
//
// What stock casts at every use (frozen weights, views of weights, activations) has a node for each use there, and
// gradients that are summed in float32. With `Reuse::data_only` such uses share the data, each with its own node, so
// the gradients keep stock's bits.
//
// Only a plain tensor can be split into data and node. The cache holds casts of subclasses, functorch wrappers, fake
// and functional tensors as they are, like stock, until the region ends or their source changes.
class CastEntry {
 public:
  static std::shared_ptr<CastEntry> make(
      const at::TensorBase& owner, const Source& source, Reuse reuse, uint64_t epoch = 0) {
    return std::allocate_shared<CastEntry>(PoolAllocator<CastEntry>(), owner, source, reuse, epoch);
  }
  // Before the cast; `fill` takes it. `owner` is the source, or the weight that it is a view of: the entry is dead when
  // the owner is. `epoch` is the owner's alias_epoch, 0 if changes of it do not matter.
  CastEntry(const at::TensorBase& owner, const Source& source, Reuse reuse, uint64_t epoch = 0);
  // `sequence_nr` is the number that an earlier use has taken for the node of this cast, which has none.
  void fill(const Source& source, const at::Tensor& cast, std::optional<uint64_t> sequence_nr = {});

  // After `fill` with a cast that has no node: gives uses the node of `other`, a cast of the same source on another
  // stream. Stock has one cast for all streams, so its gradients are summed in one place.
  void join_graph_of(const CastEntry& other) {
    node_ = other.node_;
    sequence_nr_ = other.sequence_nr_;
  }

  bool is_dead() const {
    return meta_.has_value() ? meta_->expired() : owner_->expired();
  }
  // Whether `source`, whose owner's epoch is now `epoch`, is unchanged since it was cast.
  bool is_fresh(const Source& source, uint64_t epoch = 0) const {
    return data_.is_fresh(source) && epoch == epoch_;
  }
  // The same, but the data may be that of another stream.
  bool is_unchanged(const Source& source, uint64_t epoch = 0) const {
    return data_.is_unchanged(source) && epoch == epoch_;
  }
  // Whether the source, or the weight that it is a view of, is among what was written to.
  bool is_among(const WritesSince& writes) const {
    return writes.include(owner_address_, data_.signature().storage());
  }
  bool is_owned_by(const at::TensorImpl& tensor) const {
    return owner_address_ == &tensor;
  }
  at::ScalarType dtype() const {
    return data_.dtype();
  }
  Reuse reuse() const {
    return reuse_;
  }
  CastData& data() {
    return data_;
  }
  const CastData& data() const {
    return data_;
  }

  // The cast, with a node if the use needs one; undefined if another thread has freed its memory. In anomaly mode this
  // runs Python, which may clear the cache: the caller has to own the entry.
  at::Tensor use(const Source& source);
  // For another thread, under casts_mutex. Both are recorded by the same node, if there is one. The copy keeps no
  // memory; see CastData::hold.
  std::shared_ptr<CastEntry> copy() const;

 private:
  CastEntry(const CastEntry&) = default;
  at::Tensor use_in_same_graph(const Source& source);

  const at::TensorImpl* owner_address_; // to compare with
  // One of the two. A weight that stock's cache does not refer to is recognized by its BackendMeta, because
  // torch.utils.swap_tensors refuses tensors with weak references.
  std::optional<WeakTensor> owner_;
  std::optional<WeakMeta> meta_;
  CastData data_;
  Reuse reuse_;
  uint64_t epoch_;
  std::optional<WeakTensor> cast_;
  std::optional<WeakNode> node_;
  std::optional<uint64_t> sequence_nr_; // of the first cast's node
};

} // namespace torch_promote
