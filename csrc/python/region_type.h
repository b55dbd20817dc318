// file: short ways in C through the plainest uses of the class my_autocast
#pragma once

#include <Python.h>

namespace torch_promote {

// Adds take_short_ways to the module. False, with Python's error set, if it cannot.
bool add_short_ways(PyObject* module);

} // namespace torch_promote
