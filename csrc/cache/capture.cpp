// file: which CUDA graph is being captured
#include <Python.h>

#include "cache/capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

namespace torch_promote {

namespace {

std::atomic<uint64_t> captures_begun{0};
PyObject* capture_query = nullptr; // never released: the extension stays loaded

bool ask_python() {
  if (capture_query == nullptr || Py_IsInitialized() == 0) {
    return false;
  }
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* const answer = PyObject_CallNoArgs(capture_query);
  const bool capturing = answer == Py_True;
  Py_XDECREF(answer);
  PyErr_Clear();
  PyGILState_Release(gil);
  return capturing;
}

template <class Guard>
bool is_capturing(const Guard& guard, c10::Device device) {
  if constexpr (requires { guard.isStreamCapturing(guard.getStream(device)); }) {
    return guard.isStreamCapturing(guard.getStream(device));
  } else {
    return ask_python();
  }
}

} // namespace

uint64_t capture_on_cuda(const Source& source) {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
    return 0; // a fake tensor in a build without CUDA
  }
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  // A tensor that is not plain may compute its device in Python.
  const c10::Device device = source.plain ? source.impl.device() : guard.getDevice();
  return is_capturing(guard, device) ? 1 + captures_begun.load(std::memory_order_relaxed) : 0;
}

void note_capture() {
  captures_begun.fetch_add(1, std::memory_order_relaxed);
}

void set_capture_query(PyObject* function) {
  capture_query = function;
}

} // namespace torch_promote
