// file: decides which policy applies to a call, the dtype it casts to, and the dispatch keys that follow
#pragma once

#include "policy/dispatch_state.h"
#include "region/region.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <atomic>
#include <type_traits>
#include <utility>

namespace torch_promote {

// The device whose policy applies to a call, and the dispatch keys that are off while the op runs.
struct Decision {
  Device device = Device::cpu;
  PolicyByte policy = to_byte(CastPolicy::unlisted); // the one that applies
  bool other_device_waits = false; // the call also has tensors of another device, whose policy applies next
  bool other_device_on = false;
  c10::DispatchKeySet fallthrough; // stock's keys of the call's devices on which the policy is `fallthrough`

  bool is_none() const {
    return policy <= to_byte(CastPolicy::fallthrough);
  }
  // As in stock, this device's autocast is off for the op and for the ops that it calls. kAutocastKey is off as well,
  // unless another device's autocast is on and may still have casts to make.
  c10::DispatchKeySet keys_off() const {
    const c10::DispatchKeySet off = stock_key_of(device);
    return other_device_on ? off : off.add(kAutocastKey);
  }
};

[[noreturn]] void raise_banned(OpNumber op, Device device); // boxed_wrapper.cpp

constexpr c10::DispatchKeySet kBelowAutocastKey(c10::DispatchKeySet::FULL_AFTER, kAutocastKey);

// Removes casting policies that are not in stock's table; see NOTE [ Inside kernels ].
inline void keep_casts_of_stock(OpPolicies& policies, OpNumber op) {
  const OpPolicies stock = stock_policy_table().policies_of(op);
  for (size_t device = 0; device < kNumDevices; ++device) {
    if (is_casting(policies[device]) && policies[device] != stock[device]) {
      policies[device] = to_byte(CastPolicy::fallthrough);
    }
  }
}

// Has the registry hold a table under which a compiler traces a call; see NOTE [ What the registry keeps ].
inline void keep_if_traced(const PolicyTable& table) {
  using c10::impl::TorchDispatchModeTLS;
  if (TorchDispatchModeTLS::any_modes_set() && !std::atomic_ref(table.is_kept).load(std::memory_order_relaxed) &&
      TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value()) {
    keep_for_good(table);
  }
}

// Whether a policy of a table that is not stock's has applied to an op, by number; of later numbers, nothing is known.
constexpr size_t kNumNoted = 4096;
inline std::array<std::atomic<bool>, kNumNoted> has_applied{};

// Decides which policy of the current table applies to a call with this key set. If a device's autocast is off, stock's
// key for it is excluded. `Op` is an OpEntry or an OpNumber.
template <class Op>
Decision decide(const PolicyTable& table, Op op, c10::DispatchKeySet keys) {
  const c10::DispatchKeySet off = c10::impl::tls_local_dispatch_key_set().excluded_;
  OpPolicies policies = table.policies_of(op);
  if (table.casts_beyond_stock && inside_kernel(off)) {
    keep_casts_of_stock(policies, static_cast<OpNumber>(op));
  }
  Decision decision{};
  const auto consider = [&](auto index) { // an integral constant, so that the keys are constants
    constexpr Device device = kDevices[index];
    constexpr DeviceKeys of_device = kDeviceKeys[static_cast<size_t>(device)];
    if (!keys.has_all(of_device.backend)) {
      return;
    }
    const PolicyByte policy = policies[static_cast<size_t>(device)];
    if (policy == to_byte(CastPolicy::fallthrough)) {
      decision.fallthrough = decision.fallthrough | of_device.stock;
    }
    if (off.has_all(of_device.stock)) {
      return;
    }
    if (!decision.is_none()) {
      decision.other_device_waits = true;
    } else if (policy > to_byte(CastPolicy::fallthrough)) {
      decision.policy = policy;
      decision.device = device;
      decision.other_device_on = !off.has_all(kStockKeys - of_device.stock);
    }
  };
  [&]<size_t... index>(std::index_sequence<index...>) {
    (consider(std::integral_constant<size_t, index>()), ...);
  }(std::make_index_sequence<kNumDevices>());
  if (table.serial == 0) { // stock's
    return decision;
  }
  keep_if_traced(table);
  if (!decision.is_none() && static_cast<size_t>(op) < kNumNoted) {
    has_applied[static_cast<size_t>(op)].store(true, std::memory_order_relaxed);
  }
  return decision;
}

// The keys below kAutocastKey, without the Autocast keys of devices whose policy is `fallthrough`. If the op is
// unlisted, PyTorch's own autocast kernel, if there is one, runs.
inline c10::DispatchKeySet keys_without_policy(const Decision& decision, c10::DispatchKeySet keys) {
  return (keys & kBelowAutocastKey) - decision.fallthrough;
}

// The same, without the key of the device whose policy has been applied.
inline c10::DispatchKeySet keys_after_policy(const Decision& decision, c10::DispatchKeySet keys) {
  return keys_without_policy(decision, keys) - stock_key_of(decision.device);
}

// The dtype that a call's eligible arguments are cast to, or Undefined for no cast. `join` computes the dtype for
// `promote`; other policies do not call it.
template <class Join>
at::ScalarType target_dtype(const Decision& decision, const Join& join) {
  if (is_run_in(decision.policy)) {
    return run_in_dtype(decision.policy);
  }
  switch (static_cast<CastPolicy>(decision.policy)) {
    case CastPolicy::lower_precision_fp:
    case CastPolicy::float8_tensorwise: // of a call that does not fit; see linear_in_float8
    case CastPolicy::float8_rowwise:
    case CastPolicy::float8_rowwise_with_gw_hp:
      return at::autocast::get_autocast_dtype(device_type_of(decision.device));
    case CastPolicy::fp32:
      return at::kFloat;
    case CastPolicy::promote:
      return join();
    default:
      return at::ScalarType::Undefined;
  }
}

} // namespace torch_promote
