// file: the autograd node of a cast
#include "cast/cast_node.h"

#include "cast/cast.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

namespace torch_promote {

namespace {

using torch::autograd::Node;

// It does what the node of `to` does. What it runs goes through `cast`, which records it where a graph of the backward
// pass is asked for; so second derivatives need no code here. Forward-mode AD would: a tensor that has a tangent is
// never cast with this node.
class CastBackward : public Node {
 public:
  CastBackward(uint64_t sequence_nr, const at::Tensor& source)
      : Node(sequence_nr, {torch::autograd::impl::gradient_edge(source)}), dtype_(source.scalar_type()) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {grads[0].defined() ? as_source(grads[0]) : at::Tensor()};
  }
  std::string name() const override {
    return "CastBackward";
  }
  // Compiled autograd traces `apply`; there is nothing saved to swap.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& /*saved*/) override {
    return apply(torch::autograd::variable_list(grads));
  }

 private:
  at::Tensor as_source(const at::Tensor& grad) const {
    return grad.scalar_type() == dtype_ ? grad : cast(grad, dtype_);
  }

  at::ScalarType dtype_;
};

template <class Pointer>
Pointer make_node(uint64_t sequence_nr, const at::Tensor& source) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::make_shared<CastBackward>(sequence_nr, source);
  } else {
    return c10::make_intrusive<CastBackward>(sequence_nr, source);
  }
}

} // namespace

uint64_t next_sequence_nr() {
  return at::sequence_number::get_and_increment();
}

void put_in_graph(const at::Tensor& cast, const at::Tensor& source, uint64_t sequence_nr) {
  NodePtr node = make_node<NodePtr>(sequence_nr, source);
  node->add_input_metadata(cast);
  put_in_graph(cast, std::move(node));
}

void put_in_graph(const at::Tensor& cast, NodePtr node) {
  torch::autograd::impl::set_gradient_edge(cast, torch::autograd::Edge(std::move(node), 0));
}

} // namespace torch_promote
