// file: the operands of a call on the stack, which may lie in lists
#include "promotion/arguments.h"

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

} // namespace

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
  for (const Part& part : parts_) {
    if (part.is_list) {
      return part.size();
    }
  }
  return 0;
}

void PromotedArguments::add(size_t argument, size_t element, Operands& to) const {
  const Part& part = parts_[argument];
  if (element >= part.size()) {
    return; // lists of different lengths, of which the op complains
  }
  to.push_back(part.scalars.empty() ? operand_of(part.tensors[element]) : operand_of(part.scalars[element]));
  to.back().argument = argument;
  to.back().element = element;
  to.back().written = op_.writes(argument);
}

} // namespace torch_promote
