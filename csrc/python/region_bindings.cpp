// file: regions in Python: the class with __enter__ and __exit__, and the packed spec

#include "policy/process.h"
#include "python/bindings.h"
#include "region/region.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_promote {

namespace {

// In Python a packed spec is a str of 16 hexadecimal digits. The spec has to be a constant of a graph: Dynamo treats a
// str as a constant, but an int that changes between calls as a symbol.

// The spec that was packed or unpacked last, with its str: a loop uses the same spec repeatedly. Holding the str
// prevents another str from getting its address. Written only under the GIL.
struct LastSpec {
  PyObject* text = nullptr;
  RegionSpec spec;

  void put(PyObject* new_text, uint64_t packed) {
    spec = RegionSpec::unpack(packed);
    Py_INCREF(new_text);
    Py_XDECREF(std::exchange(text, new_text));
  }
};

LastSpec last_spec;

// Null, with Python's error set, if the text is not a packed spec.
const RegionSpec* unpack_text(PyObject* text) {
  if (text != last_spec.text) {
    Py_ssize_t length = 0;
    const char* digits = PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, &length) : nullptr;
    uint64_t packed = 0;
    if (digits == nullptr || length != 16 || std::from_chars(digits, digits + 16, packed, 16).ptr != digits + 16) {
      PyErr_SetString(PyExc_ValueError, "a packed spec must be a str of 16 hexadecimal digits");
      return nullptr;
    }
    last_spec.put(text, packed);
  }
  return &last_spec.spec;
}

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
constexpr long kWatched = 4;
constexpr long kNotOpen = -1;
constexpr long kFailed = -2; // Python's error is set

// Whether every region returns kWatched, which calls the watchers of regions (torch_promote/regions/autocast.py). Read
// and written under the GIL.
bool regions_are_watched = false;

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
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(packed));
    PyObject* text = PyUnicode_FromString(digits);
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

// Opens a region. Returns the flags above, or kFailed with Python's error set.
long enter(PyObject* owner, PyObject* packed) {
  const std::optional<bool> loop = loop_runs();
  const RegionSpec* spec = loop.has_value() ? unpack_text(packed) : nullptr;
  if (spec == nullptr) {
    return kFailed;
  }
  try {
    enter_region(owner_of(owner), *spec);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return kFailed;
  }
  return (*loop ? kRunningLoop : 0) | (at::impl::torch_function_mode_enabled() ? kTorchFunctionMode : 0) |
         (regions_are_watched ? kWatched : 0);
}

// enter_region(owner, packed) -> int: the flags above.
PyObject* py_enter_region(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "enter_region(owner, packed) takes two arguments");
    return nullptr;
  }
  const long flags = enter(args[0], args[1]);
  return flags == kFailed ? nullptr : PyLong_FromLong(flags);
}

