// file: the operands of a call on the stack, which may lie in lists
#pragma once

#include "promotion/ops.h"
#include "python/promotion_hooks.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>

#include <vector>

namespace torch_promote {

// The type of the Python number that lies in a Scalar, or in a tensor of a dtype.
inline Number number_of_dtype(c10::ScalarType dtype) {
  if (c10::isComplexType(dtype)) {
    return Number::complex;
  }
  if (c10::isFloatingType(dtype)) {
    return Number::floating;
  }
  return dtype == c10::ScalarType::Bool ? Number::boolean : Number::integer;
}

// What lies on the stack for an op, taken apart so that operands can point into it, and put back.
class PromotedArguments {
 public:
  PromotedArguments(const PromotingOp& op, torch::jit::Stack& stack);

  // The operands of each call that this one stands for: one, but of an op whose lists go in step.
  std::vector<Operands> calls() const;

  // The tensors that the op writes to: those that are no operands, as out, and those that are.
  std::vector<at::Tensor> outs() const;
  std::vector<at::Tensor> written_operands() const;

  void put(const Operand& operand, const at::Tensor& tensor);
  void put(const Operand& operand, const c10::Scalar& scalar);
  void write_back();

 private:
  struct Part {
    bool is_list = false;
    bool changed = false;
    std::vector<at::Tensor> tensors;
    std::vector<c10::Scalar> scalars;

    size_t size() const {
      return tensors.size() + scalars.size(); // one of them is empty
    }
  };

  void read(size_t argument);
  size_t steps() const;
  void add(size_t argument, size_t element, Operands& to) const;

  const PromotingOp& op_;
  size_t count_;
  c10::IValue* values_;
  std::vector<Part> parts_;
};

} // namespace torch_promote
