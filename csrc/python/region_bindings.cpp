// file: regions as Python calls them: plain C functions, without the cost of a generic argument caster
#include "python/region_bindings.h"

#include "policy/torch_declarations.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Dtype.h>

#include <utility>

namespace torch_promote {
namespace {

PyObject* get_running_loop = nullptr; // asyncio._get_running_loop; kept for good

// What enter_region and exit_region tell Python to look at besides; 0 nearly always.
constexpr long kTorchFunctionMode = 1;
constexpr long kRunningLoop = 2;

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
  const std::optional<RegionSpec> spec = parse_spec(args[1]);
  if (!spec.has_value()) {
    PyErr_SetString(PyExc_ValueError, "a packed spec is a str of 16 hexadecimal digits");
    return nullptr;
  }
  const std::optional<bool> loop = loop_runs();
  if (!loop.has_value() || !enter_or_raise(owner_of(args[0]), *spec)) {
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
  const std::optional<bool> open = exit_or_raise(owner_of(owner));
  if (!open.has_value()) {
    return nullptr;
  }
  if (!*open) {
    return PyLong_FromLong(-1);
  }
  return PyLong_FromLong(at::impl::torch_function_mode_enabled() ? kTorchFunctionMode : 0);
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

template <class Function>
PyCFunction as_c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kRegionFunctions[] = {
    {"enter_region", as_c_function(&enter_region), METH_FASTCALL, nullptr},
    {"exit_region", &exit_region, METH_O, nullptr},
    {"pack_cpu_spec", as_c_function(&pack_cpu_spec), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

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

std::optional<RegionSpec> parse_spec(PyObject* text) {
  static PyObject* last_text = nullptr; // kept, so that no other str has its address
  static RegionSpec last;
  if (text != last_text) {
    const std::optional<uint64_t> packed = parse_digits(text);
    if (!packed.has_value()) {
      return std::nullopt;
    }
    last = RegionSpec::unpack(*packed);
    Py_INCREF(text);
    Py_XDECREF(std::exchange(last_text, text));
  }
  return last;
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

bool enter_or_raise(const void* owner, const RegionSpec& spec) {
  return without_throwing([&] { enter(owner, spec); });
}

std::optional<bool> exit_or_raise(const void* owner) {
  bool open = false;
  return without_throwing([&] { open = torch_promote::exit(owner); }) ? std::optional(open) : std::nullopt;
}

bool add_region_functions(PyObject* module) {
  PyObject* asyncio = PyImport_ImportModule("asyncio");
  if (asyncio == nullptr) {
    return false;
  }
  get_running_loop = PyObject_GetAttrString(asyncio, "_get_running_loop");
  Py_DECREF(asyncio);
  return get_running_loop != nullptr && PyModule_AddFunctions(module, kRegionFunctions) == 0 &&
         PyModule_AddIntConstant(module, "TORCH_FUNCTION_MODE", kTorchFunctionMode) == 0 &&
         PyModule_AddIntConstant(module, "RUNNING_LOOP", kRunningLoop) == 0;
}

} // namespace torch_promote
