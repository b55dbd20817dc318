// file: the tap, which shows an observer in Python each call of an op before autocast has its turn
#pragma once

#include <string>

namespace torch_promote {

// Where a thread's observer is found: under this name in at::impl::ThreadLocalPythonObjects, which autograd hands on to
// the threads that run a backward. None, or no such name: nobody observes.
extern const char* const kObserverName;

// Registers the tap's kernel. Until then it costs nothing, and afterwards only where the key is included. Raises if
// some other library has a fallback on the key.
void register_tap();

// The key that has to be included in a thread for calls to pass through the tap.
std::string tap_key_name();

} // namespace torch_promote
