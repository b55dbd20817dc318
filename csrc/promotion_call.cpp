// file: what a promotion rule does with one call of an op
#include "promotion_call.h"

#include "promotion_lint.h"
#include "promotion_python.h"
#include "region.h"

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

// --- the operands of a call

Operand operand_of(const at::Tensor& tensor) {
  Operand operand;
  operand.tensor = &tensor;
  operand.dtype = tensor.scalar_type();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    operand.number = number_of_dtype(operand.dtype);
  }
  return operand;
}

Operand operand_of(const c10::Scalar& scalar) {
  Operand operand;
  operand.scalar = &scalar;
  operand.dtype = scalar.type();
  operand.number = number_of_dtype(operand.dtype);
  return operand;
}

// What lies on the stack, taken apart so that operands can point into it, and put back.
class Arguments {
 public:
  Arguments(const PromotingOp& op, Stack& stack)
      : op_(op),
        count_(op.handle.schema().arguments().size()),
        values_(stack.data() + (stack.size() - count_)),
        parts_(count_) {
    for (size_t i = 0; i < count_; ++i) {
      if (op.takes_part(i) || op.writes(i)) {
        read(i);
      }
    }
  }

  // The operands of each call that this one stands for: one, but of an op whose lists go in step.
  std::vector<Operands> calls() const {
    std::vector<Operands> result(op_.each ? steps() : 1);
    for (size_t i = 0; i < count_; ++i) {
      if (!op_.takes_part(i)) {
        continue;
      }
      for (size_t step = 0; step < result.size(); ++step) {
        if (op_.each && parts_[i].is_list) {
          add(i, step, result[step]);
          continue;
        }
        for (size_t element = 0; element < parts_[i].size(); ++element) {
          add(i, element, result[step]);
        }
      }
    }
    return result;
  }

  // The tensors that the op writes to besides its operands: out.
  std::vector<at::Tensor> outs() const {
    return tensors_where([this](size_t i) { return op_.writes(i) && !op_.takes_part(i); });
  }
  std::vector<at::Tensor> written_operands() const {
    return tensors_where([this](size_t i) { return op_.writes(i) && op_.takes_part(i); });
  }

  void put(size_t argument, size_t element, at::Tensor tensor) {
    parts_[argument].tensors[element] = std::move(tensor);
    parts_[argument].changed = true;
  }
  void put(size_t argument, size_t element, c10::Scalar scalar) {
    parts_[argument].scalars[element] = std::move(scalar);
    parts_[argument].changed = true;
  }

  void write_back() {
    for (size_t i = 0; i < count_; ++i) {
      Part& part = parts_[i];
      if (!part.changed) {
        continue;
      }
      if (!part.scalars.empty()) {
        values_[i] = part.is_list ? IValue(c10::List<c10::Scalar>(part.scalars)) : IValue(part.scalars[0]);
      } else {
        values_[i] = part.is_list ? IValue(part.tensors) : IValue(part.tensors[0]);
      }
    }
  }

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

  void read(size_t i) {
    const IValue& value = values_[i];
    Part& part = parts_[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        part.tensors.push_back(value.toTensor());
      }
    } else if (value.isScalar()) {
      part.scalars.push_back(value.toScalar());
    } else if (value.isTensorList()) {
      part.is_list = true;
      part.tensors = value.toTensorVector();
    } else if (value.isList()) {
      part.is_list = true;
      for (const IValue& element : value.toListRef()) {
        part.scalars.push_back(element.toScalar());
      }
    }
  }

  size_t steps() const {
    for (const Part& part : parts_) {
      if (part.is_list) {
        return part.size();
      }
    }
    return 0;
  }

  void add(size_t argument, size_t element, Operands& to) const {
    const Part& part = parts_[argument];
    if (element >= part.size()) {
      return; // lists of different lengths, of which the op complains
    }
    to.push_back(part.scalars.empty() ? operand_of(part.tensors[element]) : operand_of(part.scalars[element]));
    to.back().argument = argument;
    to.back().element = element;
    to.back().written = op_.writes(argument);
  }

  template <class Test>
  std::vector<at::Tensor> tensors_where(const Test& test) const {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < count_; ++i) {
      if (test(i)) {
        result.insert(result.end(), parts_[i].tensors.begin(), parts_[i].tensors.end());
      }
    }
    return result;
  }

  const PromotingOp& op_;
  size_t count_;
  IValue* values_;
  std::vector<Part> parts_;
};

// --- the common dtype

// Tensors of one state: those with dimensions, or 0-dim ones where they are weak.
class Join {
 public:
  explicit Join(const Promotion& promotion) : promotion_(promotion), tables_(promotion.tables()) {}

  void add(ScalarType dtype) {
    const uint64_t bit = uint64_t{1} << static_cast<size_t>(dtype);
    if ((seen_ & bit) != 0) {
      return;
    }
    seen_ |= bit;
    ++count_;
    if (count_ == 1) {
      dtype_ = to_code(dtype);
    } else if (dtype_ != kNoDtype) {
      dtype_ = tables_.pair(dtype_, to_code(dtype));
    }
  }
  bool is_empty() const {
    return count_ == 0;
  }
  // kNoDtype if they have none.
  DtypeCode dtype() const {
    return count_ > 2 && !promotion_.options.associative ? promotion_.of_many(seen_) : dtype_;
  }

