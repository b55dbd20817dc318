// file: the dispatch observer, which shows an object in Python each call of an op before autocast casts its arguments
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace torch_promote {

// Makes an object this thread's observer, and returns the one before it; None for no observer.
pybind11::object swap_observer(pybind11::object observer);

// Registers the observer's kernel. It costs nothing before, and afterwards only in threads that include the key. Raises
// if another library has registered a fallback on the key.
void register_dispatch_observer();

// The key that a thread includes to have its calls observed.
std::string dispatch_observer_key();

} // namespace torch_promote
