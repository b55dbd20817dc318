// file: the callbacks of cache/check.h, which call hooks in Python
#include "python/cast_check_hooks.h"

#include "cache/check.h"
#include "python/python_call.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

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
