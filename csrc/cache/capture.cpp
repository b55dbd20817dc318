// file: which CUDA graph is being captured
#include <Python.h>

#include "cache/capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstdint>

namespace torch_promote {

namespace {

std::atomic<uint64_t> captures_begun{0};
std::atomic<bool> captures_are_counted{false};
// Never released: the extension stays loaded.
PyObject* ask_is_capturing = nullptr;
PyObject* on_first_capture = nullptr;

// Whether a function returns True. Its errors are only reported.
bool call_python(PyObject* function) {
  if (function == nullptr || function == Py_None || Py_IsInitialized() == 0) {
    return false; // GCOVR_EXCL_LINE: there is nothing to ask, or Python has ended
  }
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *kind, *error, *trace; // of the program: a region may end while it propagates
  PyErr_Fetch(&kind, &error, &trace);
  PyObject* const answer = PyObject_CallNoArgs(function);
  if (answer == nullptr) {
    PyErr_WriteUnraisable(function);
  }
  Py_XDECREF(answer);
  PyErr_Restore(kind, error, trace);
  PyGILState_Release(gil);
  return answer == Py_True;
}

template <class Guard>
bool is_capturing(const Guard& guard, c10::Device device) {
  if constexpr (requires { guard.isStreamCapturing(guard.getStream(device)); }) {
    return guard.isStreamCapturing(guard.getStream(device));
  } else {
    return call_python(ask_is_capturing);
  }
}

} // namespace

uint64_t capture_on_cuda(const Source& source) {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
    return 0; // a fake tensor in a build without CUDA, among others
  }
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  // A tensor that is not plain may compute its device in Python.
  if (!is_capturing(guard, source.plain ? source.impl.device() : guard.getDevice())) {
    return 0;
  }
  if (!captures_are_counted.exchange(true)) {
    call_python(on_first_capture);
  }
  return 1 + captures_begun.load(std::memory_order_relaxed);
}

void note_capture() {
  captures_begun.fetch_add(1, std::memory_order_relaxed);
}

void set_capture_functions(PyObject* is_capturing, PyObject* on_first) {
  ask_is_capturing = is_capturing;
  on_first_capture = on_first;
}

} // namespace torch_promote
