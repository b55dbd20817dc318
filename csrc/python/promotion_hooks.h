// file: what promotion asks of Python, off the fast path: errors, reports, and answers that tables do not have
#pragma once

#include "promotion/rule.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_promote {

// One of the operands that take part in a promotion.
struct Operand {
  const at::Tensor* tensor = nullptr; // null for a Scalar
  const c10::Scalar* scalar = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined; // of a number, what PyTorch wraps it as
  std::optional<Number> number;                       // set for a Python number, wrapped in a tensor or not
  bool written = false;
  size_t argument = 0;
  size_t element = 0; // of the argument, where it is a list

  bool is_zero_dim() const {
    return tensor != nullptr && !number.has_value() && tensor->dim() == 0;
  }
  // The value of a Python int; nullopt for what is none, or is symbolic.
  std::optional<int64_t> int_value() const;
};

using Operands = std::vector<Operand>;

// The object in Python that is asked; torch_promote/promoting/hooks.py.
void set_promotion_hooks(pybind11::object hooks);

void ask_python_for_tables(uint32_t promotion, c10::ScalarType default_dtype);
DtypeCode ask_python_for_common(uint32_t promotion, uint64_t dtypes);

// Has Python raise that the operands have no common dtype. `floats`: of an op that computes in floating point.
[[noreturn]] void refuse_operands(
    const Promotion& promotion, const std::string& op, const Operands& operands, bool floats);
// Has Python raise that what is computed must not be written to a tensor of a dtype.
[[noreturn]] void refuse_to_write(
    const Promotion& promotion,
    const std::string& op,
    const Operands& operands,
    c10::ScalarType computed,
    c10::ScalarType written);
// Tells Python of a promotion that the lint looks for. It may raise.
void report_promotion(
    const Promotion& promotion,
    const void* region,
    const std::string& op,
    const Operands& operands,
    c10::ScalarType result,
    LintKind kind);

} // namespace torch_promote
