// file: the dispatch observer: passes each call of an op to a Python object before autocast casts its arguments
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace torch_promote {

// Sets this thread's observer and returns the previous one; None stands for no observer.
pybind11::object swap_observer(pybind11::object observer);

// Registers the observer's kernel, which adds cost only in threads that include the key. Raises if another library has
// registered a fallback on the key.
void register_dispatch_observer();

// The dispatch key that a thread includes to observe its calls.
std::string dispatch_observer_key();

} // namespace torch_promote
