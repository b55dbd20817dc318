// file: one cast in the cache: when it is still good, and how a use gets it
#include "cache/entry.h"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace torch_promote {

CastEntry::CastEntry(const at::TensorBase& owner, CastData data, const at::Tensor& cast, Reuse reuse, uint64_t watch)
    : owner_(owner.getIntrusivePtr()), data_(std::move(data)), reuse_(reuse), watch_(watch) {
  if (data_.is_plain() && reuse == Reuse::node) {
    link(cast);
    if (!sequence_nr_.has_value() && !at::GradMode::is_enabled()) {
      // Stock makes the node here, for uses after no_grad; ours has its number.
      sequence_nr_ = next_sequence_nr();
    }
  }
}

at::Tensor CastEntry::use(const at::Tensor& source) {
  if (!data_.is_plain()) {
    return data_.held(*source.unsafeGetTensorImpl());
  }
  // Where autograd is not in this layer of functorch's, it is in one below: the leaf's cast has its node, as in stock.
  if (reuse_ == Reuse::node && at::GradMode::is_enabled() && source.requires_grad()) {
    return use_in_same_graph(source);
  }
  if (reuse_ == Reuse::node || !gets_node(source)) {
    return data_.held(*source.unsafeGetTensorImpl());
  }
  at::Tensor cast = data_.alias(*source.unsafeGetTensorImpl());
  put_in_graph(cast, source, next_sequence_nr());
  return cast;
}

at::Tensor CastEntry::use_in_same_graph(const at::Tensor& source) {
  if (cast_.has_value()) {
    if (auto cast = cast_->lock(); cast.defined()) {
      return at::Tensor(std::move(cast));
    }
  }
  at::Tensor cast = data_.alias(*source.unsafeGetTensorImpl());
  if (NodePtr node = node_.has_value() ? node_->lock() : NodePtr(); node != nullptr) {
    put_in_graph(cast, std::move(node));
  } else {
    // With the sequence number of the first cast's node, as if that had lived on: the engine orders the sums by it.
    put_in_graph(cast, source, sequence_nr_ ? *sequence_nr_ : next_sequence_nr());
  }
  link(cast);
  return cast;
}

void CastEntry::link(const at::Tensor& cast) {
  const NodePtr node = cast.grad_fn();
  if (node == nullptr) {
    return; // cast below autograd, in the kernel of a custom op: good as data, and for no graph
  }
  cast_.emplace(cast.getIntrusivePtr());
  sequence_nr_ = node->sequence_nr();
  node_.emplace(node);
}

} // namespace torch_promote
