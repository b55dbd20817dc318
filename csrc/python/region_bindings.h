// file: plain C functions that enter and leave regions for Python, without pybind11's argument conversion
#pragma once

#include <Python.h>

namespace torch_promote {

// Adds enter_region, exit_region and pack_plain_region to the module. Returns false, with Python's error set, on
// failure.
bool add_region_functions(PyObject* module);

} // namespace torch_promote
