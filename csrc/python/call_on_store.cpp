// file: an object that calls a function when its attribute is assigned
#include "python/call_on_store.h"

namespace torch_promote {
namespace {

// NOTE [ After a compiled frame ]
// Dynamo traces the hooks of an optimizer's step. A call in them would become part of the graph, or break it. An
// assignment to an attribute becomes neither: Dynamo carries it out after the graph, by an ordinary STORE_ATTR, once
// for each attribute. In a class written in Python it would trace what the assignment calls; the setter of a C type it
// leaves alone. So `stored` calls a function each time that a compiled frame which assigned to it has run. It reads as
// None, except within a frame that Dynamo traces and that has assigned to it: there it reads as what was assigned.
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
    PyErr_SetString(PyExc_AttributeError, "CallOnStore.stored can be assigned, and not deleted");
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

template <class Function>
void* as_slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

} // namespace

bool add_call_on_store(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_getset, kCallOnStoreAttributes},
      {Py_tp_init, as_slot(&init_call_on_store)},
      {Py_tp_dealloc, as_slot(&destroy_call_on_store)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"torch_promote._C.CallOnStore", sizeof(CallOnStore), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  return type != nullptr && PyModule_AddObject(module, "CallOnStore", type) == 0; // takes the reference
}

} // namespace torch_promote
