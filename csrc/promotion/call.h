// file: applies a promotion rule to one call of an op
#pragma once

#include "promotion/operands.h"
#include "promotion/ops.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>

#include <cstdint>
#include <optional>

namespace torch_promote {

// A quick check whether the rule leaves a call unchanged because all tensors already have the dtype in which the op
// computes. If the check fails, promote_call decides.
class PlainCall {
 public:
  PlainCall(const PromotingOp& op, const Promotion& promotion)
      : op_(op),
        tables_(promotion.any_tables()),
        watched_ints_(promotion.options.reports(LintKind::overflow)),
        watched_floats_(promotion.options.reports(LintKind::float_overflow)) {}

  template <class... Args>
  bool is_plain(const Args&... args) {
    size_t argument = 0;
    (look(argument++, args), ...);
    if (!plain_ || dtype_ == kNoDtype) {
      return plain_ && numbers_ == 0;
    }
    if (op_.computes == Computes::floats && tables_.floating(dtype_) != dtype_) {
      return false;
    }
    if (numbers_ == 0) {
      return true;
    }
    if (numbers_ >> (static_cast<unsigned>(number_of_dtype(static_cast<c10::ScalarType>(dtype_))) + 1) != 0) {
      return false; // the number's kind would promote
    }
    for (size_t number = 0; number < kNumbers; ++number) {
      if ((numbers_ >> number & 1) != 0 && tables_.numbers[number][static_cast<size_t>(dtype_)] != dtype_) {
        return false;
      }
    }
    const bool is_integral = c10::isIntegralType(static_cast<c10::ScalarType>(dtype_), /*includeBool=*/true);
    return !(is_integral ? watched_ints_ : watched_floats_);
  }

 private:
  template <class T>
  void look(size_t argument, const T& value) {
    if (op_.takes_part(argument)) {
      add(value);
    } else if (op_.writes(argument)) {
      add_out(value);
    }
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return; // GCOVR_EXCL_LINE: only C++ can pass one
    }
    const DtypeCode dtype = to_code(tensor.scalar_type());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      add_number(static_cast<c10::ScalarType>(dtype));
    } else if (dtype_ == kNoDtype) {
      dtype_ = dtype;
    } else {
      plain_ &= dtype == dtype_;
    }
  }
  void add(const c10::Scalar& scalar) {
    add_number(scalar.type());
  }
  void add(const at::TensorList& tensors) {
    for (const at::Tensor& tensor : tensors) {
      add(tensor);
    }
  }
  void add(const at::ITensorListRef& tensors) {
    for (const at::Tensor& tensor : tensors) {
      add(tensor);
    }
  }
  void add(const at::ArrayRef<c10::Scalar>& scalars) {
    for (const c10::Scalar& scalar : scalars) {
      add(scalar);
    }
  }
  template <class T>
  void add(const std::optional<T>& value) {
    if (value.has_value()) {
      add(*value);
    }
  }
  // GCOVR_EXCL_START: arguments of other types take no part
  template <class Other>
  void add(const Other& /*value*/) {
    plain_ = false;
  }
  // GCOVR_EXCL_STOP

  void add_number(c10::ScalarType dtype) {
    numbers_ |= 1U << static_cast<unsigned>(number_of_dtype(dtype));
  }

  void add_out(const at::Tensor& tensor) {
    const DtypeCode dtype = to_code(tensor.scalar_type());
    plain_ &= dtype == (op_.computes == Computes::boolean ? to_code(c10::ScalarType::Bool) : dtype_);
  }
  // GCOVR_EXCL_START: typed wrappers write to tensors
  template <class Other>
  void add_out(const Other& /*value*/) {
    plain_ = false;
  }
  // GCOVR_EXCL_STOP

  const PromotingOp& op_;
  const PromotionTables& tables_;
  bool watched_ints_;
  bool watched_floats_;
  bool plain_ = true;
  DtypeCode dtype_ = kNoDtype;
  unsigned numbers_ = 0; // a bit for each type
};

enum class Promoted : uint8_t {
  as_it_was, // the rule leaves the call unchanged
  cast,      // operands on the stack were cast; the caller calls the op
  done,      // the op has run, and its results are on the stack
};

// Whether a rule acts on this thread's current calls; see PromotionState.
bool promotion_acts_here();

// Casts the operands on the stack to the rule's dtype, or runs the call. Raises if the rule forbids it.
Promoted promote_call(const PromotingOp& op, const Promotion& promotion, torch::jit::Stack& stack);

} // namespace torch_promote
