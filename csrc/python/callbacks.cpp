// file: the callbacks of cache/check.h and promotion/rule.h, which call hooks in Python

#include "cache/check.h"
#include "promotion/call.h"
#include "python/bindings.h"
#include "region/current_policy.h"

#include <pybind11/complex.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <complex>
#include <string>
#include <vector>

namespace py = pybind11;

namespace torch_promote {

namespace {

PyObject* cast_check_hooks = nullptr; // never released

// Disables Dynamo in this thread while it exists. A program that runs compiled code may use a cached cast between two
// graphs, and Dynamo would then compile the hooks.
class NotCompiled {
 public:
  NotCompiled()
      : set_(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")), before_(set_(py::none())) {}
  ~NotCompiled() {
    const py::error_scope error; // the hook's
    try {
      set_(before_);
    } catch (const py::error_already_set&) { // GCOVR_EXCL_LINE: cannot happen, the callback was valid before
    }
  }
  NotCompiled(const NotCompiled&) = delete;
  NotCompiled& operator=(const NotCompiled&) = delete;

 private:
  py::object set_;
  py::object before_;
};

template <class... Args>
py::object call_cast_check_hook(const char* name, const Args&... args) {
  const NotCompiled not_compiled;
  return py::handle(cast_check_hooks).attr(name)(args...);
}

const CastCheckCallbacks kCastCheckCallbacks = {
    .calling_line =
        [] { return in_python([] { return call_cast_check_hook("line_of_this_thread").cast<std::string>(); }); },
    .parts =
        [](const at::Tensor& wrapper) {
          return in_python([&] { return call_cast_check_hook("parts_of", wrapper).cast<std::vector<at::Tensor>>(); });
        },
    .raise =
        [](const at::Tensor& source,
           const at::Tensor& kept,
           const at::Tensor& fresh,
           const char* mode,
           const std::string& first_line) {
          in_python([&] { call_cast_check_hook("raise_stale", source, kept, fresh, mode, first_line); });
        }, // GCOVR_EXCL_LINE: the callback raises
};

// At import: later, a thread that checks may be reading them.
[[maybe_unused]] const bool cast_check_callbacks_set_at_import = (cast_check_callbacks = kCastCheckCallbacks, true);

} // namespace

void set_cast_check_hooks(py::object hooks) {
  if (cast_check_hooks == nullptr) {
    cast_check_hooks = hooks.release().ptr();
  }
}

} // namespace torch_promote

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
