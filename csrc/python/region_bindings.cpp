// file: regions in Python: the class with __enter__ and __exit__, and the packed spec

#include "policy/of_this_thread.h"
#include "policy/torch_declarations.h"
#include "region/region.h"
#include "region/region_spec.h"
#include "region/unused_overrides.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <structmember.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_promote {

// In Python a packed spec is a str of 16 hexadecimal digits. The spec has to be a constant of a graph: Dynamo treats a
// str as a constant, but an int that changes between calls as a symbol.
inline constexpr Py_ssize_t kSpecDigits = 16;

inline std::optional<uint64_t> parse_digits(PyObject* text) {
  if (!PyUnicode_Check(text) || PyUnicode_GET_LENGTH(text) != kSpecDigits || !PyUnicode_IS_ASCII(text)) {
    return std::nullopt;
  }
  const Py_UCS1* digits = PyUnicode_1BYTE_DATA(text);
  uint64_t packed = 0;
  for (Py_ssize_t i = 0; i < kSpecDigits; ++i) {
    const Py_UCS1 c = digits[i];
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0) {
      return std::nullopt;
    }
    packed = packed << 4 | static_cast<uint64_t>(value);
  }
  return packed;
}

inline PyObject* spell_digits(uint64_t packed) {
  PyObject* text = PyUnicode_New(kSpecDigits, 127);
  if (text != nullptr) {
    Py_UCS1* digits = PyUnicode_1BYTE_DATA(text);
    for (Py_ssize_t i = kSpecDigits; i-- > 0; packed >>= 4) {
      digits[i] = static_cast<Py_UCS1>("0123456789abcdef"[packed & 0xF]);
    }
  }
  return text;
}

// The spec that was packed or unpacked last, with its str: a loop uses the same spec repeatedly. Holding the str
// prevents another str from getting its address. Written only under the GIL.
struct LastSpec {
  PyObject* text = nullptr;
  uint64_t packed = 0;
  RegionSpec spec;

  void put(PyObject* new_text, uint64_t new_packed) {
    packed = new_packed;
    spec = RegionSpec::unpack(new_packed);
    Py_INCREF(new_text);
    Py_XDECREF(std::exchange(text, new_text));
  }
};

inline LastSpec last_spec;

// Null, with Python's error set, if the text is not a packed spec.
inline const RegionSpec* unpack_text(PyObject* text) {
  if (text != last_spec.text) {
    const std::optional<uint64_t> packed = parse_digits(text);
    if (!packed.has_value()) {
      PyErr_SetString(PyExc_ValueError, "a packed spec must be a str of 16 hexadecimal digits");
      return nullptr;
    }
    last_spec.put(text, *packed);
  }
  return &last_spec.spec;
}

namespace {

// Python objects that this file uses; never released.
struct PythonObjects {
  PyObject* get_running_loop = nullptr; // asyncio._get_running_loop
  PyObject* cuda = nullptr;             // the dict of torch.cuda
  PyObject* amp_common = nullptr;       // the dict of torch.cuda.amp.common
};

PythonObjects python{};

// Flags that enter_region and exit_region return for circumstances that Python code has to handle; usually 0.
constexpr long kTorchFunctionMode = 1;
constexpr long kRunningLoop = 2;
constexpr long kUncheckedRanks = 4;
constexpr long kWatched = 8;
constexpr long kUnusedOverrides = 16;

// Flags that Python wants every region to return: kUncheckedRanks makes the next region compare the policies of this
// job's ranks (torch_promote/integrations/ranks.py); kWatched calls the watchers of regions
// (torch_promote/regions/region.py). Read and written under the GIL.
long wanted_by_python = 0;

constexpr Py_ssize_t kPlainArguments = 5;

// The last result of pack_plain_region, which consecutive regions with the same arguments share.
struct LastPlainRegion {
  PyObject* result = nullptr; // (packed, given)
  PyObject* given = nullptr;  // borrowed from it
  uint64_t packed = 0;