 private:
  const Promotion& promotion_;
  const PromotionTables& tables_;
  uint64_t seen_ = 0;
  int count_ = 0;
  DtypeCode dtype_ = kNoDtype;
};

// The common dtype of operands of which one at least is a tensor; kNoDtype if there is none. As
// torch_promote/reference/promotion_rules/rule.py, PromotionRule.common.
DtypeCode common_dtype(const Promotion& promotion, const Operands& operands) {
  const PromotionTables& tables = promotion.tables();
  Join dims(promotion);
  Join zeros(promotion);
  std::optional<Number> number;
  for (const Operand& operand : operands) {
    if (operand.number.has_value()) {
      number = std::max(number.value_or(Number::boolean), *operand.number);
    } else if (promotion.options.zero_dim_is_weak && operand.is_zero_dim()) {
      zeros.add(operand.dtype);
    } else {
      dims.add(operand.dtype);
    }
  }
  const bool has_weak = !dims.is_empty() && !zeros.is_empty();
  DtypeCode strong = dims.is_empty() ? zeros.dtype() : dims.dtype();
  DtypeCode weak = has_weak ? zeros.dtype() : kNoDtype;
  if (strong == kNoDtype || (has_weak && weak == kNoDtype)) {
    return kNoDtype;
  }
  if (number.has_value()) {
    DtypeCode& joined = has_weak ? weak : strong;
    joined = tables.number(*number, joined);
    if (joined == kNoDtype) {
      return kNoDtype;
    }
  }
  return has_weak ? tables.zero_dim(strong, weak) : strong;
}

// --- one call

bool is_tensor(const Operand& operand) {
  return !operand.number.has_value();
}

// Tensors that PyTorch reads in their own dtype, whatever the common one is: a kernel for half precision takes a tensor
// of one element for a number, and does not round it.
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

// Whether a number would raise the dtype that the tensors have been cast to.
bool raises(Number number, ScalarType dtype) {
  return number > number_of_dtype(dtype);
}

c10::Scalar in_kind_of(ScalarType dtype, const c10::Scalar& scalar) {
  switch (number_of_dtype(dtype)) {
    case Number::boolean:
      return scalar.toBool();
    case Number::integer:
      return scalar.isComplex() ? static_cast<int64_t>(scalar.toComplexDouble().real()) : scalar.to<int64_t>();
    case Number::floating:
      return scalar.isComplex() ? scalar.toComplexDouble().real() : scalar.to<double>();
    default:
      return scalar;
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
    // All is checked before anything is cast or written.
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

  // nullopt where the rule has no say: no tensors, or, under PyTorch's own rule, an error that is for the op to raise.
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
      refuse_operands(promotion_, op_.name, operands, computes_floats());
    }
    return static_cast<ScalarType>(found);
  }

  ScalarType result_dtype(ScalarType computed) const {
    return op_.computes == Computes::boolean ? ScalarType::Bool : computed;
  }

  void check_write(const Operands& operands, ScalarType computed, ScalarType written) const {
    if (!promotion_.tables().can_write(computed, written)) {
      refuse_to_write(promotion_, op_.name, operands, computed, written);
    }
  }

  // Raises for what must not be written. False if an operand that is written has another dtype than is computed in, so
  // that the op itself might compute in one of its own choice.
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
      const std::optional<LintKind> kind = kind_of_promotion(promotion_, operands, computed);
      if (kind.has_value()) {
        report_promotion(promotion_, innermost_promotion_region(), op_.name, operands, computed, *kind);
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
          arguments_.put(operand.argument, operand.element, in_kind_of(dtype, *operand.scalar));
        }
        any = true;
      }
    }
    return any;
  }

  // NOTE [ PyTorch's own rule ]
  // The op arrives at the same dtype itself, so what is not cast here changes nothing; and three things must not be
  // cast, or bits would change (and errors: see Refuses). Kernels for half precision read a tensor of one element
  // unrounded. Backward formulas compute with the operands that were saved, in the dtypes that these have. And what is
  // written keeps its dtype.
  bool cast_as_stock(const Operands& operands, ScalarType dtype) {
    const bool known = std::none_of(operands.begin(), operands.end(), [](const Operand& operand) {
      return operand.number.has_value() && operand.dtype == ScalarType::UInt64; // more than int64 holds
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

  // An operand of an op whose lists go in step may be shared by all elements.
  void put(const Operand& operand, const at::Tensor& cast) {
    TORCH_CHECK(
        operand.tensor->scalar_type() == operand.dtype || operand.tensor->scalar_type() == cast.scalar_type(), op_.name,
        " is called with one operand for tensors of several dtypes, for which the rule '", promotion_.name,
        "' has several common dtypes. Call it once for each dtype.");
    arguments_.put(operand.argument, operand.element, cast);
  }

  // An op that writes an operand of another dtype than it computes in: the same without writing, and a copy.
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
  Arguments arguments_;
  std::vector<at::Tensor> written_ = arguments_.written_operands(); // as the caller has them
};

} // namespace

bool promotion_acts_here() {
  return !tls_promotion.inside && torch::autograd::get_current_graph_task_id() == tls_promotion.graph_task;
}

Promoted promote_call(const PromotingOp& op, const Promotion& promotion, Stack& stack) {
  if (op.computes == Computes::opaque || !promotion_acts_here()) {
    return Promoted::as_it_was;
  }
  return Call(op, promotion, stack).run();
}

} // namespace torch_promote
