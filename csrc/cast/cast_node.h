// file: the autograd node of a cast
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace torch_promote {

// torch::autograd::Node is held by shared_ptr in older releases of PyTorch and by intrusive_ptr in newer ones.
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

// The number that the next node of this thread gets.
uint64_t next_sequence_nr();

// Makes `cast`, which belongs to no graph yet, the cast of `source` in a graph. The engine orders its sums by the
// sequence number.
void put_in_graph(const at::Tensor& cast, const at::Tensor& source, uint64_t sequence_nr);

// Makes `cast` another output of the node, which some tensor over the same data has already.
void put_in_graph(const at::Tensor& cast, NodePtr node);

} // namespace torch_promote