  bool is_for(PyObject* const* args, uint64_t wanted) const {
    return result != nullptr && packed == wanted &&
           std::equal(args, args + kPlainArguments, &PyTuple_GET_ITEM(given, 0));
  }
};

// Returns (packed, the arguments as a tuple).
PyObject* plain_region(PyObject* const* args, uint64_t packed) {
  static LastPlainRegion last;
  if (!last.is_for(args, packed)) {
    PyObject* text = spell_digits(packed);
    PyObject* given =
        text == nullptr ? nullptr : PyTuple_Pack(kPlainArguments, args[0], args[1], args[2], args[3], args[4]);
    PyObject* result = given == nullptr ? nullptr : PyTuple_Pack(2, text, given);
    if (result != nullptr) {
      last_spec.put(text, packed);
      Py_XDECREF(std::exchange(last, {result, given, packed}).result);
    }
    Py_XDECREF(text);
    Py_XDECREF(given);
    if (result == nullptr) {
      return nullptr; // GCOVR_EXCL_LINE: out of memory
    }
  }
  Py_INCREF(last.result);
  return last.result;
}

// Whether an event loop runs in this thread; nullopt, with Python's error set, if asyncio raised.
std::optional<bool> loop_runs() {
  // Call asyncio's own function directly, and a replacement like any Python object.
  PyObject* function = python.get_running_loop;
  const bool is_plain = PyCFunction_CheckExact(function) && PyCFunction_GET_FLAGS(function) == METH_NOARGS;
  PyObject* loop = is_plain ? PyCFunction_GET_FUNCTION(function)(PyCFunction_GET_SELF(function), nullptr)
                            : PyObject_CallNoArgs(function);
  if (loop == nullptr) {
    return std::nullopt;
  }
  const bool runs = loop != Py_None;
  Py_DECREF(loop);
  return runs;
}

const void* owner_of(PyObject* object) {
  return object == Py_None ? kGraphOwner : object;
}

// Returns false, with Python's error set, if the function threw.
template <class Function>
bool without_throwing(const Function& function) {
  try {
    function();
    return true;
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {              // GCOVR_EXCL_LINE: out of memory
    PyErr_SetString(PyExc_RuntimeError, error.what()); // GCOVR_EXCL_LINE: as above
  }
  return false;
}

// Opens a region. Returns the flags above, or -1 with Python's error set.
long enter(PyObject* owner, PyObject* packed) {
  const std::optional<bool> loop = loop_runs();
  const RegionSpec* spec = loop.has_value() ? unpack_text(packed) : nullptr;
  if (spec == nullptr || !without_throwing([&] { enter_region(owner_of(owner), *spec); })) {
    return -1;
  }
  return (*loop ? kRunningLoop : 0) | (at::impl::torch_function_mode_enabled() ? kTorchFunctionMode : 0) |
         wanted_by_python;
}

// enter_region(owner, packed) -> int: the flags above.
PyObject* py_enter_region(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "enter_region(owner, packed) takes two arguments");
    return nullptr;
  }
  const long flags = enter(args[0], args[1]);
  return flags < 0 ? nullptr : PyLong_FromLong(flags);
}

// The overrides without effect in the region that this thread ended last; see unused_overrides.
std::vector<std::pair<std::string, std::string>>& last_unused() {
  return of_this_thread<std::vector<std::pair<std::string, std::string>>>();
}

constexpr long kNotOpen = -1;
constexpr long kFailed = -2;

// Ends a region. Returns the flags above, kNotOpen if the owner has no open region in this thread, or kFailed with
// Python's error set.
long exit(PyObject* owner) {
  std::optional<Frame> ended;
  if (!without_throwing([&] {
        ended = exit_region(owner_of(owner));
        last_unused().clear();
        if (ended.has_value() && ended->change != nullptr && ended->change->called != nullptr) {
          last_unused() = unused_overrides(*ended->change, *ended->policy, ended->spec);
        }
      })) {
    return kFailed; // GCOVR_EXCL_LINE: out of memory
  }
  return !ended.has_value() ? kNotOpen
                            : (at::impl::torch_function_mode_enabled() ? kTorchFunctionMode : 0) |
                                  (last_unused().empty() ? 0 : kUnusedOverrides);
}

