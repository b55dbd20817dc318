// file: the wrapper of each op entry: finds the device and its policy, casts, calls the op
#include "dispatch/cast_args.h"
#include "dispatch/decision.h"
#include "dispatch/kernels.h"

#include <ATen/core/boxing/impl/boxing.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <type_traits>
#include <utility>

// The per-op headers of the op entries that this PyTorch has; setup.py writes this file.
#include "aten_headers.h"

namespace at::_ops {
// An op that this PyTorch lacks has no header and remains an incomplete type.
#define ROW(op, overload, ...) struct TORCH_PROMOTE_OP_STRUCT(op, overload);
#include "op_policies.def"
#undef ROW
} // namespace at::_ops

namespace torch_promote {

namespace {

template <class... Args>
constexpr bool has_optional_dtype() {
  return (std::is_same_v<std::decay_t<Args>, std::optional<at::ScalarType>> || ...);
}
template <class First, class... Rest>
constexpr bool starts_with_tensor() {
  return std::is_same_v<std::decay_t<First>, at::Tensor>;
}

// Op entries whose op may return its argument or a view of it. Schemas declare this for ops with a kernel, but not for
// composite ops.
constexpr bool may_return_argument(OpEntry entry) {
  return entry == OpEntry::einsum || entry == OpEntry::chain_matmul || entry == OpEntry::view_as_complex;
}

using LinearCall = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&);

// The kernel of all op entries with the same signature: compiling one per op entry takes twice the time. `call` and
// `redispatch` come from the overload's struct in at::_ops. `with_dtype` is the overload that fp32_append_dtype calls.
// Its type WithDtype is void for op entries without such an overload.
template <bool kMayReturnArgument, class WithDtype, class Signature>
class TypedWrapper;

template <bool kMayReturnArgument, class WithDtype, class Result, class... Args>
class TypedWrapper<kMayReturnArgument, WithDtype, Result(Args...)> {
 public:
  using Call = Result(Args...);
  using Boxed = c10::impl::BoxedKernelWrapper<Call>;
  using Redispatch = Result(c10::DispatchKeySet, Args...);

