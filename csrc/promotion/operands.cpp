// file: the operands of a call on the stack, and their common dtype under a promotion rule
#include "promotion/operands.h"

#include <algorithm>

namespace torch_promote {

namespace {

using c10::IValue;

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

// Whether the data of a wrapped number may be read.
bool is_readable(const at::Tensor& number) {
  constexpr c10::DispatchKeySet kOpaque(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::Functionalize});
  return number.is_cpu() && !number.key_set().has_any(kOpaque);
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

} // namespace

std::optional<int64_t> Operand::int_value() const {
  if (number != Number::integer || dtype != c10::ScalarType::Long) {
    return std::nullopt;
  }
  if (scalar != nullptr) {
    return scalar->isSymbolic() ? std::nullopt : std::optional<int64_t>(scalar->toLong());
  }
  return is_readable(*tensor) ? std::optional<int64_t>(*tensor->const_data_ptr<int64_t>()) : std::nullopt;
}

std::optional<c10::complex<double>> Operand::value() const {
  if (number != Number::floating && number != Number::complex) {
    return std::nullopt;
  }
  if (scalar != nullptr) {
    return scalar->isSymbolic() ? std::nullopt : std::optional<c10::complex<double>>(scalar->toComplexDouble());
  }
  if (is_readable(*tensor) && dtype == c10::ScalarType::Double) {
    return c10::complex<double>(*tensor->const_data_ptr<double>());
  }
  if (is_readable(*tensor) && dtype == c10::ScalarType::ComplexDouble) {
    return *tensor->const_data_ptr<c10::complex<double>>();
  }
  return std::nullopt;
}

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

PromotedArguments::PromotedArguments(const PromotingOp& op, torch::jit::Stack& stack)
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

std::vector<Operands> PromotedArguments::calls() const {
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

std::vector<at::Tensor> PromotedArguments::outs() const {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < count_; ++i) {
    if (op_.writes(i) && !op_.takes_part(i)) {
      result.insert(result.end(), parts_[i].tensors.begin(), parts_[i].tensors.end());
    }
  }
  return result;
}

std::vector<at::Tensor> PromotedArguments::written_operands() const {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < count_; ++i) {
    if (op_.writes(i) && op_.takes_part(i)) {
      result.insert(result.end(), parts_[i].tensors.begin(), parts_[i].tensors.end());
    }
  }
  return result;
}

void PromotedArguments::put(const Operand& operand, const at::Tensor& tensor) {
  parts_[operand.argument].tensors[operand.element] = tensor;
  parts_[operand.argument].changed = true;
}

void PromotedArguments::put(const Operand& operand, const c10::Scalar& scalar) {
  parts_[operand.argument].scalars[operand.element] = scalar;
  parts_[operand.argument].changed = true;
}

void PromotedArguments::write_back() {
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

void PromotedArguments::read(size_t argument) {
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

size_t PromotedArguments::steps() const {
  const auto list = std::find_if(parts_.begin(), parts_.end(), [](const Part& part) { return part.is_list; });
  return list != parts_.end() ? list->size() : 0;
}

void PromotedArguments::add(size_t argument, size_t element, Operands& to) const {
  const Part& part = parts_[argument];
  if (element >= part.size()) {
    return; // lists of different lengths: the op raises
  }
  to.push_back(part.scalars.empty() ? operand_of(part.tensors[element]) : operand_of(part.scalars[element]));
  to.back().argument = argument;
  to.back().element = element;
  to.back().written = op_.writes(argument);
}

} // namespace torch_promote
