// file: applies a promotion rule to one call of an op
#include "promotion/call.h"

#include "promotion/callbacks.h"
#include "promotion/lint.h"
#include "region/current_policy.h"
#include "region/region.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torch_promote {

namespace {

using c10::IValue;
using c10::ScalarType;
using torch::jit::Stack;

bool is_tensor(const Operand& operand) {
  return !operand.number.has_value();
}

// Whether PyTorch may read a tensor in its own dtype instead of the common one: a half-precision kernel reads a
// one-element tensor as a number, without rounding it.
bool is_read_as_number(const at::Tensor& tensor) {
  return tensor.dim() == 0 || (!tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.numel() == 1);
}

bool records_gradient(const Operands& operands) {
  return std::any_of(operands.begin(), operands.end(), [](const Operand& operand) {
    return operand.tensor != nullptr && ((at::GradMode::is_enabled() && operand.tensor->requires_grad()) ||
                                         (c10::isFloatingType(operand.dtype) && operand.tensor->_fw_grad(0).defined()));
  });
}

bool is_plain_strided(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_mkldnn();
}

// Whether a number would promote tensors of this dtype.
bool raises(Number number, ScalarType dtype) {
  return number > number_of_dtype(dtype);
}

// Of a scalar that raises the dtype.
c10::Scalar in_kind_of(ScalarType dtype, const c10::Scalar& scalar) {
  switch (number_of_dtype(dtype)) {
    case Number::boolean:
      return scalar.toBool();
    case Number::integer:
      return scalar.isComplex() ? static_cast<int64_t>(scalar.toComplexDouble().real()) : scalar.to<int64_t>();
    default: // floating: no number raises a complex dtype
      return scalar.toComplexDouble().real();
  }
}

bool is_refused(Refuses refuses, ScalarType dtype) {
  switch (refuses) {
    case Refuses::boolean:
      return dtype == ScalarType::Bool;
    case Refuses::integral:
      return c10::isIntegralType(dtype, /*includeBool=*/true);
    case Refuses::complex:
      return c10::isComplexType(dtype);
    case Refuses::mixed:
      return true;
    default:
      return false;
  }
}

class Call {
 public:
  Call(const PromotingOp& op, const Promotion& promotion, Stack& stack)
      : op_(op), promotion_(promotion), stack_(stack), arguments_(op, stack) {}

  Promoted run() {
    std::vector<Operands> calls = arguments_.calls();
    std::vector<std::optional<ScalarType>> computed;
    computed.reserve(calls.size());
    for (const Operands& operands : calls) {
      computed.push_back(dtype_computed(operands));
    }
    // All checks come before the first cast or write.
    bool in_place = true;
    if (!promotion_.options.is_stock) {
      in_place = check_written(calls, computed);
    }
    bool any = false;
    for (size_t i = 0; i < calls.size(); ++i) {
      if (computed[i].has_value()) {
        report(calls[i], *computed[i]);
        any |= promotion_.options.is_stock ? cast_as_stock(calls[i], *computed[i])
                                           : cast(calls[i], *computed[i], /*written_too=*/!in_place);
      }
    }
    if (!in_place) {
      return run_functional();
    }
    if (!any) {
      return Promoted::as_it_was;
    }
    arguments_.write_back();
    return Promoted::cast;
  }

 private:
  bool computes_floats() const {
    if (op_.computes != Computes::floats) {
      return false;
    }
    if (op_.rounding_mode < 0) {
      return true;
    }
    const size_t count = op_.handle.schema().arguments().size();
    return stack_[stack_.size() - count + static_cast<size_t>(op_.rounding_mode)].isNone();
  }

  // nullopt if the rule does not act: there are no tensors, or, under PyTorch's own rule, the op itself raises.
  std::optional<ScalarType> dtype_computed(const Operands& operands) const {
    if (std::none_of(operands.begin(), operands.end(), is_tensor)) {
      return std::nullopt;
    }
    const DtypeCode common = common_dtype(promotion_, operands);
    DtypeCode found = common;
    if (found != kNoDtype && computes_floats()) {
      found = promotion_.tables().floating(found);
    }
    if (found == kNoDtype) {
      if (promotion_.options.is_stock) {
        return std::nullopt;
      }
      promotion_callbacks.refuse_operands(promotion_, op_.name, operands, computes_floats());
      // GCOVR_EXCL_START: the callback raises
      TORCH_CHECK(false, op_.name, ": the operands have no common dtype under the rule '", promotion_.name, "'.");
      // GCOVR_EXCL_STOP
    }
    return static_cast<ScalarType>(found);
  }

  ScalarType result_dtype(ScalarType computed) const {
    return op_.computes == Computes::boolean ? ScalarType::Bool : computed;
  }

  void check_write(const Operands& operands, ScalarType computed, ScalarType written) const {
    if (!promotion_.tables().can_write(computed, written)) {
      promotion_callbacks.refuse_to_write(promotion_, op_.name, operands, computed, written);
      // GCOVR_EXCL_START: the callback raises
      TORCH_CHECK(
          false, op_.name, ": ", computed, " is not written to ", written, " under the rule '", promotion_.name, "'.");
      // GCOVR_EXCL_STOP
    }
  }

