// file: what promotion asks of Python, off the fast path: errors, reports, and answers that tables do not have
#include "python/promotion_hooks.h"

#include "promotion/state.h"
#include "python/python_call.h"

#include <c10/util/Exception.h>
#include <torch/csrc/DynamicTypes.h>

#include <utility>

namespace py = pybind11;

namespace torch_promote {

namespace {

PyObject* hooks = nullptr; // kept for good

py::object to_python(c10::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

py::object to_python(const c10::SymIntArrayRef sizes) {
  py::list result;
  for (const c10::SymInt& size : sizes) {
    const auto known = size.maybe_as_int();
    result.append(known.has_value() ? py::object(py::int_(*known)) : py::object(py::str("?")));
  }
  return py::tuple(result);
}

// (dtype, sizes, the type of number or -1, the value of a number where it is known)
py::object to_python(const Operand& operand) {
  const py::object sizes = operand.tensor != nullptr ? to_python(operand.tensor->sym_sizes()) : py::tuple();
  const int number = operand.number.has_value() ? static_cast<int>(*operand.number) : -1;
  const auto value = operand.int_value();
  return py::make_tuple(
      to_python(operand.dtype), sizes, number, value.has_value() ? py::object(py::int_(*value)) : py::none());
}

py::list to_python(const Operands& operands) {
  py::list result;
  for (const Operand& operand : operands) {
    result.append(to_python(operand));
  }
  return result;
}

// Ops of the hooks' own are not promoted.
template <class... Args>
py::object ask(const char* name, const Args&... args) {
  TORCH_CHECK(hooks != nullptr, "torch_promote: nobody answers for promotion rules");
  const InsidePromoted inside;
  return py::handle(hooks).attr(name)(args...);
}

} // namespace

std::optional<int64_t> Operand::int_value() const {
  if (number != Number::integer || dtype != c10::ScalarType::Long) {
    return std::nullopt;
  }
  if (scalar != nullptr) {
    return scalar->isSymbolic() ? std::nullopt : std::optional<int64_t>(scalar->toLong());
  }
  constexpr c10::DispatchKeySet kOpaque(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::Functionalize});
  if (!tensor->is_cpu() || tensor->key_set().has_any(kOpaque)) {
    return std::nullopt;
  }
  return *tensor->const_data_ptr<int64_t>();
}

void set_promotion_hooks(py::object object) {
  hooks = object.release().ptr();
}

void ask_python_for_tables(uint32_t promotion, c10::ScalarType default_dtype) {
  in_python([&] { ask("put_tables", promotion, to_python(default_dtype)); });
}

DtypeCode ask_python_for_common(uint32_t promotion, uint64_t dtypes) {
  return in_python([&] {
    py::list given;
    for (size_t code = 0; code < kDtypes; ++code) {
      if ((dtypes >> code & 1) != 0) {
        given.append(to_python(static_cast<c10::ScalarType>(code)));
      }
    }
    return static_cast<DtypeCode>(ask("common", promotion, given).cast<int>());
  });
}

void refuse_operands(const Promotion& promotion, const std::string& op, const Operands& operands, bool floats) {
  in_python([&] { ask("refuse_operands", promotion.number, op, to_python(operands), floats); });
  TORCH_CHECK(false, op, ": the operands have no common dtype under the rule '", promotion.name, "'.");
}

void refuse_to_write(
    const Promotion& promotion,
    const std::string& op,
    const Operands& operands,
    c10::ScalarType computed,
    c10::ScalarType written) {
  in_python([&] {
    ask("refuse_to_write", promotion.number, op, to_python(operands), to_python(computed), to_python(written));
  });
  TORCH_CHECK(false, op, ": ", computed, " is not written to ", written, " under the rule '", promotion.name, "'.");
}

void report_promotion(
    const Promotion& promotion,
    const void* region,
    const std::string& op,
    const Operands& operands,
    c10::ScalarType result,
    LintKind kind) {
  in_python([&] {
    ask("report", promotion.number, reinterpret_cast<uintptr_t>(region), op, to_python(operands), to_python(result),
        static_cast<int>(kind));
  });
}

} // namespace torch_promote
