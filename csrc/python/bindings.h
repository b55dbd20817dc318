// file: what the bindings of torch_promote._C consist of
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace torch_promote {

// Adds the class RegionBase and the functions of regions; see region_bindings.cpp.
void add_regions(pybind11::module_& m);

// Adds the class CallOnStore; see NOTE [ After a compiled frame ].
void add_call_on_store(pybind11::module_& m);

// Adds the functions that measure tensors; see NOTE [ Digest and sketch ].
void add_measure(pybind11::module_& m);

// Adds the functions of the dispatch observer; see NOTE [ The observer's key ].
void add_observer(pybind11::module_& m);

// Disables __torch_function__, of subclasses and of modes, as long as it lives.
class NoTorchFunction {
 public:
  NoTorchFunction() {
    TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  NoTorchFunction(const NoTorchFunction&) = delete;
  NoTorchFunction& operator=(const NoTorchFunction&) = delete;
  ~NoTorchFunction() {
    TLS::set_disabled_state(before_);
  }

 private:
  using TLS = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState before_ = TLS::get_disabled_state();
};

// Calls a function with the GIL. The autograd engine may pass a Python error to another thread, so it must not stay in
// this thread's error indicator.
template <class Function>
auto in_python(const Function& function) {
  const pybind11::gil_scoped_acquire gil;
  try {
    return function();
  } catch (pybind11::error_already_set& error) {
    error.restore();
    python_error thrown;
    thrown.persist();
    throw std::move(thrown);
  }
}

} // namespace torch_promote
