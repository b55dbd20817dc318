// file: applies a promotion rule to one call of an op
#include "promotion/call.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace torch_promote {

namespace {

using c10::IValue;
using c10::ScalarType;
using torch::jit::Stack;

bool is_tensor(const Operand& operand) {
  return !operand.number.has_value();
}

// Whether a number would promote tensors of this dtype.
bool raises(Number number, ScalarType dtype) {
  return number > number_of_dtype(dtype);
}

bool is_integral(ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true);
}

// Whether the tensors differ in their dtypes, or a number would promote them.
bool have_several_dtypes(const Operands& operands) {
  const auto first = std::find_if(operands.begin(), operands.end(), is_tensor);
  return first != operands.end() && std::any_of(operands.begin(), operands.end(), [&](const Operand& operand) {
           return is_tensor(operand) ? operand.dtype != first->dtype : raises(*operand.number, first->dtype);
         });
}

// A scalar that raises the dtype, as a number of the dtype's own kind.
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

// Whether the data of a wrapped number may be read.
bool is_readable(const at::Tensor& number) {
  constexpr c10::DispatchKeySet kOpaque(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::Functionalize});
  return number.is_cpu() && !number.key_set().has_any(kOpaque);
}

// What identifies the data of a tensor and of its views.
const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? static_cast<const void*>(tensor.storage().unsafeGetStorageImpl())
                              : static_cast<const void*>(tensor.unsafeGetTensorImpl());
}

void add_to(CompositeArguments& arguments, const IValue& value) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      arguments.add(value.toTensor());
    }
  } else if (value.isScalar()) {
    arguments.add(number_of_dtype(value.toScalar().type()));
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) {
      add_to(arguments, element);
    }
  }
}

// The common dtype of tensors of one state: those with dimensions, or 0-dim ones under a rule where these are weak.
class DtypeJoin {
 public:
  explicit DtypeJoin(const Promotion& promotion) : promotion_(promotion), tables_(promotion.tables()) {}