  // Raises if the rule does not allow writing the result to its target. Returns false if a written operand has another
  // dtype than the rule computes in: the op might then compute in a different dtype.
  bool check_written(const std::vector<Operands>& calls, const std::vector<std::optional<ScalarType>>& computed) const {
    const std::vector<at::Tensor> outs = arguments_.outs();
    bool in_place = true;
    for (size_t i = 0; i < calls.size(); ++i) {
      if (!computed[i].has_value()) {
        continue;
      }
      const ScalarType result = result_dtype(*computed[i]);
      for (const Operand& operand : calls[i]) {
        if (operand.written) {
          check_write(calls[i], result, operand.dtype);
          in_place &= operand.dtype == *computed[i];
        }
      }
      for (size_t out = 0; out < outs.size(); ++out) {
        if (!op_.each || out == i) {
          check_write(calls[i], result, outs[out].scalar_type());
        }
      }
    }
    return in_place;
  }

  void report(const Operands& operands, ScalarType computed) const {
    if (promotion_.options.lint != 0) {
      const uint8_t kinds = kinds_of_promotion(promotion_, operands, computed);
      if (kinds != 0) {
        promotion_callbacks.report(promotion_, innermost_promotion_region(), op_.name, operands, computed, kinds);
      }
    }
  }

  bool cast(const Operands& operands, ScalarType dtype, bool written_too) {
    bool any = false;
    for (const Operand& operand : operands) {
      if (operand.written && !written_too) {
        continue;
      }
      if (is_tensor(operand)) {
        if (operand.dtype != dtype) {
          put(operand, operand.tensor->to(dtype));
          any = true;
        }
      } else if (raises(*operand.number, dtype)) {
        if (operand.tensor != nullptr) {
          put(operand, operand.tensor->to(dtype));
        } else {
          arguments_.put(operand, in_kind_of(dtype, *operand.scalar));
        }
        any = true;
      }
    }
    return any;
  }

  // NOTE [ PyTorch's own rule ]
  // The op promotes to the same dtype itself, so leaving an operand uncast is always right. Casting would change bits
  // (and errors: see Refuses) in three cases. Half-precision kernels read a one-element tensor unrounded. Backward
  // formulas compute in the dtypes of the saved operands. An operand that the op writes to keeps its dtype.
  bool cast_as_stock(const Operands& operands, ScalarType dtype) {
    const bool known = std::none_of(operands.begin(), operands.end(), [](const Operand& operand) {
      return operand.number.has_value() && operand.dtype == ScalarType::UInt64; // the int does not fit in int64
    });
    if (!known || records_gradient(operands) ||
        std::any_of(operands.begin(), operands.end(), [&](const Operand& operand) {
          return is_refused(op_.refuses, operand.dtype);
        })) {
      return false;
    }
    bool any = false;
    for (const Operand& operand : operands) {
      if (is_tensor(operand) && !operand.written && operand.dtype != dtype && is_plain_strided(*operand.tensor) &&
          !is_read_as_number(*operand.tensor)) {
        put(operand, operand.tensor->to(dtype));
        any = true;
      }
    }
    return any;
  }

  // The elements of an op that iterates over its lists in parallel may share an operand.
  void put(const Operand& operand, const at::Tensor& cast) {
    TORCH_CHECK(
        operand.tensor->scalar_type() == operand.dtype || operand.tensor->scalar_type() == cast.scalar_type(), op_.name,
        " is called with one operand for tensors of several dtypes, for which the rule '", promotion_.name,
        "' has several common dtypes. Call it once for each dtype.");
    arguments_.put(operand, cast);
  }

  // For an op that computes in another dtype than that of the operand it writes to: calls the functional overload and
  // copies its result.
  Promoted run_functional() {
    TORCH_CHECK(
        op_.functional.has_value(), op_.name, " cannot write to an operand of another dtype than the rule '",
        promotion_.name, "' computes in. Use the op that does not write, and copy its result.");
    const std::vector<at::Tensor> written = written_;
    arguments_.write_back();
    const size_t count = op_.handle.schema().arguments().size();
    Stack inner(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    const InsidePromoted inside;
    op_.functional->callBoxed(&inner);
    const std::vector<at::Tensor> computed =
        inner.back().isTensor() ? std::vector<at::Tensor>{inner.back().toTensor()} : inner.back().toTensorVector();
    for (size_t i = 0; i < written.size(); ++i) {
      written[i].copy_(computed.at(i));
    }
    torch::jit::drop(stack_, count);
    if (!op_.handle.schema().returns().empty()) {
      stack_.emplace_back(written.at(0));
    }
    return Promoted::done;
  }

  const PromotingOp& op_;
  const Promotion& promotion_;
  Stack& stack_;
  PromotedArguments arguments_;
  std::vector<at::Tensor> written_ = arguments_.written_operands(); // the caller's, uncast
};

} // namespace

bool promotion_acts_here() {
  return !tls_promotion.inside && !inside_kernel() &&
         torch::autograd::get_current_graph_task_id() == tls_promotion.graph_task;
}

Promoted promote_call(const PromotingOp& op, const Promotion& promotion, Stack& stack) {
  if (op.computes == Computes::opaque || !promotion_acts_here()) {
    return Promoted::as_it_was;
  }
  return Call(op, promotion, stack).run();
}

} // namespace torch_promote
