// file: the tap, which shows an observer in Python each call of an op before autocast has its turn
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace torch_promote {

// Makes an object this thread's observer, and returns the one before it. None means that nobody observes.
pybind11::object swap_observer(pybind11::object observer);

// Registers the tap's kernel. Until then it costs nothing, and afterwards only where the key is included. Raises if
// some other library has a fallback on the key.
void register_tap();

// The key that has to be included in a thread for calls to pass through the tap.
std::string tap_key_name();

} // namespace torch_promote
