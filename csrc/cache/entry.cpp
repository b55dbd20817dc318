// file: one cast in a cache: its validity, and the tensor that each use gets
#include "cache/entry.h"

#include "cache/casts_mutex.h"
#include "cache/persistent_cache.h"

#include <ATen/core/grad_mode.h>

#include <mutex>
#include <utility>

namespace torch_promote {

CastEntry::CastEntry(const at::TensorBase& owner, const Source& source, Reuse reuse, uint64_t epoch)
    : owner_address_(owner.unsafeGetTensorImpl()), data_(source), reuse_(reuse), epoch_(epoch) {
  if (epoch != 0) {
    meta_.emplace(weak_meta_of(owner));
  } else {
    owner_.emplace(owner.getIntrusivePtr());
  }
}

void CastEntry::fill(const Source& source, const at::Tensor& cast, std::optional<uint64_t> sequence_nr) {
  data_.fill(source, cast);
  sequence_nr_ = sequence_nr;
  if (data_.is_plain() && reuse_ == Reuse::shared_grad_fn) {
    if (const NodePtr* node = node_of(cast)) {
      cast_.emplace(cast.getIntrusivePtr());
      node_.emplace(*node);
      sequence_nr_ = (*node)->sequence_nr();
    } else if (!sequence_nr_.has_value() && !at::GradMode::is_enabled()) {
      // Stock makes the node here, for uses after no_grad. The node that ours makes later gets the same number.
      sequence_nr_ = next_sequence_nr();
    }
  }
}

at::Tensor CastEntry::use(const Source& source) {
  if (!data_.is_plain()) {
    return data_.held(source.impl);
  }
  // `wants_grad`, not `needs_node`: inside functorch's transforms autograd is excluded in this layer and active in one
  // below, where the leaf's cast has its node, as under stock.
  if (reuse_ == Reuse::shared_grad_fn && source.wants_grad) {
    return use_in_same_graph(source);
  }
  if (reuse_ == Reuse::shared_grad_fn || !source.needs_node) {
    return data_.held(source.impl);
  }
  at::Tensor cast = data_.alias(source.impl);
  if (cast.defined()) {
    attach_node(cast, source.tensor, next_sequence_nr());
  }
  return cast;
}

at::Tensor CastEntry::use_in_same_graph(const Source& source) {
  if (cast_.has_value()) {
    if (auto cast = cast_->lock(); cast.defined()) {
      return at::Tensor(std::move(cast));
    }
  }
  at::Tensor cast = data_.alias(source.impl);
  if (!cast.defined()) {
    return cast;
  }
  std::optional<WeakTensor> weak_cast(cast.getIntrusivePtr());
  if (NodePtr node = node_.has_value() ? node_->lock() : NodePtr(); node != nullptr) {
    attach_node(cast, std::move(node));
    const std::lock_guard<std::mutex> lock(casts_mutex());
    cast_.swap(weak_cast);
    return cast;
  }
  // The first node's number, as if that node were still alive: the engine sums in the order of the numbers.
  attach_node(cast, source.tensor, sequence_nr_ ? *sequence_nr_ : next_sequence_nr());
  const NodePtr& node = *node_of(cast);
  std::optional<WeakNode> weak_node(node);
  const std::lock_guard<std::mutex> lock(casts_mutex());
  cast_.swap(weak_cast);
  node_.swap(weak_node);
  sequence_nr_ = node->sequence_nr();
  return cast;
}

std::shared_ptr<CastEntry> CastEntry::copy() const {
  return std::shared_ptr<CastEntry>(new CastEntry(*this));
}

} // namespace torch_promote
