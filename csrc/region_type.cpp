// file: the class my_autocast in C: what it calls at every region, and short ways through its plainest uses
#include "region_type.h"

#include "region.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#include <structmember.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace torch_promote {
namespace {

// Plain C functions, without the cost of a generic argument caster.

PyObject* get_running_loop = nullptr; // asyncio._get_running_loop; kept for good

// Whether an event loop runs in this thread; nothing, with Python's error set, if that cannot be told.
std::optional<bool> loop_runs() {
  // asyncio's function is called as what it is in CPython; the detour is for one that somebody has put in its place.
  const bool is_plain =
      PyCFunction_CheckExact(get_running_loop) && PyCFunction_GET_FLAGS(get_running_loop) == METH_NOARGS;
  PyObject* loop = is_plain
                       ? PyCFunction_GET_FUNCTION(get_running_loop)(PyCFunction_GET_SELF(get_running_loop), nullptr)
                       : PyObject_CallNoArgs(get_running_loop);
  if (loop == nullptr) {
    return std::nullopt;
  }
  const bool runs = loop != Py_None;
  Py_DECREF(loop);
  return runs;
}

// A packed spec in Python is its 16 hexadecimal digits. (An int would do, but torch.compile takes an int that changes
// between calls for a symbol, where it has to be a constant of the graph.)
constexpr int kSpecDigits = 16;

std::optional<uint64_t> parse_digits(PyObject* text) {
  if (!PyUnicode_Check(text) || PyUnicode_GET_LENGTH(text) != kSpecDigits || !PyUnicode_IS_ASCII(text)) {
    return std::nullopt;
  }
  const Py_UCS1* digits = PyUnicode_1BYTE_DATA(text);
  uint64_t packed = 0;
  for (int i = 0; i < kSpecDigits; ++i) {
    const Py_UCS1 c = digits[i];
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0) {
      return std::nullopt;
    }
    packed = packed << 4 | static_cast<uint64_t>(value);
  }
  return packed;
}

// The same of a str that is likely the one of last time, which is kept.
std::optional<uint64_t> parse_spec(PyObject* text) {
  static PyObject* last_text = nullptr;
  static uint64_t last = 0;
  if (text == last_text) {
    return last;
  }
  const std::optional<uint64_t> packed = parse_digits(text);
  if (packed.has_value()) {
    last = *packed;
    Py_INCREF(text);
    Py_XDECREF(std::exchange(last_text, text));
  }
  return packed;
}

PyObject* spell_spec(uint64_t packed) {
  PyObject* text = PyUnicode_New(kSpecDigits, 127);
  if (text != nullptr) {
    Py_UCS1* digits = PyUnicode_1BYTE_DATA(text);
    for (int i = kSpecDigits; i-- > 0; packed >>= 4) {
      digits[i] = static_cast<Py_UCS1>("0123456789abcdef"[packed & 0xF]);
    }
  }
  return text;
}

const void* owner_of(PyObject* object) {
  return object == Py_None ? kGraphOwner : object;
}

// False, with Python's error set, if the function threw.
template <class Function>
bool without_throwing(const Function& function) {
  try {
    function();
    return true;
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return false;
}

// enter_region(owner, spec) -> int: what Python has to look at besides.
PyObject* enter_region(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "enter_region(owner, spec) takes two arguments");
    return nullptr;
  }
  const std::optional<uint64_t> packed = parse_spec(args[1]);
  if (!packed.has_value()) {
    PyErr_SetString(PyExc_ValueError, "a packed spec is a str of 16 hexadecimal digits");
    return nullptr;
  }
  const std::optional<bool> loop = loop_runs();
  if (!loop.has_value()) {
    return nullptr;
  }
  if (!without_throwing([&] { enter(owner_of(args[0]), RegionSpec::unpack(*packed)); })) {
    return nullptr;
  }
  long notes = *loop ? kRunningLoop : 0;
  if (at::impl::torch_function_mode_enabled()) {
    notes |= kTorchFunctionMode;
  }
  return PyLong_FromLong(notes);
}

// exit_region(owner) -> int: as enter_region, or -1 if the owner has no open region in this thread.
PyObject* exit_region(PyObject* /*module*/, PyObject* owner) {
  bool open = false;
  if (!without_throwing([&] { open = torch_promote::exit(owner_of(owner)); })) {
    return nullptr;
  }
  if (!open) {
    return PyLong_FromLong(-1);
  }
  return PyLong_FromLong(at::impl::torch_function_mode_enabled() ? kTorchFunctionMode : 0);
}

// device_type, dtype, enabled, cache_enabled
using PlainArguments = std::array<PyObject*, 4>;