// Ends a region. Returns the flags above, kNotOpen if the owner has no open region in this thread, or kFailed with
// Python's error set.
long exit(PyObject* owner) {
  try {
    if (!exit_region(owner_of(owner))) {
      return kNotOpen;
    }
  } catch (const std::exception&) { // GCOVR_EXCL_START: out of memory
    torch::translate_exception_to_python(std::current_exception());
    return kFailed;
  } // GCOVR_EXCL_STOP
  return at::impl::torch_function_mode_enabled() ? kTorchFunctionMode : 0;
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
  if (flags == kFailed) {
    return nullptr;
  }
  if (flags != 0) {
    PyObject* result = PyObject_CallMethod(self, "_entered", "l", flags);
    if (result == nullptr) {
      const py::error_scope error; // of the method; ending a region may run Python
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

// The address of the owner and the policy change of each open region of this thread, outermost first.
std::vector<std::pair<uintptr_t, uint32_t>> open_regions() {
  std::vector<std::pair<uintptr_t, uint32_t>> open;
  for (const Frame& frame : open_frames()) {
    open.emplace_back(reinterpret_cast<uintptr_t>(frame.owner), frame.spec.change);
  }
  return open;
}

// Which dtypes Python has found to be usable on CUDA, and the functions that it asked, which are never released. A test
// or torch_promote/observe/policy_sources.py may replace them.
using CudaFunctions = std::array<PyObject*, 3>;

struct CudaAnswer {
  CudaFunctions asked{};
  bool half = false;
  bool bfloat16 = false;
} cuda_answer;

CudaFunctions functions_to_ask() {
  static PyObject* const is_off = PyUnicode_InternFromString("amp_definitely_not_available");
  static PyObject* const is_available = PyUnicode_InternFromString("is_available"); // which `is_off` asks
  static PyObject* const has_bfloat16 = PyUnicode_InternFromString("is_bf16_supported");
  return {
      PyDict_GetItemWithError(python.amp_common, is_off), PyDict_GetItemWithError(python.cuda, is_available),
      PyDict_GetItemWithError(python.cuda, has_bfloat16)};
}

// Remembers that a region may be enabled on CUDA with this dtype.
void cuda_allows(at::ScalarType dtype) {
  const CudaFunctions asked = functions_to_ask();
  if (cuda_answer.asked != asked) {
    std::for_each(asked.begin(), asked.end(), [](PyObject* function) { Py_XINCREF(function); });
    cuda_answer = {asked};
  }
  (dtype == at::kBFloat16 ? cuda_answer.bfloat16 : cuda_answer.half) = true;
}

bool cuda_can_be_enabled(at::ScalarType dtype) {
  return (dtype == at::kBFloat16 ? cuda_answer.bfloat16 : cuda_answer.half) && cuda_answer.asked == functions_to_ask();
}

// The device that a plain region names; nullopt for other arguments, such as a sequence or a subclass of str.
std::optional<Device> plain_device(PyObject* device_type) {
  constexpr std::array<const char*, kNumDevices> kNames = {"cpu", "cuda", "xpu", "mps"};
  for (size_t device = 0; PyUnicode_CheckExact(device_type) && device < kNames.size(); ++device) {
    if (PyUnicode_CompareWithASCIIString(device_type, kNames[device]) == 0) {
      return static_cast<Device>(device);
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

// What pack_plain_region returns for the arguments (device_type, dtype, enabled, cache_enabled, cache).
PyObject* pack_plain(PyObject* const* args) {
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
  const bool has_to_ask = *device == Device::cuda || (*device == Device::mps && dtype == at::kBFloat16);
  if (has_to_ask && enabled == Py_True && !(*device == Device::cuda && cuda_can_be_enabled(dtype))) {
    Py_RETURN_NONE;
  }
  RegionSpec spec;
  spec.put(static_cast<size_t>(*device), {enabled == Py_True, dtype});
  spec.cache_enabled = cache_enabled == Py_None ? at::autocast::is_autocast_cache_enabled() : cache_enabled == Py_True;
  put_cache(spec, args[4]);
  return plain_region(args, spec.pack());
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
  return pack_plain(args);
}

// NOTE [ Construction in C ]
// For `my_autocast(...)`, CPython makes a tuple and a dict of the arguments, and a frame for `__init__`: most of what a
// plain region costs. So the class has a vectorcall function, which makes plain regions, and calls the class in the
// usual way for all others. Subclasses do not inherit it.
constexpr size_t kPositional = 4; // the arguments of a plain region: those of torch.autocast

struct Constructor {
  Py_ssize_t arguments = 0;                      // the offset of the slot `_arguments`
  std::array<PyObject*, kPositional> names = {}; // interned, as those in the code of a call
} constructor;

// While Python shuts down, a daemon thread that waits for the GIL ends there, and C++ destroys the objects of all
// frames: none may hold a reference to a Python object.
PyObject* construct_in_python(PyObject* type, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* positional = PyTuple_New(count);
  PyObject* named = names == nullptr ? nullptr : PyDict_New();
  bool fits = positional != nullptr && (names == nullptr || named != nullptr);
  for (Py_ssize_t i = 0; fits && i < count; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(positional, i, args[i]);
  }
  for (Py_ssize_t i = 0; fits && names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    fits = PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[count + i]) == 0;
  }
  PyObject* made = fits ? PyType_Type.tp_call(type, positional, named) : nullptr;
  Py_XDECREF(positional);
  Py_XDECREF(named);
  return made;
}

PyObject* construct_region(PyObject* type, PyObject* const* args, size_t flags, PyObject* names) {
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  std::array<PyObject*, kPlainArguments> given = {nullptr, nullptr, nullptr, nullptr, Py_None};
  bool is_plain = count <= static_cast<Py_ssize_t>(kPositional);
  std::copy_n(args, is_plain ? count : 0, given.begin());
  for (Py_ssize_t i = 0; is_plain && names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    const auto* const found = std::find(constructor.names.begin(), constructor.names.end(), PyTuple_GET_ITEM(names, i));
    const size_t place = static_cast<size_t>(found - constructor.names.begin());
    is_plain = place < kPositional && given.at(place) == nullptr;
    if (is_plain) {
      given.at(place) = args[count + i];
    }
  }
  for (size_t i = 0; i < kPositional; ++i) {
    given.at(i) = given.at(i) != nullptr ? given.at(i) : i == 2 ? Py_True : Py_None; // the defaults
  }
  PyObject* region = is_plain ? pack_plain(given.data()) : nullptr;
  if (region == nullptr && PyErr_Occurred() != nullptr) {
    return nullptr; // GCOVR_EXCL_LINE: out of memory
  }
  if (region == nullptr || region == Py_None) {
    Py_XDECREF(region);
    return construct_in_python(type, args, count, names);
  }
  auto* const type_object = reinterpret_cast<PyTypeObject*>(type);
  PyObject* self = type_object->tp_alloc(type_object, 0);
  if (self != nullptr) {
    PyObject* packed = PyTuple_GET_ITEM(region, 0);
    PyObject* arguments = PyTuple_GET_ITEM(region, 1);
    Py_INCREF(packed);
    Py_INCREF(arguments);
    reinterpret_cast<RegionObject*>(self)->packed = packed;
    *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(self) + constructor.arguments) = arguments;
  }
  Py_DECREF(region);
  return self;
}

// Has `construct_region` make the regions of a class, whose slot `_arguments` is given.
void construct_plain_regions(const py::handle type, const py::handle slot) {
  TORCH_CHECK_TYPE(
      PyType_Check(type.ptr()) && Py_TYPE(slot.ptr()) == &PyMemberDescr_Type, "expected a class and a slot");
  constructor.arguments = reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member->offset;
  constexpr std::array<const char*, kPositional> kNames = {"device_type", "dtype", "enabled", "cache_enabled"};
  std::transform(kNames.begin(), kNames.end(), constructor.names.begin(), PyUnicode_InternFromString);
  reinterpret_cast<PyTypeObject*>(type.ptr())->tp_vectorcall = &construct_region;
}

template <class Function>
PyCFunction as_c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Those that programs call often: pybind11 takes longer.
PyMethodDef kRegionFunctions[] = {
    {"enter_region", as_c_function(&py_enter_region), METH_FASTCALL, nullptr},
    {"exit_region", &py_exit_region, METH_O, nullptr},
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

PyObject* dict_of(const char* module_name) {
  return PyModule_GetDict(py::module_::import(module_name).release().ptr());
}

} // namespace

void add_regions(py::module_& m) {
  python.cuda = dict_of("torch.cuda");
  python.amp_common = dict_of("torch.cuda.amp.common");
  python.get_running_loop = py::getattr(py::module_::import("asyncio"), "_get_running_loop").release().ptr();
  static PyType_Slot slots[] = {
      {Py_tp_methods, kRegionMethods},
      {Py_tp_members, kRegionMembers},
      {Py_tp_dealloc, reinterpret_cast<void*>(&destroy_region)},
      {0, nullptr},
  };
  static PyType_Spec spec = {
      "torch_promote._C.RegionBase", sizeof(RegionObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  m.attr("RegionBase") = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  PyModule_AddFunctions(m.ptr(), kRegionFunctions);
  m.attr("TORCH_FUNCTION_MODE") = kTorchFunctionMode;
  m.attr("RUNNING_LOOP") = kRunningLoop;
  m.attr("WATCHED") = kWatched;
  m.def("set_regions_watched", [](bool watched) { regions_are_watched = watched; });
  m.def("open_regions", [] { return py::tuple(py::cast(open_regions())); });
  m.def("depth", [] { return open_frames().size(); });
  m.def("cuda_allows", &cuda_allows);
  m.def("construct_plain_regions", &construct_plain_regions);
  py::class_<Suspended, std::shared_ptr<Suspended>>(m, "SuspendedRegions");
  m.def("suspend_regions", &suspend);
  m.def("resume_regions", &resume);
}

} // namespace torch_promote