// exit_region(owner) -> int: the flags, or kNotOpen.
PyObject* py_exit_region(PyObject* /*module*/, PyObject* owner) {
  const long flags = exit(owner);
  return flags == kFailed ? nullptr : PyLong_FromLong(flags);
}

// NOTE [ Regions in C ]
// The class `Region` derives from this one. `__enter__` and `__exit__` are C functions: CPython handles no signal in
// them, so a KeyboardInterrupt cannot leave a region half open, and an ordinary region runs no Python code. Dynamo
// reads the `__func__` of these methods, which C functions lack; torch_promote/integrations/compile.py replaces
// its variable for context managers.
struct RegionObject {
  PyObject_HEAD PyObject* packed;
};

// __enter__(self) -> self. Flags go to the Python method _entered; if it raises, the region ends.
PyObject* region_enter(PyObject* self, PyObject* /*unused*/) {
  PyObject* packed = reinterpret_cast<RegionObject*>(self)->packed;
  if (packed == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "the region has no _packed: call __init__ of its base class");
    return nullptr;
  }
  const long flags = enter(self, packed);
  if (flags < 0) {
    return nullptr;
  }
  if (flags != 0) {
    PyObject* result = PyObject_CallMethod(self, "_entered", "l", flags);
    if (result == nullptr) {
      const pybind11::error_scope error; // of the method; ending a region may run Python
      exit(self);
      return nullptr;
    }
    Py_DECREF(result);
  }
  Py_INCREF(self);
  return self;
}

// __exit__(self, kind, value, traceback) -> None. Flags go to the Python method _exited.
PyObject* region_exit(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "__exit__(kind, value, traceback) takes three arguments");
    return nullptr;
  }
  const long flags = exit(self);
  if (flags == kFailed) {
    return nullptr;
  }
  if (flags != 0) {
    return PyObject_CallMethod(self, "_exited", "lO", flags, args[0]);
  }
  Py_RETURN_NONE;
}

void destroy_region(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<RegionObject*>(self)->packed);
  type->tp_free(self);
  Py_DECREF(type);
}

// unused_overrides() -> list[tuple[str, str]]: those of the region that this thread ended last.
PyObject* py_unused_overrides(PyObject* /*module*/, PyObject* /*unused*/) {
  PyObject* result = nullptr;
  without_throwing([&] { result = pybind11::cast(last_unused()).release().ptr(); });
  return result;
}

template <long flag>
PyObject* py_set_wanted(PyObject* /*module*/, PyObject* wanted) {
  wanted_by_python = wanted == Py_True ? wanted_by_python | flag : wanted_by_python & ~flag;
  Py_RETURN_NONE;
}

// open_regions() -> tuple[tuple[int, int], ...]: the address of the owner and the policy change of each open region of
// this thread, outermost first.
PyObject* py_open_regions(PyObject* /*module*/, PyObject* /*unused*/) {
  // A copy: the garbage collector may run below, and finalizing a generator ends its regions.
  std::vector<std::pair<uintptr_t, uint32_t>> open;
  for (const Frame& frame : open_frames()) {
    open.emplace_back(reinterpret_cast<uintptr_t>(frame.owner), frame.spec.change);
  }
  PyObject* regions = PyTuple_New(static_cast<Py_ssize_t>(open.size()));
  for (size_t i = 0; regions != nullptr && i < open.size(); ++i) {
    PyObject* region = Py_BuildValue(
        "(KI)", static_cast<unsigned long long>(open[i].first), static_cast<unsigned int>(open[i].second));
    if (region == nullptr) {
      Py_CLEAR(regions); // GCOVR_EXCL_LINE: out of memory
    } else {
      PyTuple_SET_ITEM(regions, static_cast<Py_ssize_t>(i), region);
    }
  }
  return regions;
}

