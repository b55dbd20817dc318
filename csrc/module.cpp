// file: the Python face of the extension: torch_promote._C
#include "cast_cache.h"
#include "op_table.h"
#include "region.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace torch_promote {
namespace {

// enter and exit are called at every region: plain C functions, without the cost of a generic argument caster.

PyObject* enter_region(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "enter_region(owner, spec) takes two arguments");
    return nullptr;
  }
  const unsigned long long packed = PyLong_AsUnsignedLongLong(args[1]);
  if (packed == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  try {
    enter(args[0], RegionSpec::unpack(packed));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* exit_region(PyObject* /*module*/, PyObject* owner) {
  return PyBool_FromLong(static_cast<long>(torch_promote::exit(owner)));
}

PyMethodDef kFastMethods[] = {
    {"enter_region", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&enter_region)), METH_FASTCALL, nullptr},
    {"exit_region", &exit_region, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PolicyByte checked_byte(unsigned int byte) {
  TORCH_CHECK_VALUE(byte <= 255, "a policy byte is at most 255, got ", byte);
  return static_cast<PolicyByte>(byte);
}

uint32_t register_overrides(const std::vector<std::tuple<size_t, size_t, unsigned int>>& changes) {
  std::vector<Override> overrides;
  overrides.reserve(changes.size());
  for (const auto& [row, device, byte] : changes) {
    TORCH_CHECK_INDEX(row < kNumRows, "the op table has ", kNumRows, " rows; got row ", row);
    TORCH_CHECK_INDEX(device < kNumDevices, "there are ", kNumDevices, " device types; got ", device);
    overrides.push_back({static_cast<Row>(row), static_cast<Device>(device), checked_byte(byte)});
  }
  return intern_overrides(std::move(overrides));
}

// The number of a torch.dtype in c10::ScalarType.
unsigned int scalar_type_of(const py::object& dtype) {
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "expected a torch.dtype");
  return static_cast<unsigned int>(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
}

struct SuspendedHandle {
  std::shared_ptr<Suspended> regions;
};

std::vector<std::vector<unsigned int>> bytes_of(const PolicyTable& table) {
  std::vector<std::vector<unsigned int>> result;
  for (const auto& device : table.bytes) {
    result.emplace_back(device.begin(), device.end());
  }
  return result;
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of torch_promote: the wrappers on AutocastPrivateUse1, the regions and the cast cache.";
  if (PyModule_AddFunctions(m.ptr(), kFastMethods) != 0) {
    throw py::error_already_set();
  }
  m.attr("TORCH_VERSION") = TORCH_VERSION;

  py::dict policies;
  policies["unlisted"] = to_byte(CastPolicy::unlisted);
  policies["fallthrough"] = to_byte(CastPolicy::fallthrough);
  policies["keep"] = to_byte(CastPolicy::keep);
  policies["banned"] = to_byte(CastPolicy::banned);
  policies["lower_precision_fp"] = to_byte(CastPolicy::lower_precision_fp);
  policies["fp32"] = to_byte(CastPolicy::fp32);
  policies["fp32_set_opt_dtype"] = to_byte(CastPolicy::fp32_set_opt_dtype);
  policies["fp32_append_dtype"] = to_byte(CastPolicy::fp32_append_dtype);
  policies["promote"] = to_byte(CastPolicy::promote);
  policies["run_in"] = to_byte(CastPolicy::run_in);
  m.attr("POLICY_BYTES") = policies;

  py::list names;
  for (const RowInfo& row : rows()) {
    names.append(row.name());
  }
  m.attr("ROW_NAMES") = py::tuple(names);

  m.def("stock_policy_bytes", [] { return bytes_of(stock_policy_table()); });
  m.def("current_policy_bytes", [] { return bytes_of(current_policy()); });
  m.def("register_overrides", &register_overrides);
  m.def("scalar_type", &scalar_type_of);
  m.def("policy_is_stock", [] { return &current_policy() == &stock_policy_table(); });
  m.def("depth", &depth);

  py::class_<SuspendedHandle>(m, "SuspendedRegions");
  m.def("suspend_regions", [](size_t base) { return SuspendedHandle{suspend(base)}; });
  m.def("resume_regions", [](const SuspendedHandle& handle) { resume(*handle.regions); });

  m.def("cache_info", [] {
    const CacheInfo info = cast_cache_info();
    py::dict result;
    result["entries"] = info.entries;
    result["bytes"] = info.bytes;
    result["hits"] = info.hits;
    result["misses"] = info.misses;
    result["stale"] = info.stale;
    result["dropped"] = info.dropped;
    return result;
  });
  m.def("clear_cache", &clear_cast_cache);
}

} // namespace torch_promote
