// file: notes which ops are called in regions whose overrides name ops; see NOTE [ Unused overrides ]
#include "region/region.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace torch_promote {

namespace {

// For each op, the number of the newest change when it was last called in a region that is not known: under a dispatch
// mode, or in a thread to which PyTorch carried the policy. Such a call may belong to any change that existed.
std::array<std::atomic<uint32_t>, CalledOps::kMost> called_in_unknown_region;

at::ScalarType dtype_of(PolicyByte policy, at::ScalarType lower) {
  return is_run_in(policy)                                   ? run_in_dtype(policy)
         : policy == to_byte(CastPolicy::lower_precision_fp) ? lower
         : policy == to_byte(CastPolicy::fp32)               ? at::kFloat
                                                             : at::ScalarType::Undefined;
}

// Whether the policy of the op that ran differs from that of the op that it called, on a device of the region.
bool differ(OpNumber outer, OpNumber inner, const PolicyTable& policy, const RegionSpec& spec) {
  for (const Device device : {Device::cpu, Device::cuda}) {
    const auto& settings = spec.devices[static_cast<size_t>(device)];
    const PolicyByte ran = policy.lookup(device, outer);
    const PolicyByte wanted = policy.lookup(device, inner);
    const at::ScalarType dtype = dtype_of(wanted, settings.dtype);
    if (settings.enabled && ran > to_byte(CastPolicy::fallthrough) && wanted != ran &&
        (dtype == at::ScalarType::Undefined || dtype != dtype_of(ran, settings.dtype))) {
      return true;
    }
  }
  return false;
}

// Whether no region inside has replaced an override.
bool is_in_force(const NumberedChange& change, const PolicyTable& table) {
  return std::all_of(change.change.overrides.begin(), change.change.overrides.end(), [&table](const Override& one) {
    return table.lookup(one.device, one.op) == one.policy;
  });
}

} // namespace

void note_call(const PolicyTable& table, OpNumber op, std::optional<Device> on) {
  if (open_frames().empty() || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    if (op < CalledOps::kMost) {
      called_in_unknown_region[op].store(last_change_number(), std::memory_order_relaxed);
    }
  }
  for (const Frame& frame : open_frames()) {
    if (frame.change != nullptr && frame.change->called != nullptr) {
      const bool as_in_region =
          on.has_value() && frame.policy->lookup(*on, op) == table.lookup(*on, op) && is_in_force(*frame.change, table);
      frame.change->called->add(op, as_in_region);
    }
  }
}

std::vector<std::pair<std::string, std::string>> unused_overrides(
    const NumberedChange& change, const PolicyTable& policy, const RegionSpec& spec) {
  std::vector<std::pair<std::string, std::string>> unused;
  const auto is_called = [&](OpNumber op) {
    return change.called->called(op) || called_in_unknown_region[op].load(std::memory_order_relaxed) >= change.number;
  };
  for (const NamedOp& named : change.change.named) {
    if (std::any_of(named.overloads.begin(), named.overloads.end(), is_called)) {
      continue;
    }
    for (const OpNumber outer : named.hidden_by) {
      if (change.called->ran_under_policy(outer) && differ(outer, named.overloads.front(), policy, spec)) {
        unused.emplace_back(op_name(named.overloads.front()), op_name(outer));
      }
    }
  }
  return unused;
}

} // namespace torch_promote
