// file: the Python bindings of the extension: torch_promote._C
#include "cache/cached_cast.h"
#include "cache/capture.h"
#include "cache/check.h"
#include "cache/persistent_casts.h"
#include "cache/thread_casts.h"
#include "dispatch/decision.h"
#include "dispatch/kernels.h"
#include "policy/policy_registry.h"
#include "promotion/call.h"
#include "python/bindings.h"

#include <c10/util/Exception.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_promote {

namespace {

// --- Policies

// A change as Python holds it.
struct HeldChange {
  ChangePtr change;

  uint32_t number() const {
    return change == nullptr ? 0 : change->number;
  }
};

// `module_tables`: the number of the policy's tables for modules; None keeps those of the region around, unless the
// change replaces the policy.
HeldChange register_change(
    const std::vector<std::tuple<OpNumber, size_t, PolicyByte>>& overrides,
    bool replaces,
    std::optional<uint32_t> module_tables) {
  PolicyChange change;
  change.base = replaces ? PolicyChange::Base::registered : PolicyChange::Base::around;
  change.module_tables = module_tables;
  const OpNumber ops = next_op_number();
  for (const auto& [op, device, policy] : overrides) {
    TORCH_CHECK_INDEX(
        op < ops && device < kNumDevices, "no op has the number ", op, ", or no device the index ", device);
    change.overrides.push_back({op, static_cast<Device>(device), policy});
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
  for (const Override& one : change.overrides) {
    ops.emplace_back(op_name(one.op), static_cast<size_t>(one.device));
  }
  return {kBases[static_cast<size_t>(change.base)], std::move(ops)};
}

// The ops to which a policy of a table that is not stock's has applied in this process.
std::vector<std::string> ops_with_applied_policies() {
  std::vector<std::string> names;
  for (OpNumber op = 0; op < std::min<size_t>(next_op_number(), kNumNoted); ++op) {
    if (has_applied[op].load(std::memory_order_relaxed)) {
      names.push_back(op_name(op));
    }
  }
  return names;
}

// The current policies that differ from stock's: the bytes for each device type, keyed by the op's name.
std::map<std::string, OpPolicies> current_policy_by_name() {
  std::map<std::string, OpPolicies> result;
  for (const Override& change : overrides_of(current_policy())) {
    result[op_name(change.op)] = current_policy().policies_of(change.op);
  }
  return result;
}

void add_policies(py::module_& m) {
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
  m.def("stock_policy_bytes", [] { return stock_policy_table().entries; });
  m.def("current_policy", &current_policy_by_name);
  m.def("policy_is_stock", [] { return &current_policy() == &stock_policy_table(); });
  m.def("current_policy_id", [] { return current_policy().serial; });
  m.def("module_tables", [] { return current_policy().module_tables; });
  m.def("register_op", [](const std::string& op, const std::string& overload) { return register_op(op, overload); });
  m.def("op_definitions", &op_definitions);
  py::class_<HeldChange>(m, "HeldChange").def_property_readonly("number", &HeldChange::number);
  m.def("register_change", &register_change, py::arg(), py::arg(), py::arg() = py::none());
  m.def("describe_change", &describe_change);
  m.def("ops_with_applied_policies", &ops_with_applied_policies);
  m.def("capture_policy", [] { return HeldChange{change_to(current_policy())}; });
  m.def("set_defaults", [](const HeldChange& registered, const HeldChange& policy) {
    set_defaults(registered.change, policy.change);
  });
  m.def("registry_sizes", [] { // for tests
    const auto [changes, tables] = policies_in_use();
    return std::map<std::string, size_t>{
        {"op numbers", next_op_number()}, {"policy changes", changes}, {"policy tables", tables}};
  });
}

// --- Promotion

// The entries of a table, by the numbers of dtypes or of types of numbers. Operands without an entry have no common
// dtype.
using Entries = std::vector<std::tuple<size_t, size_t, DtypeCode>>;

template <size_t size>
void fill(std::array<DtypeRow, size>& table, const Entries& entries) {
  for (DtypeRow& row : table) {
    row.fill(kNoDtype);
  }
  for (const auto& [a, b, common] : entries) {
    table.at(a).at(b) = common;
  }
}

PromotionTables make_tables(
    const Entries& tensors,
    const Entries& numbers,
    const std::vector<std::pair<size_t, DtypeCode>>& floats,
    const Entries& zero_dims,
    const std::vector<std::pair<size_t, size_t>>& castable,
    uint64_t content) {
  PromotionTables tables{};
  fill(tables.tensors, tensors);
  fill(tables.numbers, numbers);
  fill(tables.zero_dims, zero_dims);
  tables.floats.fill(kNoDtype);
  for (const auto& [dtype, common] : floats) {
    tables.floats.at(dtype) = common;
  }
  for (const auto& [computed, written] : castable) {
    tables.castable.at(computed) |= uint64_t{1} << written;
  }
  tables.content = content;
  return tables;
}

// The number of the rule that acts on this thread's current calls, or None.
std::optional<uint32_t> promotion_in_force() {
  const Promotion* promotion = promotion_acts_here() ? current_policy().promotion.rule : nullptr;
  return promotion == nullptr ? std::nullopt : std::optional(promotion->number);
}

void add_promotion(py::module_& m) {
  py::class_<PromotionTables>(m, "PromotionTables").def(py::init(&make_tables));
  py::class_<PromotionOptions>(m, "PromotionOptions").def(py::init<bool, bool, bool, bool, uint8_t, uint32_t>());
  m.def("scalar_type", [](at::ScalarType dtype) { return static_cast<int>(dtype); });
  m.def("register_promotion", &register_promotion);
  m.def("put_promotion_tables", [](uint32_t promotion, at::ScalarType default_dtype, const PromotionTables& tables) {
    promotion_of(promotion).put_tables(default_dtype, tables);
  });
  m.def("register_promotion_change", [](uint32_t promotion) {
    PolicyChange change;
    change.promotion = reference_to(promotion_of(promotion));
    return HeldChange{intern_change(std::move(change))};
  });
  m.def("promotion_in_force", &promotion_in_force);
  // Whether that rule acts on a call with these operands; see NOTE [ Composite calls ] in promotion/call.h.
  m.def("promotion_acts_on", [](const std::vector<at::Tensor>& tensors) {
    Operands operands(tensors.size());
    std::transform(
        tensors.begin(), tensors.end(), operands.begin(), [](const at::Tensor& tensor) { return operand_of(tensor); });
    return acts_on_operands(operands);
  });
  // A hash of the current promotion rule, the same in every process; 0 for none.
  m.def("promotion_content", [] { return current_policy().promotion.content; });
  // The name of the current promotion rule, without its lint; "" for PyTorch's own rule.
  m.def("promotion_rule", [] {
    const Promotion* rule = current_policy().promotion.rule;
    return rule == nullptr || rule->options.is_stock ? std::string() : rule->name;
  });
  m.def("register_promoting_op", &register_promoting_op);
}

// --- The cast cache

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

void add_cache(py::module_& m) {
  py::object parameter = py::module_::import("torch.nn").attr("Parameter");
  set_parameter_type(reinterpret_cast<PyTypeObject*>(parameter.release().ptr()));
  m.def("set_replaying_modes", [](const std::vector<py::type>& modes) {
    std::vector<PyTypeObject*> types;
    for (const py::type& mode : modes) {
      types.push_back(reinterpret_cast<PyTypeObject*>(mode.inc_ref().ptr()));
    }
    set_replaying_modes(std::move(types));
  });
  m.attr("CACHE_MODES") = py::cast(kCacheModeNames).cast<py::tuple>();
  m.def("cache_mode", [] { return kCacheModeNames[static_cast<size_t>(tls_cache_mode)]; });
  m.def("would_keep", [](const at::Tensor& tensor, bool persistent) {
    return would_keep(tensor, persistent ? CacheMode::persistent : CacheMode::all);
  });
  m.def("casts_ended", [] { return tls_casts_ended; });
  m.def("cache_info", &cast_cache_info);
  m.def("clear_cache", &clear_casts);
  m.def("forget_casts", &forget_casts_of);
  m.def("forget_beyond_stock", &forget_beyond_stock);
  m.def("end_casts", &end_casts_of_all_threads);
  m.def("cached_cast", [](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.scalar_type() == dtype ? tensor : cached_cast(tensor, dtype);
  });
  m.def("kept_float8", &kept_float8);
  m.def("recognize_slices", &recognize_slices);
  m.def("note_capture", &note_capture);
  m.def("set_capture_functions", [](const py::object& is_capturing, const py::function& on_first) {
    set_capture_functions(is_capturing.inc_ref().ptr(), on_first.inc_ref().ptr());
  });
  m.def("set_checks_casts", [](bool on) { checks_casts.store(on); });
  m.def("cast_check_counts", [] { return std::pair(casts_compared.load(), casts_skipped.load()); });
  m.def("has_backend_meta", [](const at::Tensor& tensor) { // for tests
    return tensor.unsafeGetTensorImpl()->get_backend_meta() != nullptr;
  });
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of torch_promote: the wrappers on AutocastPrivateUse1, the regions and the cast cache.";
  m.attr("TORCH_VERSION") = TORCH_VERSION;
  register_typed_wrappers();
  register_closed_ops();
  add_policies(m);
  add_promotion(m);
  add_cache(m);
  add_regions(m);
  add_call_on_store(m);
  add_measure(m);
  add_observer(m);
}

} // namespace torch_promote
