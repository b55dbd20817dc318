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

enum class Answer : uint8_t { yes, no, interrupted };

// Whether a function returns True. Its errors are only reported, except for a KeyboardInterrupt: the program gets that
// as soon as Python runs again.
Answer call_python(PyObject* function) {
  if (function == nullptr || function == Py_None || Py_IsInitialized() == 0) {
    return Answer::no; // GCOVR_EXCL_LINE: there is nothing to ask, or Python has ended
  }
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *kind, *error, *trace; // of the program: a region may end while it propagates
  PyErr_Fetch(&kind, &error, &trace);
  PyObject* const answer = PyObject_CallNoArgs(function);
  Answer result = answer == Py_True ? Answer::yes : Answer::no;
  if (answer == nullptr && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    result = Answer::interrupted;
    PyErr_Clear();
    PyErr_SetInterrupt();
  } else if (answer == nullptr) {
    PyErr_WriteUnraisable(function);
  }
  Py_XDECREF(answer);
  PyErr_Restore(kind, error, trace);
  PyGILState_Release(gil);
  return result;
}

template <class Guard>
bool is_capturing(const Guard& guard, c10::Device device) {
  if constexpr (requires { guard.isStreamCapturing(guard.getStream(device)); }) {
    return guard.isStreamCapturing(guard.getStream(device));
  } else {
    return call_python(ask_is_capturing) == Answer::yes;
  }
}

} // namespace

bool is_captured(const Source& source) {
  if (!source.impl.key_set().has_backend(c10::BackendComponent::CUDABit) ||
      !c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
    return false; // among others, a fake tensor in a build without CUDA
  }
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  // A tensor that is not plain may compute its device in Python.
  const c10::Device device = source.plain ? source.impl.device() : guard.getDevice();
  return is_capturing(guard, device);
}

uint64_t capture_on_cuda(const Source& source) {
  if (!is_captured(source)) {
    return 0;
  }
  if (!captures_are_counted.exchange(true)) {
    captures_are_counted = call_python(on_first_capture) != Answer::interrupted;
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
