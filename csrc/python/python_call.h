// file: calls Python from a kernel, in any thread
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace torch_promote {

// Throws a Python error through C++. The autograd engine may pass it to another thread, so it must not stay in this
// thread's error indicator.
[[noreturn]] inline void throw_python_error(pybind11::error_already_set& error) {
  error.restore();
  python_error thrown;
  thrown.persist();
  throw std::move(thrown);
}

template <class Function>
auto in_python(const Function& function) {
  const pybind11::gil_scoped_acquire gil;
  try {
    return function();
  } catch (pybind11::error_already_set& error) {
    throw_python_error(error);
  }
}

} // namespace torch_promote
