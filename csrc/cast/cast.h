// file: `tensor.to(dtype)`, bypassing the dispatcher for plain tensors, and the autograd node of a cast
#pragma once

#include "cast/source.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace torch_promote {

// Casts the tensor, with the bits, strides and gradients of `tensor.to(dtype)`.
at::Tensor cast(const Source& source, at::ScalarType dtype);
inline at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  return cast(Source(tensor), dtype);
}

// torch::autograd::Node is held by shared_ptr in PyTorch 2.11 and by intrusive_ptr in later releases.
template <class Pointer>
struct WeakOf;
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T>
struct WeakOf<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};
using NodePtr = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;
using WeakNode = WeakOf<NodePtr>::type;

// Consumes and returns the sequence number of this thread's next node.
uint64_t next_sequence_nr();

// Gives `cast`, which belongs to no graph yet, a node that leads to `source`. The autograd engine sums gradients in the
// order of the sequence numbers, so the number decides the bits of the sum.
void attach_node(const at::Tensor& cast, const at::Tensor& source, uint64_t sequence_nr);

// The node of a tensor that is not a view, or null.
inline const NodePtr* node_of(const at::Tensor& cast) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(cast.unsafeGetTensorImpl()->autograd_meta());
  return meta != nullptr && meta->grad_fn_ != nullptr ? &meta->grad_fn_ : nullptr;
}

// Makes `cast` another output of the node of a tensor that shares its data.
void attach_node(const at::Tensor& cast, NodePtr node);

} // namespace torch_promote
