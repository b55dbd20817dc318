// file: an object that calls a function when its attribute is assigned
#pragma once

#include <Python.h>

namespace torch_promote {

// Adds the class CallOnStore to the module. Returns false, with Python's error set, on failure.
bool add_call_on_store(PyObject* module);

} // namespace torch_promote