// The spec of the plainest region, `my_autocast("cpu")` with at most a dtype that the CPU supports.
std::optional<uint64_t> pack_plain(const PlainArguments& arguments) {
  const auto [device_type, dtype_argument, enabled, cache_enabled] = arguments;
  const auto is_flag = [](PyObject* object) { return object == Py_True || object == Py_False; };
  const bool plain = PyUnicode_CheckExact(device_type) && PyUnicode_CompareWithASCIIString(device_type, "cpu") == 0 &&
                     (dtype_argument == Py_None || THPDtype_Check(dtype_argument)) && is_flag(enabled) &&
                     (cache_enabled == Py_None || is_flag(cache_enabled));
  if (!plain) {
    return std::nullopt;
  }
  const at::ScalarType dtype = dtype_argument == Py_None ? at::autocast::get_autocast_dtype(at::kCPU)
                                                         : reinterpret_cast<THPDtype*>(dtype_argument)->scalar_type;
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    return std::nullopt;
  }
  RegionSpec spec;
  spec.devices[static_cast<size_t>(Device::cpu)] = {true, enabled == Py_True, dtype};
  spec.cache_enabled = cache_enabled == Py_None ? at::autocast::is_autocast_cache_enabled() : cache_enabled == Py_True;
  return spec.pack();
}

// pack_cpu_spec(device_type, dtype, enabled, cache_enabled) -> str | None: None for a region that is not the plainest:
// Python looks closer.
PyObject* pack_cpu_spec(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "pack_cpu_spec(device_type, dtype, enabled, cache_enabled) takes four arguments");
    return nullptr;
  }
  const std::optional<uint64_t> packed = pack_plain({args[0], args[1], args[2], args[3]});
  if (!packed.has_value()) {
    Py_RETURN_NONE;
  }
  return spell_spec(*packed);
}

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
    PyObject* spec = attribute(args[0], ways.spec);
    const std::optional<uint64_t> packed = spec != nullptr ? parse_spec(spec) : std::nullopt;
    const std::optional<bool> loop = loop_runs();
    if (!loop.has_value()) {
      return nullptr;
    }
    if (packed.has_value() && !*loop) {
      if (!without_throwing([&] { enter(args[0], RegionSpec::unpack(*packed)); })) {
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
    bool open = false;
    if (!without_throwing([&] { open = torch_promote::exit(args[0]); })) {
      return nullptr;
    }
    if (open) {
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

// What objects made alike share.
struct Made {
  uint64_t packed;
  PyObject* spec;
  PyObject* arguments; // autocast.py, my_autocast._arguments
};

// Null, with Python's error set, if there is no memory.
const Made* made_of(const PlainArguments& given, uint64_t packed) {
  static Made last{};
  if (last.packed == packed && last.arguments != nullptr &&
      std::equal(given.begin(), given.end(), &PyTuple_GET_ITEM(last.arguments, 0))) {
    return &last;
  }
  PyObject* spec = spell_spec(packed);
  PyObject* arguments =
      PyTuple_Pack(7, given[0], given[1], given[2], given[3], Py_None, Py_None, Py_None); // cache, policy, overrides
  if (spec == nullptr || arguments == nullptr) {
    Py_XDECREF(spec);
    Py_XDECREF(arguments);
    return nullptr;
  }
  const Made before = std::exchange(last, {packed, spec, arguments});
  Py_XDECREF(before.spec);
  Py_XDECREF(before.arguments);
  return &last;
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
      const Made* made = made_of(given, *packed);
      PyObject* region = made != nullptr ? ways.type->tp_alloc(ways.type, 0) : nullptr;
      if (region != nullptr) {
        Py_INCREF(made->spec);
        Py_INCREF(made->arguments);
        attribute(region, ways.spec) = made->spec;
        attribute(region, ways.arguments) = made->arguments;
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

template <class Function>
PyCFunction as_c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kFunctions[] = {
    {"enter_region", as_c_function(&enter_region), METH_FASTCALL, nullptr},
    {"exit_region", &exit_region, METH_O, nullptr},
    {"pack_cpu_spec", as_c_function(&pack_cpu_spec), METH_FASTCALL, nullptr},
    {"take_short_ways", &take_short_ways, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

bool add_region_functions(PyObject* module) {
  PyObject* asyncio = PyImport_ImportModule("asyncio");
  if (asyncio == nullptr) {
    return false;
  }
  get_running_loop = PyObject_GetAttrString(asyncio, "_get_running_loop");
  Py_DECREF(asyncio);
  return get_running_loop != nullptr && PyModule_AddFunctions(module, kFunctions) == 0 &&
         PyModule_AddIntConstant(module, "TORCH_FUNCTION_MODE", kTorchFunctionMode) == 0 &&
         PyModule_AddIntConstant(module, "RUNNING_LOOP", kRunningLoop) == 0;
}

} // namespace torch_promote