// Which dtypes Python has found to be usable on CUDA, and the functions of `torch.cuda` that it asked: a test may
// replace them.
using CudaFunctions = std::array<PyObject*, 3>;

struct CudaAnswer {
  CudaFunctions asked{};
  bool half = false;
  bool bfloat16 = false;
} cuda_answer;

CudaFunctions functions_to_ask() {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("amp_definitely_not_available"), PyUnicode_InternFromString("is_available"),
      PyUnicode_InternFromString("is_bf16_supported")};
  return {
      PyDict_GetItemWithError(python.amp_common, names[0]), PyDict_GetItemWithError(python.cuda, names[1]),
      PyDict_GetItemWithError(python.cuda, names[2])};
}

// cuda_allows(dtype): remembers that a region may be enabled on CUDA with this dtype.
PyObject* py_cuda_allows(PyObject* /*module*/, PyObject* dtype) {
  const auto asked = functions_to_ask();
  if (cuda_answer.asked != asked) {
    std::for_each(asked.begin(), asked.end(), [](PyObject* function) { Py_XINCREF(function); });
    const CudaAnswer before = std::exchange(cuda_answer, {asked});
    std::for_each(before.asked.begin(), before.asked.end(), [](PyObject* function) { Py_XDECREF(function); });
  }
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  (type == at::kBFloat16 ? cuda_answer.bfloat16 : cuda_answer.half) = true;
  Py_RETURN_NONE;
}

bool cuda_can_be_enabled(at::ScalarType dtype) {
  return (dtype == at::kBFloat16 ? cuda_answer.bfloat16 : cuda_answer.half) && cuda_answer.asked == functions_to_ask();
}

// The device that a plain region names; nullopt for other arguments, such as a sequence or a subclass of str.
std::optional<Device> plain_device(PyObject* device_type) {
  if (PyUnicode_CheckExact(device_type)) {
    if (PyUnicode_CompareWithASCIIString(device_type, "cpu") == 0) {
      return Device::cpu;
    }
    if (PyUnicode_CompareWithASCIIString(device_type, "cuda") == 0) {
      return Device::cuda;
    }
  }
  return std::nullopt;
}

// Applies the argument `cache`: the name of a cache mode, "none", or None. Python has checked it.
void put_cache(RegionSpec& spec, PyObject* cache) {
  for (size_t mode = 0; cache != Py_None && mode < kCacheModeNames.size(); ++mode) {
    if (PyUnicode_CompareWithASCIIString(cache, kCacheModeNames[mode]) == 0) {
      spec.cache_mode = static_cast<CacheMode>(mode);
    }
  }
  spec.cache_enabled = cache == Py_None ? spec.cache_enabled : spec.cache_mode.has_value();
}

// pack_plain_region(device_type, dtype, enabled, cache_enabled, cache) -> (packed, given) | None: the packed spec of a
// region of one device type with bfloat16 or float16, and these arguments. Returns None in all other cases, including
// errors and warnings, which Python handles.
PyObject* py_pack_plain_region(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != kPlainArguments) {
    PyErr_SetString(
        PyExc_TypeError, "pack_plain_region(device_type, dtype, enabled, cache_enabled, cache) takes five arguments");
    return nullptr;
  }
  PyObject* dtype_given = args[1];
  PyObject* enabled = args[2];
  PyObject* cache_enabled = args[3];
  const auto is_flag = [](PyObject* object) { return object == Py_True || object == Py_False; };
  const std::optional<Device> device = plain_device(args[0]);
  if (!device.has_value() || !(dtype_given == Py_None || THPDtype_Check(dtype_given)) || !is_flag(enabled) ||
      !(cache_enabled == Py_None || is_flag(cache_enabled))) {
    Py_RETURN_NONE;
  }
  const at::ScalarType dtype = dtype_given == Py_None ? at::autocast::get_autocast_dtype(device_type_of(*device))
                                                      : reinterpret_cast<THPDtype*>(dtype_given)->scalar_type;
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    Py_RETURN_NONE;
  }
  if (*device == Device::cuda && enabled == Py_True && !cuda_can_be_enabled(dtype)) {
    Py_RETURN_NONE;
  }
  RegionSpec spec;
  spec.devices[static_cast<size_t>(*device)] = {true, enabled == Py_True, dtype};
  spec.cache_enabled = cache_enabled == Py_None ? at::autocast::is_autocast_cache_enabled() : cache_enabled == Py_True;
  put_cache(spec, args[4]);
  return plain_region(args, spec.pack());
}

