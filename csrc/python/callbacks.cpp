// file: the calls of Python that cache/check.h, dispatch/kernels.h and promotion/rule.h declare

#include "cache/check.h"
#include "dispatch/kernels.h"
#include "policy/process.h"
#include "promotion/call.h"
#include "python/bindings.h"

#include <c10/util/ScopeExit.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <vector>

namespace py = pybind11;

namespace torch_promote {

namespace {

// One of our modules, imported by the first call and never released.
struct Module {
  const char* name;
  PyObject* module = nullptr;

  py::object attr(const char* attribute) {
    if (module == nullptr) {
      module = py::module_::import(name).release().ptr();
    }
    return py::handle(module).attr(attribute);
  }
};

Module cast_check_hooks{"torch_promote.checking.check_casts"};
Module promotion_module{"torch_promote.regions.promotion"};
Module promotion_tables{"torch_promote.regions.promotion_tables"};
Module float8{"torch_promote.regions.float8"};

// Calls a hook with Dynamo disabled in this thread. A program that runs compiled code may use a cached cast between two
// graphs, and Dynamo would then compile the hooks.
template <class Result, class... Args>
Result call_cast_check_hook(const char* name, const Args&... args) {
  return in_python([&] {
    const py::object set = py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame");
    const py::object before = set(py::none());
    const auto restore = c10::make_scope_exit([&] {
      const py::error_scope error; // the hook's
      set(before);
    });
    return cast_check_hooks.attr(name)(args...).template cast<Result>();
  });
}

template <class Value>
py::object to_python(const Value& value) {
  return py::cast(value);
}

py::object to_python(const c10::SymIntArrayRef& sizes) {
  py::list result;
  for (const c10::SymInt& size : sizes) {
    const auto known = size.maybe_as_int();
    result.append(known.has_value() ? py::object(py::int_(*known)) : py::object(py::str("?")));
  }
  return py::tuple(result);
}

// For each: (dtype, sizes, the type of the number or -1, its value or None).
py::object to_python(const Operands& operands) {
  py::list result;
  for (const Operand& operand : operands) {
    const py::object sizes = operand.tensor != nullptr ? to_python(operand.tensor->sym_sizes()) : py::tuple();
    const int number = operand.number.has_value() ? static_cast<int>(*operand.number) : -1;
    result.append(py::make_tuple(operand.dtype, sizes, number, to_python(operand.value())));
  }
  return result;
}

// Calls a hook. The rule does not act on ops that the hook calls.
template <class Result, class... Args>
Result call_promotion_hook(Module& module, const char* name, const Promotion& promotion, const Args&... args) {
  return in_python([&] {
    const Scoped inside(tls_promotion.only, &kNoIntegers);
    return module.attr(name)(promotion.number, to_python(args)...).template cast<Result>();
  });
}

} // namespace

std::string calling_line() {
  return call_cast_check_hook<std::string>("line_of_this_thread");
}

std::vector<at::Tensor> parts_of(const at::Tensor& wrapper) {
  return call_cast_check_hook<std::vector<at::Tensor>>("parts_of", wrapper);
}

void raise_stale_cast(
    const at::Tensor& source,
    const at::Tensor& kept,
    const at::Tensor& fresh,
    const char* mode,
    const std::string& first_line) {
  call_cast_check_hook<void>("raise_stale", source, kept, fresh, mode, first_line);
}

std::optional<at::Tensor> linear_in_float8(
    PolicyByte policy,
    at::ScalarType lower,
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  return in_python([&] {
    const NoTorchFunction no_modes;
    return float8.attr("linear")(policy, lower, input, weight, bias).template cast<std::optional<at::Tensor>>();
  });
}

std::optional<CompositeArguments> python_caller() {
  return in_python([]() -> std::optional<CompositeArguments> {
    // Most calls are the user's, which the file of the innermost frame shows without a call of Python.
    const auto frame =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
    if (!frame) {
      return std::nullopt;
    }
    const auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
    const py::object file = code.attr("co_filename");
    const py::tuple folders = promotion_tables.attr("folders");
    if (std::none_of(
            folders.begin(), folders.end(),
            [&](const py::handle& folder) {
              return PyUnicode_Tailmatch(file.ptr(), folder.ptr(), 0, PY_SSIZE_T_MAX, /*direction=*/-1) == 1;
            }) &&
        !py::str(code.attr("co_name")).equal(py::str("__torch_function__"))) { // it passes on what others call
      return std::nullopt;
    }
    const Scoped inside(tls_promotion.only, &kNoIntegers);
    const py::object given = promotion_tables.attr("caller")();
    if (given.is_none()) {
      return std::nullopt;
    }
    CompositeArguments arguments;
    for (const py::handle value : given) {
      if (THPVariable_Check(value.ptr())) {
        arguments.add(THPVariable_Unpack(value.ptr()));
      } else {
        arguments.add(
            PyComplex_Check(value.ptr()) ? Number::complex
            : PyFloat_Check(value.ptr()) ? Number::floating
                                         : Number::boolean);
      }
    }
    return arguments;
  });
}

void ask_for_tables(const Promotion& promotion, c10::ScalarType default_dtype) {
  call_promotion_hook<void>(promotion_tables, "put_tables", promotion, default_dtype);
}

DtypeCode ask_for_common_dtype(const Promotion& promotion, uint64_t dtypes) {
  std::vector<c10::ScalarType> given;
  for (size_t code = 0; code < kDtypes; ++code) {
    if ((dtypes >> code & 1) != 0) {
      given.push_back(static_cast<c10::ScalarType>(code));
    }
  }
  return static_cast<DtypeCode>(call_promotion_hook<int>(promotion_tables, "common", promotion, given));
}

void refuse_operands(const Promotion& promotion, const std::string& op, const Operands& operands, bool floats) {
  call_promotion_hook<void>(promotion_tables, "refuse_operands", promotion, op, operands, floats);
}

void refuse_to_write(
    const Promotion& promotion,
    const std::string& op,
    const Operands& operands,
    c10::ScalarType computed,
    c10::ScalarType written) {
  call_promotion_hook<void>(promotion_tables, "refuse_to_write", promotion, op, operands, computed, written);
}

void report(
    const Promotion& promotion,
    const void* region,
    const std::string& op,
    const Operands& operands,
    c10::ScalarType computed) {
  call_promotion_hook<void>(
      promotion_module, "report", promotion, reinterpret_cast<uintptr_t>(region), op, operands, computed);
}

} // namespace torch_promote
