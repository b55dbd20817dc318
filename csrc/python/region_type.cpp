// file: short ways in C through the plainest uses of the class my_autocast
#include "python/region_type.h"

#include "python/region_bindings.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace torch_promote {
namespace {

// NOTE [ Short ways ]
// my_autocast is a Python class, and what its methods say is what holds: Dynamo traces them, and people subclass it.
// But Python's frames cost more than a region does. So the class and two of its methods are given other vectorcall
// functions, the place where CPython lets a C function stand in for a Python one (PyFunction_SetVectorcall). Each looks
// whether the case is the plainest, does then what the Python code would do, and calls the Python code otherwise: for
// other arguments, under torch.export, in an event loop, and for every error.
struct ShortWays {
  PyTypeObject* type; // my_autocast; all of these are kept for good
  PyObject* init;
  Py_ssize_t spec;      // where an object has _spec,
  Py_ssize_t arguments; // and _arguments
  vectorcallfunc long_enter;
  vectorcallfunc long_exit;
  std::array<PyObject*, 4> parameters;
  PyObject* init_name;
};

ShortWays ways{};

PyObject*& attribute(PyObject* region, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(region) + offset);
}

// my_autocast.__enter__(self)
PyObject* short_enter(PyObject* function, PyObject* const* args, size_t count, PyObject* keywords) {
  if (PyVectorcall_NARGS(count) == 1 && keywords == nullptr && PyObject_TypeCheck(args[0], ways.type) &&
      !at::impl::torch_function_mode_enabled()) {
    PyObject* text = attribute(args[0], ways.spec);
    const std::optional<RegionSpec> spec = text != nullptr ? parse_spec(text) : std::nullopt;
    const std::optional<bool> loop = loop_runs();
    if (!loop.has_value()) {
      return nullptr;
    }
    if (spec.has_value() && !*loop) {
      if (!enter_or_raise(args[0], *spec)) {
        return nullptr;
      }
      Py_INCREF(args[0]);
      return args[0];
    }
  }
  return ways.long_enter(function, args, count, keywords);
}

// my_autocast.__exit__(self, kind, value, traceback)
PyObject* short_exit(PyObject* function, PyObject* const* args, size_t count, PyObject* keywords) {
  if (PyVectorcall_NARGS(count) == 4 && keywords == nullptr && PyObject_TypeCheck(args[0], ways.type) &&
      !at::impl::torch_function_mode_enabled()) {
    const std::optional<bool> open = exit_or_raise(args[0]);
    if (!open.has_value()) {
      return nullptr;
    }
    if (*open) {
      Py_RETURN_NONE;
    }
  }
  return ways.long_exit(function, args, count, keywords);
}

// False if there are arguments that the plainest region does not have.
bool read_arguments(PlainArguments& result, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  if (count > static_cast<Py_ssize_t>(result.size())) {
    return false;
  }
  result = {nullptr, Py_None, Py_True, Py_None};
  std::copy(args, args + count, result.begin());
  const Py_ssize_t number = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < number; ++i) {
    // Names in code are interned; another way to spell one takes the long way.
    const auto known = std::find(ways.parameters.begin(), ways.parameters.end(), PyTuple_GET_ITEM(keywords, i));
    const Py_ssize_t position = known - ways.parameters.begin();
    if (known == ways.parameters.end() || position < count) {
      return false;
    }
    result[static_cast<size_t>(position)] = args[count + i];
  }
  return result[0] != nullptr;
}

// Gives a new region its attributes; regions made alike, one after the other, share them. False, with Python's error
// set, if there is no memory.
bool fill(PyObject* region, const PlainArguments& given, uint64_t packed) {
  static uint64_t last = 0;
  static PyObject* spec = nullptr;
  static PyObject* arguments = nullptr; // autocast.py, my_autocast._arguments
  if (last != packed || arguments == nullptr ||
      !std::equal(given.begin(), given.end(), &PyTuple_GET_ITEM(arguments, 0))) {
    PyObject* new_spec = spell_spec(packed);
    PyObject* new_arguments =
        PyTuple_Pack(7, given[0], given[1], given[2], given[3], Py_None, Py_None, Py_None); // cache, policy, overrides
    if (new_spec == nullptr || new_arguments == nullptr) {
      Py_XDECREF(new_spec);
      Py_XDECREF(new_arguments);
      return false;
    }
    last = packed;
    Py_XDECREF(std::exchange(spec, new_spec));
    Py_XDECREF(std::exchange(arguments, new_arguments));
  }
  // What could make another region in between, and change these, is Python code, which nothing here runs any more.
  Py_INCREF(spec);
  Py_INCREF(arguments);
  attribute(region, ways.spec) = spec;
  attribute(region, ways.arguments) = arguments;
  return true;
}