template <class Function>
PyCFunction as_c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kRegionFunctions[] = {
    {"enter_region", as_c_function(&py_enter_region), METH_FASTCALL, nullptr},
    {"exit_region", &py_exit_region, METH_O, nullptr},
    {"unused_overrides", &py_unused_overrides, METH_NOARGS, nullptr},
    {"set_ranks_unchecked", &py_set_wanted<kUncheckedRanks>, METH_O, nullptr},
    {"set_regions_watched", &py_set_wanted<kWatched>, METH_O, nullptr},
    {"open_regions", &py_open_regions, METH_NOARGS, nullptr},
    {"cuda_allows", &py_cuda_allows, METH_O, nullptr},
    {"pack_plain_region", as_c_function(&py_pack_plain_region), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef kRegionMethods[] = {
    {"__enter__", &region_enter, METH_NOARGS, nullptr},
    {"__exit__", as_c_function(&region_exit), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef kRegionMembers[] = {
    {"_packed", T_OBJECT_EX, offsetof(RegionObject, packed), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

bool add_region_class(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_methods, kRegionMethods},
      {Py_tp_members, kRegionMembers},
      {Py_tp_dealloc, reinterpret_cast<void*>(&destroy_region)},
      {0, nullptr},
  };
  static PyType_Spec spec = {
      "torch_promote._C.RegionBase", sizeof(RegionObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  PyObject* type = PyType_FromSpec(&spec);
  return type != nullptr && PyModule_AddObject(module, "RegionBase", type) == 0; // steals the reference
}

PyObject* import_dict(const char* module_name) {
  PyObject* module = PyImport_ImportModule(module_name);
  return module == nullptr ? nullptr : PyModule_GetDict(module); // the reference to the module is never released
}

} // namespace

bool add_region_functions(PyObject* module) {
  PyObject* asyncio = import_dict("asyncio");
  python.cuda = import_dict("torch.cuda");
  python.amp_common = import_dict("torch.cuda.amp.common");
  python.get_running_loop = asyncio == nullptr ? nullptr : PyDict_GetItemString(asyncio, "_get_running_loop");
  // GCOVR_EXCL_START: another Python or PyTorch
  if (python.get_running_loop == nullptr || python.cuda == nullptr || python.amp_common == nullptr) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_ImportError, "asyncio has no _get_running_loop");
    }
    return false;
  }
  // GCOVR_EXCL_STOP
  Py_INCREF(python.get_running_loop);
  return add_region_class(module) && PyModule_AddFunctions(module, kRegionFunctions) == 0 &&
         PyModule_AddIntConstant(module, "TORCH_FUNCTION_MODE", kTorchFunctionMode) == 0 &&
         PyModule_AddIntConstant(module, "RUNNING_LOOP", kRunningLoop) == 0 &&
         PyModule_AddIntConstant(module, "UNCHECKED_RANKS", kUncheckedRanks) == 0 &&
         PyModule_AddIntConstant(module, "WATCHED", kWatched) == 0 &&
         PyModule_AddIntConstant(module, "UNUSED_OVERRIDES", kUnusedOverrides) == 0;
}

} // namespace torch_promote