  TypedWrapper(OpEntry entry, Call* call, Redispatch* redispatch, WithDtype* with_dtype)
      : entry_(entry), call_(call), redispatch_(redispatch), with_dtype_(with_dtype) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) const {
    const PolicyTable& table = current_policy();
    const Decision decision = decide(table, entry_, keys);
    if constexpr (std::is_same_v<Call, LinearCall>) {
      if (is_float8(decision.policy)) {
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(decision.keys_off());
        if (auto result =
                linear_in_float8(decision.policy, target_dtype(decision, [] { return at::kFloat; }), args...)) {
          return *std::move(result);
        }
      }
    }
    const Promotion* promotion = table.promotion.rule;
    if (const PromotingOp* promoting = acted_on(promotion, number_of(entry_))) {
      if (!decision.is_none() || !PlainCall(*promoting, *promotion).is_plain(args...)) {
        return Boxed::call(promoting->boxed, promoting->handle, keys, std::forward<Args>(args)...);
      }
      const Scoped inside(tls_promotion.only, &kNoIntegers);
      return redispatch_(keys_without_policy(decision, keys), std::forward<Args>(args)...);
    }
    if (decision.is_none()) {
      return redispatch_(keys_without_policy(decision, keys), std::forward<Args>(args)...);
    }
    const Device device = decision.device;
    if (decision.policy == to_byte(CastPolicy::banned)) {
      raise_banned(number_of(entry_), device);
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(decision.keys_off());

    const at::ScalarType dtype = target_dtype(decision, [&] {
      PromoteJoin join(device);
      (join.add(args), ...);
      return join.dtype();
    });
    if (dtype != at::ScalarType::Undefined && (needs_cast(args, dtype, device) || ...)) {
      if constexpr (kMayReturnArgument) {
        const Scoped no_sharing(tls_results_may_alias, true);
        return call_with_casts(dtype, device, args...);
      }
      return call_with_casts(dtype, device, args...);
    }
    if constexpr (starts_with_tensor<Args...>()) {
      if constexpr (!std::is_void_v<WithDtype>) {
        if (decision.policy == to_byte(CastPolicy::fp32_append_dtype)) {
          const at::Tensor& first = first_tensor(args...);
          const at::ScalarType output = is_eligible(first, device) ? at::kFloat : first.scalar_type();
          return with_dtype_(std::forward<Args>(args)..., output);
        }
      }
      if constexpr (has_optional_dtype<Args...>()) {
        if (decision.policy == to_byte(CastPolicy::fp32_set_opt_dtype) && is_eligible(first_tensor(args...), device)) {
          return call_next(decision, keys, with_default_dtype(args)...);
        }
      }
    }
    return call_next(decision, keys, std::forward<Args>(args)...);
  }

 private:
  // See NOTE [ Order of the casts ].
  Result call_with_casts(at::ScalarType dtype, Device device, const std::decay_t<Args>&... args) const {
    if constexpr (kTellOrder) {
      return CastArgs<std::decay_t<Args>...>(dtype, device, args...).pass_to(call_);
    } else {
      return call_(CastArg<std::decay_t<Args>>(args, dtype, device).get()...);
    }
  }

  // `keys` was computed from the same tensors and is still valid; recomputing it would cost as much as a dispatch. If
  // the other device's policy applies next, the dispatcher has to compute it.
  Result call_next(const Decision& decision, c10::DispatchKeySet keys, Args... args) const {
    if (decision.other_device_waits) {
      return call_(std::forward<Args>(args)...);
    }
    return redispatch_(keys_after_policy(decision, keys), std::forward<Args>(args)...);
  }

  OpEntry entry_;
  Call* call_;
  Redispatch* redispatch_;
  WithDtype* with_dtype_;
};

template <class T>
concept Complete = requires { sizeof(T); };

template <bool kMayReturnArgument, class WithDtype, class Result, class... Args>
torch::CppFunction make_wrapper(
    OpEntry entry, Result (*call)(Args...), Result (*redispatch)(c10::DispatchKeySet, Args...), WithDtype* with_dtype) {
  return torch::CppFunction(
      TypedWrapper<kMayReturnArgument, WithDtype, Result(Args...)>(entry, call, redispatch, with_dtype));
}

struct NoDtype {
  static constexpr void* call = nullptr;
};

template <OpEntry entry, class Op, class WithDtype = NoDtype>
void register_entry(torch::Library& library) {
  if constexpr (Complete<Op>) {
    auto* const with_dtype = WithDtype::call;
    library.impl(
        op_entries()[static_cast<size_t>(entry)].overload_name().c_str(),
        make_wrapper<may_return_argument(entry)>(entry, &Op::call, &Op::redispatch, with_dtype));
  } else if (
      const OpEntryInfo& info = op_entries()[static_cast<size_t>(entry)];
      c10::Dispatcher::singleton().findSchema({std::string("aten::") + info.op, info.overload})) {
    // This library has defined the op.
    library.impl(
        info.overload_name().c_str(), torch::CppFunction::makeFromBoxedKernel(boxed_kernel_of(number_of(entry))));
  }
}

} // namespace

void register_typed_wrappers() {
  stock_policy_table(); // created now, before other threads use it; it defines an op
  library_on_autocast_key("_").fallback(torch::CppFunction::makeFallthrough());
  torch::Library& aten = library_on_autocast_key("aten");
#define ROW(op, overload, cpu, cuda, xpu, mps, ...)                  \
  register_entry<                                                    \
      OpEntry::TORCH_PROMOTE_OP_STRUCT(op, overload),                \
      at::_ops::TORCH_PROMOTE_OP_STRUCT(op, overload) __VA_OPT__(, ) \
          __VA_OPT__(at::_ops::TORCH_PROMOTE_OP_STRUCT(op, __VA_ARGS__))>(aten);
#include "op_policies.def"
#undef ROW
}

} // namespace torch_promote
