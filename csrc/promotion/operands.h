// file: the operands of a call on the stack, and their common dtype under a promotion rule
#pragma once

#include "promotion/ops.h"
#include "promotion/rule.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>
#include <c10/util/complex.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_promote {

// An argument, or an element of a list argument, that takes part in promotion.
struct Operand {
  const at::Tensor* tensor = nullptr; // null for a Scalar
  const c10::Scalar* scalar = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined; // for a number: the dtype of the tensor that PyTorch wraps it in
  std::optional<Number> number;                       // set for a Python number, wrapped in a tensor or not
  bool written = false;
  size_t argument = 0;
  size_t element = 0; // the index in a list argument

  bool is_zero_dim() const {
    return tensor != nullptr && !number.has_value() && tensor->dim() == 0;
  }
  // The value of a Python int; nullopt for other operands and for a symbolic int.
  std::optional<int64_t> int_value() const;
  // The value of a Python float or complex; nullopt for other operands, and for a symbolic float.
  std::optional<c10::complex<double>> value() const;
};

using Operands = std::vector<Operand>;

// The common dtype of the operands, at least one of which is a tensor; kNoDtype if they have none.
// Source: torch_promote/reference/promotion_rules/rule.py, PromotionRule.common.
DtypeCode common_dtype(const Promotion& promotion, const Operands& operands);

// The type of a Python number that a Scalar or a tensor of this dtype holds.
inline Number number_of_dtype(c10::ScalarType dtype) {
  if (c10::isComplexType(dtype)) {
    return Number::complex;
  }
  if (c10::isFloatingType(dtype)) {
    return Number::floating;
  }
  return dtype == c10::ScalarType::Bool ? Number::boolean : Number::integer;
}

// The arguments of a call on the stack, unpacked so that operands can point to them. Casts are written back.
class PromotedArguments {
 public:
  PromotedArguments(const PromotingOp& op, torch::jit::Stack& stack);

  // One element per call. An op that iterates over its lists in parallel (see PromotingOp::each) makes a call for each
  // list element; any other op has one call with all operands.
  std::vector<Operands> calls() const;

  // The tensors that the op writes to, first those that are not operands, such as `out`, then those that are.
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
