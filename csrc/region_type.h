// file: the class my_autocast in C: what it calls at every region, and short ways through its plainest uses
#pragma once

#include <Python.h>

namespace torch_promote {

// What enter_region and exit_region tell Python to look at besides; 0 nearly always.
constexpr long kTorchFunctionMode = 1;
constexpr long kRunningLoop = 2;

// Adds the functions to the module. False, with Python's error set, if it cannot.
bool add_region_functions(PyObject* module);

} // namespace torch_promote