  void add(c10::ScalarType dtype) {
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

// The common dtype of the operands; kNoDtype if they have none. Numbers alone promote like numbers with a bool tensor.
// Source: torch_promote/reference/promotion_rules/rule.py, PromotionRule.common.
DtypeCode common_dtype(const Promotion& promotion, const Operands& operands) {
  const PromotionTables& tables = promotion.tables();
  DtypeJoin dims(promotion);
  DtypeJoin zeros(promotion);
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
  if (dims.is_empty() && zeros.is_empty()) {
    dims.add(ScalarType::Bool);
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

// The arguments of a call on the stack, unpacked so that operands can point to them. Casts are written back.
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

  // One element per call. An op that iterates over its lists in parallel (see PromotingOp::each) makes a call for each
  // list element; any other op has one call with all operands.
  std::vector<Operands> calls() const {
    const auto list = std::find_if(parts_.begin(), parts_.end(), [](const Part& part) { return part.is_list; });
    std::vector<Operands> result(!op_.each ? 1 : list == parts_.end() ? 0 : list->size());
    for (size_t i = 0; i < count_; ++i) {
      if (!op_.takes_part(i)) {
        continue;
      }
      for (size_t call = 0; call < result.size(); ++call) {
        if (op_.each && parts_[i].is_list) {
          add(i, call, result[call]);
          continue;
        }
        for (size_t element = 0; element < parts_[i].size(); ++element) {
          add(i, element, result[call]);
        }
      }
    }
    return result;
  }

  // The tensors that the op writes to: those that are operands, or the others, such as `out`.
  std::vector<at::Tensor> written(bool operands) const {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < count_; ++i) {
      if (op_.writes(i) && op_.takes_part(i) == operands) {
        result.insert(result.end(), parts_[i].tensors.begin(), parts_[i].tensors.end());
      }
    }
    return result;
  }

  void put(const Operand& operand, const at::Tensor& tensor) {
    parts_[operand.argument].tensors[operand.element] = tensor;
    parts_[operand.argument].changed = true;
  }

  void put(const Operand& operand, const c10::Scalar& scalar) {
    parts_[operand.argument].scalars[operand.element] = scalar;
    parts_[operand.argument].changed = true;
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

  void read(size_t argument) {
    const IValue& value = values_[argument];
    Part& part = parts_[argument];
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

  void add(size_t argument, size_t element, Operands& to) const {
    const Part& part = parts_[argument];
    if (element >= part.size()) {
      return; // lists of different lengths: the op raises
    }
    to.push_back(part.scalars.empty() ? operand_of(part.tensors[element]) : operand_of(part.scalars[element]));
    to.back().argument = argument;
    to.back().element = element;
    to.back().written = op_.writes(argument);
  }

  const PromotingOp& op_;
  size_t count_;
  IValue* values_;
  std::vector<Part> parts_;
};

class Call {
 public:
  Call(const PromotingOp& op, const Promotion& promotion, Stack& stack)
      : op_(op), promotion_(promotion), stack_(stack), arguments_(op, stack) {}

  Promoted run() {
    std::vector<Operands> calls = arguments_.calls();
    const auto may_change = [this](const Operands& operands) { return this->may_change(operands); };
    if ((tls_promotion.only != nullptr || std::any_of(calls.begin(), calls.end(), may_change)) &&
        std::none_of(calls.begin(), calls.end(), acts_on_operands)) {
      return Promoted::as_it_was;
    }
    if (is_on_numbers()) {
      return run_on_tensors(calls.front());
    }
    std::vector<std::optional<ScalarType>> computed;
    computed.reserve(calls.size());
    for (const Operands& operands : calls) {
      computed.push_back(dtype_computed(operands));
    }
    // PyTorch's own rule: the op promotes to that dtype itself, except in matrix products.
    const bool casts = !promotion_.options.is_stock || op_.matmul;
    // All checks come before the first cast or write.
    const bool in_place = !casts || check_written(calls, computed);
    bool any = false;
    for (size_t i = 0; i < calls.size(); ++i) {
      if (computed[i].has_value()) {
        report_cast(calls[i], *computed[i]);
        any |= casts && cast(calls[i], *computed[i], /*written_too=*/!in_place);
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

  bool is_on_numbers() const {
    return op_.written == 0 && op_.functional.has_value();
  }

  // Whether the rule may change the call.
  bool may_change(const Operands& operands) const {
    const auto first = std::find_if(operands.begin(), operands.end(), is_tensor);
    return is_on_numbers() || have_several_dtypes(operands) ||
           (computes_floats() && first != operands.end() && is_integral(first->dtype));
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
      refuse_operands(promotion_, op_.name, operands, computes_floats());
      TORCH_CHECK(false, op_.name, ": the operands have no common dtype under the rule '", promotion_.name, "'.");
    }
    return static_cast<ScalarType>(found);
  }

  ScalarType result_dtype(ScalarType computed) const {
    if (op_.computes == Computes::boolean) {
      return ScalarType::Bool;
    }
    return op_.real ? c10::toRealValueType(computed) : computed;
  }

  void check_write(const Operands& operands, ScalarType computed, ScalarType written) const {
    if (!promotion_.tables().can_write(computed, written)) {
      refuse_to_write(promotion_, op_.name, operands, computed, written);
      TORCH_CHECK(
          false, op_.name, ": ", computed, " is not written to ", written, " under the rule '", promotion_.name, "'.");
    }
  }

  // Raises if the rule does not allow writing the result to its target. Returns false if a written operand has another
  // dtype than the rule computes in: the op might then compute in a different dtype.
  bool check_written(const std::vector<Operands>& calls, const std::vector<std::optional<ScalarType>>& computed) const {
    const std::vector<at::Tensor> outs = arguments_.written(/*operands=*/false);
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

  // Python decides which kinds of promotion describe the call; this leaves out calls that none describes.
  void report_cast(const Operands& operands, ScalarType computed) const {
    if (promotion_.options.lint != 0 && std::any_of(operands.begin(), operands.end(), [&](const Operand& operand) {
          return is_tensor(operand) ? operand.dtype != computed : promotion_.options.reports_numbers();
        })) {
      report(promotion_, innermost_promotion_region(), op_.name, operands, computed);
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
    const Scoped inside(tls_promotion.only, &kNoIntegers);
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

  // For an op on numbers alone, as `where(condition, 2.5, 1)`: calls the overload that takes tensors. If the rule has
  // no dtype for the numbers, PyTorch decides.
  Promoted run_on_tensors(const Operands& numbers) {
    const DtypeCode found = common_dtype(promotion_, numbers);
    if (promotion_.options.is_stock || found == kNoDtype) {
      return Promoted::as_it_was;
    }
    IValue* values = stack_.data() + (stack_.size() - op_.handle.schema().arguments().size());
    const auto options = at::TensorOptions(values->toTensor().device()).dtype(static_cast<ScalarType>(found));
    for (const Operand& number : numbers) {
      values[number.argument] = at::scalar_tensor(*number.scalar, options);
    }
    const Scoped inside(tls_promotion.only, &kNoIntegers);
    op_.functional->callBoxed(&stack_);
    return Promoted::done;
  }

  const PromotingOp& op_;
  const Promotion& promotion_;
  Stack& stack_;
  Arguments arguments_;
  std::vector<at::Tensor> written_ = arguments_.written(/*operands=*/true); // the caller's, uncast
};

} // namespace

void CompositeArguments::add(const at::Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    add(number_of_dtype(dtype));
    return;
  }
  DtypeCode& known = is_integral(dtype) ? integral_ : floating_;
  bool& one = is_integral(dtype) ? one_integral_ : one_floating_;
  one &= known == kNoDtype || known == to_code(dtype);
  known = to_code(dtype);
  if (is_integral(dtype)) {
    integers_.push_back(storage_of(tensor));
  }
}

bool CompositeArguments::have_one_dtype() const {
  if (!are_floating() && !are_integral()) {
    return true; // no tensors
  }
  const DtypeCode dtype = are_floating() ? floating_ : integral_;
  return (are_floating() ? one_floating_ : one_integral_) && !raises(number_, static_cast<ScalarType>(dtype));
}

const Integers& CompositeArguments::integers() const {
  return are_floating() ? integers_ : kNoIntegers;
}

bool acts_on_operands(const Operands& operands) {
  std::optional<CompositeArguments> caller;
  const Integers* only = tls_promotion.only;
  if (only == nullptr) {
    caller = python_caller();
    if (!caller.has_value() || !caller->have_one_dtype()) {
      return true;
    }
    if (caller->are_integral() && !have_several_dtypes(operands)) {
      return true; // the rule says which floating dtype integers become
    }
    only = &caller->integers();
  }
  return std::any_of(operands.begin(), operands.end(), [only](const Operand& operand) {
    return operand.tensor != nullptr &&
           std::find(only->begin(), only->end(), storage_of(*operand.tensor)) != only->end();
  });
}

InsideOp::InsideOp(const PromotingOp& op, const Stack& stack) {
  if (op.computes != Computes::composite) {
    scoped_.emplace(tls_promotion.only, &kNoIntegers);
    return;
  }
  if (tls_promotion.only != nullptr || !promotion_acts_here()) {
    return;
  }
  CompositeArguments arguments;
  const size_t count = op.handle.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    if (op.takes_part(i) || op.writes(i)) {
      add_to(arguments, stack[stack.size() - count + i]);
    }
  }
  if (op.participants == 0) {
    scoped_.emplace(tls_promotion.only, &kNoIntegers);
  } else if (arguments.have_one_dtype()) {
    integers_ = arguments.integers();
    scoped_.emplace(tls_promotion.only, integers_.empty() ? &kNoIntegers : &integers_);
  }
}

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

std::optional<c10::Scalar> Operand::value() const {
  if (scalar != nullptr) {
    return scalar->isSymbolic() || scalar->isBoolean() ? std::nullopt : std::optional(*scalar);
  }
  if (!number.has_value() || !is_readable(*tensor)) {
    return std::nullopt;
  }
  switch (dtype) {
    case c10::ScalarType::Long:
      return *tensor->const_data_ptr<int64_t>();
    case c10::ScalarType::Double:
      return *tensor->const_data_ptr<double>();
    case c10::ScalarType::ComplexDouble:
      return *tensor->const_data_ptr<c10::complex<double>>();
    default:
      return std::nullopt;
  }
}

bool promotion_acts_here() {
  return tls_promotion.only != &kNoIntegers && !inside_kernel() &&
         torch::autograd::get_current_graph_task_id() == tls_promotion.graph_task;
}

Promoted promote_call(const PromotingOp& op, const Promotion& promotion, Stack& stack) {
  if (op.computes == Computes::composite || !promotion_acts_here()) {
    return Promoted::as_it_was;
  }
  return Call(op, promotion, stack).run();
}

} // namespace torch_promote
