// file: the kernel that our key has for each row: pick the device and its policy, cast, call on
#pragma once

#include "cast_args.h"
#include "region.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <type_traits>
#include <utility>

namespace torch_promote {

// The device whose policy a call obeys now, and the dispatch keys that are off while the op runs.
struct Decision {
  Device device = Device::cpu;
  PolicyByte policy = to_byte(CastPolicy::unlisted);
  bool other_device_waits = false; // the call has tensors of the other device, and that one's turn comes next
  bool other_device_on = false;
};

[[noreturn]] void raise_banned(Row row, Device device);

constexpr c10::DispatchKeySet kBelowOurs(c10::DispatchKeySet::FULL_AFTER, kOurKey);

// Which policy applies to a call with this key set. CUDA's turn is before the CPU's, as AutocastCUDA is above
// AutocastCPU. Whether a device's autocast is on is stock's to say: its key is excluded where it is off.
inline Decision decide(Row row, c10::DispatchKeySet keys) {
  const c10::DispatchKeySet off = c10::impl::tls_local_dispatch_key_set().excluded_;
  const bool cuda_on = !off.has(stock_key_of(Device::cuda));
  const bool cpu_on = !off.has(stock_key_of(Device::cpu));
  const bool cuda = cuda_on && keys.has_backend(c10::BackendComponent::CUDABit);
  const bool cpu = cpu_on && keys.has_backend(c10::BackendComponent::CPUBit);
  const PolicyTable& table = current_policy();
  Decision decision;
  if (cuda) {
    decision.policy = table.lookup(Device::cuda, row);
    if (decision.policy > to_byte(CastPolicy::fallthrough)) {
      decision.device = Device::cuda;
      decision.other_device_on = cpu_on;
      decision.other_device_waits = cpu;
      return decision;
    }
  }
  if (cpu) {
    const PolicyByte policy = table.lookup(Device::cpu, row);
    if (policy > to_byte(CastPolicy::fallthrough)) {
      decision.policy = policy;
      decision.device = Device::cpu;
      decision.other_device_on = cuda_on;
      return decision;
    }
  }
  return decision;
}

// The keys below ours, without the Autocast keys of devices whose policy says `fallthrough` in so many words. Where the
// table is silent, PyTorch's own kernel, if it has one, stays in place.
inline c10::DispatchKeySet keys_without_policy(Row row, c10::DispatchKeySet keys) {
  const PolicyTable& table = current_policy();
  keys = keys & kBelowOurs;
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (table.lookup(device, row) == to_byte(CastPolicy::fallthrough)) {
      keys = keys.remove(stock_key_of(device));
    }
  }
  return keys;
}

template <class... Args>
constexpr bool has_optional_dtype() {
  return (std::is_same_v<std::decay_t<Args>, std::optional<at::ScalarType>> || ...);
}
template <class First, class... Rest>
constexpr bool starts_with_tensor() {
  return std::is_same_v<std::decay_t<First>, at::Tensor>;
}

// `Op` is the overload's struct in at::_ops; `WithDtype` the overload that fp32_append_dtype calls, or void.
template <Row row, class Op, class WithDtype, class Schema>
struct Wrapper;

template <Row row, class Op, class WithDtype, class Result, class... Args>
struct Wrapper<row, Op, WithDtype, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    const Decision decision = decide(row, keys);
    if (decision.policy <= to_byte(CastPolicy::fallthrough)) {
      return Op::redispatch(keys_without_policy(row, keys), std::forward<Args>(args)...);
    }
    const Device device = decision.device;
    if (decision.policy == to_byte(CastPolicy::banned)) {
      raise_banned(row, device);
    }
    // As stock: this device's autocast is off for the op and for what is inside it. Our own key goes off with it,
    // unless the other device's autocast is on and may have work further down.
    c10::DispatchKeySet off(stock_key_of(device));
    if (!decision.other_device_on) {
      off = off.add(kOurKey);
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(off);

    const at::ScalarType dtype = target_dtype(decision, args...);
    if (dtype != at::ScalarType::Undefined && (needs_cast(args, dtype, device) || ...)) {
      // The arguments of one call expression, like stock's: the order in which they are cast is the order of the
      // autograd nodes, and so of the sums in the backward.
      return Op::call(CastArg<std::decay_t<Args>>(args, dtype, device).get()...);
    }
    if constexpr (starts_with_tensor<Args...>()) {
      if constexpr (!std::is_void_v<WithDtype>) {
        if (decision.policy == to_byte(CastPolicy::fp32_append_dtype)) {
          const at::Tensor& first = first_tensor(args...);
          const at::ScalarType output = is_eligible(first, device) ? at::kFloat : first.scalar_type();
          return WithDtype::call(std::forward<Args>(args)..., output);
        }
      }
      if constexpr (has_optional_dtype<Args...>()) {
        if (decision.policy == to_byte(CastPolicy::fp32_set_opt_dtype) && is_eligible(first_tensor(args...), device)) {
          return next(decision, keys, with_default_dtype(args)...);
        }
      }
    }
    return next(decision, keys, std::forward<Args>(args)...);
  }

 private:
  // The tensors are the same as when `keys` was computed, so the rest of it still holds; computing it anew would cost
  // what a dispatch costs. With the other device's turn to come, the dispatcher has to look again.
  static Result next(const Decision& decision, c10::DispatchKeySet keys, Args... args) {
    if (decision.other_device_waits) {
      return Op::call(std::forward<Args>(args)...);
    }
    return Op::redispatch(
        keys_without_policy(row, keys).remove(stock_key_of(decision.device)), std::forward<Args>(args)...);
  }

  // The dtype that this call's eligible arguments are cast to; Undefined where they are left alone.
  static at::ScalarType target_dtype(const Decision& decision, const std::decay_t<Args>&... args) {
    if (is_run_in(decision.policy)) {
      return run_in_dtype(decision.policy);
    }
    switch (static_cast<CastPolicy>(decision.policy)) {
      case CastPolicy::lower_precision_fp:
        return at::autocast::get_autocast_dtype(device_type_of(decision.device));
      case CastPolicy::fp32:
        return at::kFloat;
      case CastPolicy::promote: {
        PromoteJoin join(decision.device);
        (join.add(args), ...);
        return join.dtype();
      }
      default:
        return at::ScalarType::Undefined;
    }
  }
};

} // namespace torch_promote
