// file: the callbacks of promotion/rule.h, which call hooks in Python
#include "python/promotion_hooks.h"

#include "promotion/call.h"
#include "python/python_call.h"
#include "region/promotion_state.h"

#include <pybind11/complex.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/DynamicTypes.h>

#include <complex>
#include <string>

namespace py = pybind11;

namespace torch_promote {

namespace {

PyObject* promotion_hooks = nullptr; // never released

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

py::object value_of(const Operand& operand) {
  if (const auto value = operand.int_value(); value.has_value()) {
    return py::int_(*value);
  }
  const auto value = operand.value();
  if (!value.has_value()) {
    return py::none();
  }
  return *operand.number == Number::complex ? py::cast(static_cast<std::complex<double>>(*value))
                                            : py::object(py::float_(value->real()));
}

// (dtype, sizes, the type of the number or -1, its value or None)
py::object to_python(const Operand& operand) {
  const py::object sizes = operand.tensor != nullptr ? to_python(operand.tensor->sym_sizes()) : py::tuple();
  const int number = operand.number.has_value() ? static_cast<int>(*operand.number) : -1;
  return py::make_tuple(to_python(operand.dtype), sizes, number, value_of(operand));
}

py::list to_python(const Operands& operands) {
  py::list result;
  for (const Operand& operand : operands) {
    result.append(to_python(operand));
  }
  return result;
}

// Calls a hook. The rule does not act on ops that the hook calls.
template <class... Args>
py::object call_hook(const char* name, const Promotion& promotion, const Args&... args) {
  const InsidePromoted inside;
  return py::handle(promotion_hooks).attr(name)(promotion.number, args...);
}

const PromotionCallbacks kPromotionCallbacks = {
    .put_tables =
        [](const Promotion& promotion, c10::ScalarType default_dtype) {
          in_python([&] { call_hook("put_tables", promotion, to_python(default_dtype)); });
        },
    .common_dtype =
        [](const Promotion& promotion, uint64_t dtypes) {
          return in_python([&] {
            py::list given;
            for (size_t code = 0; code < kDtypes; ++code) {
              if ((dtypes >> code & 1) != 0) {
                given.append(to_python(static_cast<c10::ScalarType>(code)));
              }
            }
            return static_cast<int8_t>(call_hook("common", promotion, given).cast<int>());
          });
        },
    .refuse_operands =
        [](const Promotion& promotion, const std::string& op, const Operands& operands, bool floats) {
          in_python([&] { call_hook("refuse_operands", promotion, op, to_python(operands), floats); });
        }, // GCOVR_EXCL_LINE: the callback raises
    .refuse_to_write =
        [](const Promotion& promotion,
           const std::string& op,
           const Operands& operands,
           c10::ScalarType computed,
           c10::ScalarType written) {
          in_python([&] {
            call_hook("refuse_to_write", promotion, op, to_python(operands), to_python(computed), to_python(written));
          }); // GCOVR_EXCL_LINE: the callback raises
        },    // GCOVR_EXCL_LINE: as above
    .report =
        [](const Promotion& promotion,
           const void* region,
           const std::string& op,
           const Operands& operands,
           c10::ScalarType computed) {
          in_python([&] {
            call_hook(
                "report", promotion, reinterpret_cast<uintptr_t>(region), op, to_python(operands), to_python(computed));
          });
        },
};

// At import: later, another thread may be reading them.
[[maybe_unused]] const bool promotion_callbacks_set_at_import = (promotion_callbacks = kPromotionCallbacks, true);

} // namespace

void set_promotion_hooks(py::object hooks) {
  promotion_hooks = hooks.release().ptr();
}

} // namespace torch_promote