PyObject* call_as_ever(PyObject* type, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  PyObject* result = nullptr;
  PyObject* positional = PyTuple_New(count);
  PyObject* named = keywords != nullptr ? PyDict_New() : nullptr;
  bool good = positional != nullptr && (keywords == nullptr || named != nullptr);
  for (Py_ssize_t i = 0; good && i < count; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(positional, i, args[i]);
  }
  for (Py_ssize_t i = 0; good && keywords != nullptr && i < PyTuple_GET_SIZE(keywords); ++i) {
    good = PyDict_SetItem(named, PyTuple_GET_ITEM(keywords, i), args[count + i]) == 0;
  }
  if (good) {
    result = PyType_Type.tp_call(type, positional, named);
  }
  Py_XDECREF(positional);
  Py_XDECREF(named);
  return result;
}

// my_autocast(...); a subclass is made as ever.
PyObject* short_make(PyObject* type, PyObject* const* args, size_t count, PyObject* keywords) {
  const Py_ssize_t positional = PyVectorcall_NARGS(count);
  PlainArguments given;
  if (read_arguments(given, args, positional, keywords) && _PyType_Lookup(ways.type, ways.init_name) == ways.init) {
    if (const std::optional<uint64_t> packed = pack_plain(given)) {
      PyObject* region = ways.type->tp_alloc(ways.type, 0);
      if (region != nullptr && !fill(region, given, *packed)) {
        Py_CLEAR(region);
      }
      return region;
    }
  }
  return call_as_ever(type, args, positional, keywords);
}

// Where the objects of a class have an attribute of its __slots__; -1, with Python's error set, if they do not.
Py_ssize_t offset_of(PyTypeObject* type, const char* name) {
  PyObject* slot = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (slot == nullptr) {
    return -1;
  }
  const bool is_slot = Py_IS_TYPE(slot, &PyMemberDescr_Type);
  const Py_ssize_t result = is_slot ? reinterpret_cast<PyMemberDescrObject*>(slot)->d_member->offset : -1;
  Py_DECREF(slot);
  if (!is_slot) {
    PyErr_Format(PyExc_TypeError, "%s is not in __slots__", name);
  }
  return result;
}

// Gives a Python method another vectorcall function, and returns the one it had; null if it is no Python function.
vectorcallfunc shorten(PyTypeObject* type, const char* name, vectorcallfunc shorter) {
  PyObject* method = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (method == nullptr || !PyFunction_Check(method)) {
    Py_XDECREF(method);
    PyErr_Format(PyExc_TypeError, "%s is not a Python function", name);
    return nullptr;
  }
  auto* function = reinterpret_cast<PyFunctionObject*>(method);
  const vectorcallfunc before = function->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(function, shorter);
#else
  function->vectorcall = shorter;
#endif
  Py_DECREF(method);
  return before;
}

// take_short_ways(my_autocast); see NOTE [ Short ways ].
PyObject* take_short_ways(PyObject* /*module*/, PyObject* type) {
  if (ways.type != nullptr || !PyType_Check(type)) {
    PyErr_SetString(PyExc_TypeError, "take_short_ways(type) takes one class, once");
    return nullptr;
  }
  ShortWays found{};
  found.type = reinterpret_cast<PyTypeObject*>(type);
  found.spec = offset_of(found.type, "_spec");
  found.arguments = found.spec < 0 ? -1 : offset_of(found.type, "_arguments");
  found.init_name = found.arguments < 0 ? nullptr : PyUnicode_InternFromString("__init__");
  found.init = found.init_name == nullptr ? nullptr : PyObject_GetAttr(type, found.init_name);
  if (found.init == nullptr) {
    return nullptr;
  }
  constexpr const char* kParameters[] = {"device_type", "dtype", "enabled", "cache_enabled"};
  for (size_t i = 0; i < found.parameters.size(); ++i) {
    found.parameters[i] = PyUnicode_InternFromString(kParameters[i]);
    if (found.parameters[i] == nullptr) {
      return nullptr;
    }
  }
  ways = found;
  ways.long_enter = shorten(ways.type, "__enter__", &short_enter);
  ways.long_exit = ways.long_enter == nullptr ? nullptr : shorten(ways.type, "__exit__", &short_exit);
  if (ways.long_exit == nullptr) {
    return nullptr;
  }
  Py_INCREF(type);
  ways.type->tp_vectorcall = &short_make;
  Py_RETURN_NONE;
}

PyMethodDef kRegionTypeFunctions[] = {
    {"take_short_ways", &take_short_ways, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

bool add_short_ways(PyObject* module) {
  return PyModule_AddFunctions(module, kRegionTypeFunctions) == 0;
}

} // namespace torch_promote
