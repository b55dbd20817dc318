// file: the Python bindings of the extension: torch_promote._C
#include "cache/cache_mode.h"
#include "cache/cached_cast.h"
#include "cache/capture.h"
#include "cache/check.h"
#include "cache/persistent_casts.h"
#include "cache/thread_casts.h"
#include "dispatch/boxed_wrapper.h"
#include "dispatch/promotion_kernels.h"
#include "dispatch/typed_wrapper.h"
#include "policy/fingerprint.h"
#include "policy/op_table.h"
#include "policy/policy_registry.h"
#include "policy/registry_sizes.h"
#include "promotion/call.h"
#include "python/bindings.h"
#include "region/current_policy.h"
#include "region/region.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_promote {
namespace {

PolicyByte checked_byte(unsigned int byte) {
  TORCH_CHECK_VALUE(byte <= 255, "a policy byte must be at most 255, got ", byte);
  return static_cast<PolicyByte>(byte);
}

// A change as Python holds it.
struct HeldChange {
  ChangePtr change;

  uint32_t number() const {
    return change == nullptr ? 0 : change->number;
  }
};

// `named`: the overloads of each op that overrides name, and the ops that hide it. `module_tables`: the number of the
// policy's tables for modules; None keeps those of the region around, unless the change replaces the policy.
HeldChange register_change(
    const std::vector<std::tuple<OpNumber, size_t, unsigned int>>& overrides,
    bool replaces,
    std::vector<std::pair<std::vector<OpNumber>, std::vector<OpNumber>>> named,
    std::optional<uint32_t> module_tables) {
  PolicyChange change;
  change.base = replaces ? PolicyChange::Base::registered : PolicyChange::Base::around;
  change.module_tables = module_tables;
  for (const auto& [op, device, byte] : overrides) {
    TORCH_CHECK_INDEX(is_op_number(op), "no op has the number ", op);
    TORCH_CHECK_INDEX(device < kNumDevices, "device index ", device, " out of range: ", kNumDevices, " device types");
    change.overrides.push_back({op, static_cast<Device>(device), checked_byte(byte)});
  }
  for (auto& [overloads, hidden_by] : named) {
    change.named.push_back({std::move(overloads), std::move(hidden_by)});
  }
  return {intern_change(std::move(change))};
}

// Describes a change: its base ("around", "registered" or "stock"), and the ops that it sets, each with the number of a
// device type.
std::pair<std::string, std::vector<std::pair<std::string, size_t>>> describe_change(uint32_t number) {
  constexpr std::array<const char*, 3> kBases = {"around", "registered", "stock"};
  const ChangePtr held = find_change(number);
  const PolicyChange change = held == nullptr ? PolicyChange{} : held->change;
  std::vector<std::pair<std::string, size_t>> ops;
  ops.reserve(change.overrides.size());
  for (const Override& one : change.overrides) {
    ops.emplace_back(op_name(one.op), static_cast<size_t>(one.device));
  }
  return {kBases[static_cast<size_t>(change.base)], std::move(ops)};
}

using CodePairs = std::vector<std::tuple<int, int, int>>;

size_t checked_code(int code) {
  TORCH_CHECK_VALUE(code >= 0 && static_cast<size_t>(code) < kDtypes, "no dtype has the number ", code);
  return static_cast<size_t>(code);
}

DtypeCode checked_result(int code) {
  return code < 0 ? kNoDtype : static_cast<DtypeCode>(checked_code(code));
}

// Operands without an entry have no common dtype.
PromotionTables make_tables(
    const CodePairs& tensors,
    const CodePairs& numbers,
    const std::vector<std::pair<int, int>>& floats,
    const CodePairs& zero_dims,
    const std::vector<std::pair<int, int>>& castable,
    uint64_t content) {
  PromotionTables tables{};
  for (size_t dtype = 0; dtype < kDtypes; ++dtype) {
    tables.tensors[dtype].fill(kNoDtype);
    tables.zero_dims[dtype].fill(kNoDtype);
  }
  for (DtypeRow& row : tables.numbers) {
    row.fill(kNoDtype);
  }
  tables.floats.fill(kNoDtype);
  for (const auto& [a, b, common] : tensors) {
    tables.tensors[checked_code(a)][checked_code(b)] = checked_result(common);
  }
  for (const auto& [a, b, common] : zero_dims) {
    tables.zero_dims[checked_code(a)][checked_code(b)] = checked_result(common);
  }
  for (const auto& [number, dtype, common] : numbers) {
    tables.numbers.at(static_cast<size_t>(number))[checked_code(dtype)] = checked_result(common);
  }
  for (const auto& [dtype, common] : floats) {
    tables.floats[checked_code(dtype)] = checked_result(common);
  }
  for (const auto& [computed, written] : castable) {
    tables.castable[checked_code(computed)] |= uint64_t{1} << checked_code(written);
  }
  tables.content = content;
  return tables;
}

PromotionOptions make_options(
    bool zero_dim_is_weak, bool associative, bool is_stock, bool matmul, uint8_t lint, uint32_t lint_handler) {
  return {zero_dim_is_weak, associative, is_stock, matmul, lint, lint_handler};
}

HeldChange register_promotion_change(uint32_t promotion) {
  PolicyChange change;
  change.promotion = reference_to(promotion_of(promotion));
  return {intern_change(std::move(change))};
}

// The number of the rule that acts on this thread's current calls, or None.
py::object promotion_in_force() {
  const Promotion* promotion = promotion_acts_here() ? current_policy().promotion.rule : nullptr;
  return promotion == nullptr ? py::object(py::none()) : py::object(py::int_(promotion->number));
}

// The current policies that differ from stock's: the bytes for each device type, keyed by the op's name.
std::map<std::string, std::vector<unsigned int>> current_policy_by_name() {
  std::map<std::string, std::vector<unsigned int>> result;
  for (const Override& change : overrides_of(current_policy())) {
    std::vector<unsigned int>& bytes = result[op_name(change.op)];
    bytes.clear();
    for (size_t device = 0; device < kNumDevices; ++device) {
      bytes.push_back(current_policy().lookup(static_cast<Device>(device), change.op));
    }
  }
  return result;
}

// The number of a torch.dtype in c10::ScalarType.
unsigned int scalar_type_of(const py::object& dtype) {
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "expected a torch.dtype");
  return static_cast<unsigned int>(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
}

// Ignores elements that are not tensors: an optimizer's parameters may contain others.
void forget_casts_of(const py::iterable& written) {
  std::vector<at::Tensor> tensors;
  for (const py::handle object : written) {
    if (THPVariable_Check(object.ptr())) {
      tensors.push_back(THPVariable_Unpack(object.ptr()));
    }
  }
  forget_casts(tensors);
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

void set_python_capture_functions(const py::object& is_capturing, const py::function& on_first) {
  set_capture_functions(is_capturing.inc_ref().ptr(), on_first.inc_ref().ptr());
}

uint32_t register_promotion_rule(
    const std::string& name,
    const PromotionOptions& options,
    unsigned int default_dtype,
    const PromotionTables& tables) {
  return register_promotion(name, options, static_cast<at::ScalarType>(default_dtype), tables);
}

void register_promoting_op_of(
    std::string op,
    std::string overload,
    std::string functional,
    uint64_t participants,
    unsigned int computes,
    int rounding_mode,
    bool each,
    bool matmul) {
  TORCH_CHECK_VALUE(computes <= static_cast<unsigned int>(Computes::opaque), "invalid Computes: ", computes);
  register_promoting_op(
      {std::move(op), std::move(overload), std::move(functional), participants, static_cast<Computes>(computes),
       rounding_mode, each, matmul});
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of torch_promote: the wrappers on AutocastPrivateUse1, the regions and the cast cache.";
  if (!add_region_functions(m.ptr()) || !add_call_on_store(m.ptr())) {
    throw py::error_already_set(); // GCOVR_EXCL_LINE: out of memory, or another Python
  }
  py::object parameter = py::module_::import("torch.nn").attr("Parameter");
  set_parameter_type(reinterpret_cast<PyTypeObject*>(parameter.release().ptr()));
  m.def("set_replaying_modes", [](const std::vector<py::type>& modes) {
    std::vector<PyTypeObject*> types;
    for (const py::type& mode : modes) {
      types.push_back(reinterpret_cast<PyTypeObject*>(mode.inc_ref().ptr()));
    }
    set_replaying_modes(std::move(types));
  });
  m.def("forget_casts", &forget_casts_of);
  m.def("forget_beyond_stock", &forget_beyond_stock);
  m.def("end_casts", &end_casts_of_all_threads);
  m.def("op_definitions", &op_definitions);
  m.def("recognize_slices", &recognize_slices);
  m.def("note_capture", &note_capture);
  m.def("set_capture_functions", &set_python_capture_functions);
  register_typed_wrappers();
  register_closed_ops();
  stock_policy_table(); // created now, before other threads use it
  m.attr("TORCH_VERSION") = TORCH_VERSION;

  py::dict policies;
  for (size_t byte = 0; byte < kCastPolicyNames.size(); ++byte) {
    policies[kCastPolicyNames[byte]] = byte;
  }
  policies["run_in"] = to_byte(CastPolicy::run_in);
  m.attr("POLICY_BYTES") = policies;

  py::list names;
  for (const OpEntryInfo& entry : op_entries()) {
    names.append(entry.name());
  }
  m.attr("OP_ENTRY_NAMES") = py::tuple(names);

  m.attr("CLOSED_OPS") = py::cast(kClosedOps).cast<py::tuple>();

  m.def("stock_policy_bytes", [] { return bytes_of(stock_policy_table()); });
  m.def("current_policy_bytes", [] { return bytes_of(current_policy()); });
  m.def("current_policy", &current_policy_by_name);
  m.def("register_op", [](const std::string& op, const std::string& overload) { return register_op(op, overload); });
  py::class_<HeldChange>(m, "HeldChange").def_property_readonly("number", &HeldChange::number);
  m.def(
      "register_change", &register_change, py::arg("overrides"), py::arg("replaces"), py::arg("named") = py::tuple(),
      py::arg("module_tables") = py::none());
  m.def("describe_change", &describe_change);
  m.def("capture_policy", [] { return HeldChange{change_to(current_policy())}; });
  m.def("set_defaults", [](const HeldChange& registered, const HeldChange& policy) {
    set_defaults(registered.change, policy.change);
  });
  // A hash of the current promotion rule, the same in every process; 0 for none.
  m.def("promotion_content", [] { return current_policy().promotion.content; });
  // The name of the current promotion rule, without its lint; "" for PyTorch's own rule.
  m.def("promotion_rule", [] {
    const Promotion* rule = current_policy().promotion.rule;
    return rule == nullptr || rule->options.is_stock ? std::string() : rule->name;
  });
  m.def("scalar_type", &scalar_type_of);
  m.def("policy_is_stock", [] { return &current_policy() == &stock_policy_table(); });
  m.def("current_policy_id", [] { return current_policy().serial; });
  m.def("module_tables", [] { return current_policy().module_tables; });
  m.def("registry_sizes", &registry_sizes); // for tests
  m.def("depth", &depth);
  m.attr("CACHE_MODES") = py::cast(kCacheModeNames).cast<py::tuple>();
  m.def("cache_mode", [] { return kCacheModeNames[static_cast<size_t>(tls_cache_mode)]; });

  py::class_<PromotionTables>(m, "PromotionTables").def(py::init(&make_tables));
  py::class_<PromotionOptions>(m, "PromotionOptions").def(py::init(&make_options));
  m.def("register_promotion", &register_promotion_rule);
  m.def("put_promotion_tables", [](uint32_t promotion, unsigned int default_dtype, const PromotionTables& tables) {
    promotion_of(promotion).put_tables(static_cast<at::ScalarType>(default_dtype), tables);
  });
  m.def("register_promotion_change", &register_promotion_change);
  m.def("promotion_in_force", &promotion_in_force);
  m.def("set_promotion_hooks", &set_promotion_hooks);
  m.def("register_promoting_op", &register_promoting_op_of);

  m.def("swap_observer", &swap_observer);
  m.def("register_dispatch_observer", &register_dispatch_observer);
  m.def("dispatch_observer_key", &dispatch_observer_key);

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
    result["persistent_entries"] = info.persistent_entries;
    result["persistent_bytes"] = info.persistent_bytes;
    return result;
  });
  m.def("clear_cache", &clear_casts);
  m.def("set_cast_check_hooks", &set_cast_check_hooks);
  m.def("set_checks_casts", [](bool on) { checks_casts.store(on); });
  m.def("cast_check_counts", [] {
    const CastCheckCounts counts = cast_check_counts();
    return py::make_tuple(counts.checked, counts.skipped);
  });
  m.def("has_backend_meta", [](const at::Tensor& tensor) { // for tests
    return tensor.unsafeGetTensorImpl()->get_backend_meta() != nullptr;
  });
}

} // namespace torch_promote
