// file: an object that calls a function when its attribute is assigned
#include "python/bindings.h"

namespace py = pybind11;

namespace torch_promote {

namespace {

// NOTE [ After a compiled frame ]
// Dynamo traces the hooks of an optimizer's step. A call in a hook would become part of the graph, or break the graph.
// An assignment to an attribute does neither: Dynamo executes it after the graph, with an ordinary STORE_ATTR, once per
// attribute. Dynamo would trace into a property of a Python class, but not into the setter of a C type. So `stored`
// calls a function each time that a compiled frame with an assignment to it has run. It reads as None, except in a
// frame that Dynamo traces and that has assigned to it, where it reads as the assigned value.
struct CallOnStore {
  PyObject_HEAD PyObject* function;
};

int init_call_on_store(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"function", nullptr};
  PyObject* function = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", const_cast<char**>(names), &function)) {
    return -1;
  }
  Py_INCREF(function);
  Py_XSETREF(reinterpret_cast<CallOnStore*>(self)->function, function);
  return 0;
}

void destroy_call_on_store(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<CallOnStore*>(self)->function);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_stored(PyObject* /*self*/, void* /*closure*/) {
  Py_RETURN_NONE;
}

int set_stored(PyObject* self, PyObject* value, void* /*closure*/) {
  PyObject* function = reinterpret_cast<CallOnStore*>(self)->function;
  if (value == nullptr || function == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "CallOnStore.stored cannot be deleted, only assigned");
    return -1;
  }
  PyObject* result = PyObject_CallOneArg(function, value);
  Py_XDECREF(result);
  return result == nullptr ? -1 : 0;
}

PyGetSetDef kCallOnStoreAttributes[] = {
    {"stored", &get_stored, &set_stored, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

void add_call_on_store(py::module_& m) {
  static PyType_Slot slots[] = {
      {Py_tp_getset, kCallOnStoreAttributes},
      {Py_tp_init, reinterpret_cast<void*>(&init_call_on_store)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&destroy_call_on_store)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"torch_promote._C.CallOnStore", sizeof(CallOnStore), 0, Py_TPFLAGS_DEFAULT, slots};
  m.attr("CallOnStore") = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
}

} // namespace torch_promote
