// file: the kernel that our key has for each row: pick the device and its policy, cast, call on
#pragma once

#include "dispatch/cast_args.h"
#include "dispatch/decision.h"
#include "promotion/call.h"

#include <ATen/core/boxing/impl/boxing.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <type_traits>
#include <utility>

namespace torch_promote {

template <class... Args>
constexpr bool has_optional_dtype() {
  return (std::is_same_v<std::decay_t<Args>, std::optional<at::ScalarType>> || ...);
}
template <class First, class... Rest>
constexpr bool starts_with_tensor() {
  return std::is_same_v<std::decay_t<First>, at::Tensor>;
}

// Rows whose op may return its argument, or a view of it. (Of the op itself: no schema says so of a composite.)
constexpr bool may_return_argument(Row row) {
  return row == Row::einsum || row == Row::chain_matmul || row == Row::view_as_complex;
}

// `Op` is the overload's struct in at::_ops; `WithDtype` the overload that fp32_append_dtype calls, or void.
template <Row row, class Op, class WithDtype, class Schema>
struct Wrapper;

template <Row row, class Op, class WithDtype, class Result, class... Args>
struct Wrapper<row, Op, WithDtype, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    const Decision decision = decide(row, keys);
    const Promotion* promotion = current_policy().promotion;
    if (const PromotingOp* promoting = acted_on(promotion, number_of(row))) {
      if (!decision.is_none() || !PlainCall(*promoting, *promotion).is_plain(args...)) {
        return c10::impl::BoxedKernelWrapper<Result(Args...)>::call(
            promoting->boxed, promoting->handle, keys, std::forward<Args>(args)...);
      }
      const InsidePromoted inside;
      return Op::redispatch(keys_without_policy(row, keys), std::forward<Args>(args)...);
    }
    if (decision.is_none()) {
      return Op::redispatch(keys_without_policy(row, keys), std::forward<Args>(args)...);
    }
    const Device device = decision.device;
    if (decision.policy == to_byte(CastPolicy::banned)) {
      raise_banned(number_of(row), device);
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(decision.keys_off());

    const at::ScalarType dtype = target_dtype(decision, [&] {
      PromoteJoin join(device);
      (join.add(args), ...);
      return join.dtype();
    });
    if (dtype != at::ScalarType::Undefined && (needs_cast(args, dtype, device) || ...)) {
      if constexpr (may_return_argument(row)) {
        const ResultsMayAlias no_sharing;
        return Op::call(CastArg<std::decay_t<Args>>(args, dtype, device).get()...);
      }
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
};

} // namespace torch_promote
