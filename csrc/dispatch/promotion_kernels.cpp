// file: the kernels of promoting ops on kAutocastKey, typed for common signatures
#include "dispatch/decision.h"
#include "dispatch/kernels.h"

#include <ATen/core/boxing/impl/boxing.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch_promote {

namespace {

template <class Arg>
constexpr bool is_tensor_list = std::is_same_v<std::decay_t<Arg>, at::TensorList>;

// Boxing a call costs more than applying a rule to operands of one dtype. Ops with the common arithmetic signatures
// therefore have a typed kernel, which boxes only calls that are not plain.
template <class Signature>
class TypedKernel;

template <class Result, class... Args>
class TypedKernel<Result(Args...)> {
 public:
  explicit TypedKernel(const PromotingOp& op) : op_(&op), handle_(op.handle.typed<Result(Args...)>()) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) const {
    const PolicyTable& table = current_policy();
    if (table.policies_of(op_->number) == OpPolicies{}) { // unlisted on each device
      const PromotingOp* acted = acted_on(table.promotion.rule, op_->number);
      if (acted == nullptr) {
        return handle_.redispatch(keys & kBelowAutocastKey, std::forward<Args>(args)...);
      }
      keep_if_traced(table);
      if (PlainCall(*op_, *table.promotion.rule).is_plain(args...)) {
        const Scoped inside(tls_promotion.only, &kNoIntegers);
        std::optional<c10::impl::ExcludeDispatchKeyGuard> no_key;
        if constexpr ((is_tensor_list<Args> || ...)) {
          // On the CPU these ops call another op for each element. With autocast off, the kernels on kAutocastKey would
          // do nothing for those calls.
          if (c10::impl::tls_local_dispatch_key_set().excluded_.has_all(kStockKeys)) {
            no_key.emplace(kAutocastKey);
          }
        }
        return handle_.redispatch(keys & kBelowAutocastKey, std::forward<Args>(args)...);
      }
    }
    return c10::impl::BoxedKernelWrapper<Result(Args...)>::call(
        op_->boxed, op_->handle, keys, std::forward<Args>(args)...);
  }

 private:
  const PromotingOp* op_;
  c10::TypedOperatorHandle<Result(Args...)> handle_;
};

// The types of an op's arguments and results in C++, by their names in schemas. "!": the op writes to the argument.
using T = const at::Tensor&;
using W = at::Tensor&;
using N = const at::Scalar&;
using OptT = const std::optional<at::Tensor>&;
using OptN = const std::optional<at::Scalar>&;
using OptS = std::optional<std::string_view>;
using L = at::TensorList;
using S = at::ArrayRef<at::Scalar>;

template <class Type>
constexpr const char* kNameOf = nullptr;
template <>
constexpr const char* kNameOf<T> = "Tensor";
template <>
constexpr const char* kNameOf<W> = "Tensor!";
template <>
constexpr const char* kNameOf<N> = "Scalar";
template <>
constexpr const char* kNameOf<OptT> = "Tensor?";
template <>
constexpr const char* kNameOf<OptN> = "Scalar?";
template <>
constexpr const char* kNameOf<OptS> = "str?";
template <>
constexpr const char* kNameOf<L> = "Tensor[]";
template <>
constexpr const char* kNameOf<S> = "Scalar[]";

template <>
constexpr const char* kNameOf<at::Tensor> = "Tensor";
template <>
constexpr const char* kNameOf<std::vector<at::Tensor>> = "Tensor[]";
template <>
constexpr const char* kNameOf<void> = "";

std::string names_of(const std::vector<c10::Argument>& arguments) {
  std::string names;
  for (const c10::Argument& argument : arguments) {
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    names += argument.real_type()->str();
    names += written && argument.real_type()->kind() == c10::TypeKind::TensorType ? "!" : "";
  }
  return names;
}

// Sets `kernel` to a typed one if the op has this signature.
template <class Result, class... Args>
void try_typed(const PromotingOp& op, std::optional<torch::CppFunction>& kernel) {
  const c10::FunctionSchema& schema = op.handle.schema();
  if (names_of(schema.returns()) == kNameOf<Result> &&
      names_of(schema.arguments()) == (std::string() + ... + kNameOf<Args>)) {
    kernel.emplace(TypedKernel<Result(Args...)>(op));
  }
}

// The overloads of an op on tensors: they return the result, or write it to the first argument or to `out`.
template <class First, class... Rest>
struct OnTensors {
  static void try_each(const PromotingOp& op, std::optional<torch::CppFunction>& kernel) {
    try_typed<at::Tensor, First, Rest...>(op, kernel);
    try_typed<at::Tensor&, First, Rest..., W>(op, kernel);
    if constexpr (std::is_same_v<First, T>) {
      try_typed<at::Tensor&, W, Rest...>(op, kernel);
    }
  }
};

// The overloads of an op on lists of tensors: they return the results, or write them to the first list.
template <class... Args>
struct OnLists {
  static void try_each(const PromotingOp& op, std::optional<torch::CppFunction>& kernel) {
    try_typed<std::vector<at::Tensor>, Args...>(op, kernel);
    try_typed<void, Args...>(op, kernel);
  }
};

template <class... Overloads>
torch::CppFunction kernel_among(const PromotingOp& op) {
  std::optional<torch::CppFunction> kernel;
  (Overloads::try_each(op, kernel), ...);
  return kernel.has_value() ? *std::move(kernel) : torch::CppFunction::makeFromBoxedKernel(op.boxed);
}

torch::CppFunction kernel_of(const PromotingOp& op) {
  return kernel_among<
      OnTensors<T>, OnTensors<T, T>, OnTensors<T, T, T>, OnTensors<T, T, N>, OnTensors<T, N, T>, OnTensors<T, T, T, N>,
      OnTensors<T, T, OptS>, OnTensors<T, N>, OnTensors<T, N, N>, OnTensors<N, T>, OnTensors<T, OptN, OptN>,
      OnTensors<T, OptT, OptT>, OnTensors<T, T, T, N, N>, OnLists<L>, OnLists<L, L>, OnLists<L, N>, OnLists<L, S>,
      OnLists<L, T>, OnLists<L, L, N>, OnLists<L, T, N>, OnLists<L, L, L>, OnLists<L, L, L, N>, OnLists<L, L, L, S>,
      OnLists<L, L, L, T>, OnLists<L, L, S>>(op);
}

void register_kernel(const PromotingOp& op) {
  static torch::Library& aten = library_on_autocast_key("aten");
  constexpr std::string_view kNamespace = "aten::";
  TORCH_CHECK(op.name.starts_with(kNamespace), op.name, " is not one of PyTorch's aten ops");
  aten.impl(op.name.substr(kNamespace.size()).c_str(), kernel_of(op));
}

std::optional<c10::OperatorHandle> find_overload(const std::string& name) {
  const size_t dot = name.find('.');
  return c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
}

uint64_t written_arguments(const c10::FunctionSchema& schema) {
  uint64_t written = 0;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      written |= uint64_t{1} << i;
    }
  }
  return written;
}

} // namespace

void register_promoting_op(
    const std::string& op_name,
    const std::string& overload,
    const std::string& functional,
    uint64_t participants,
    uint8_t computes,
    int rounding_mode,
    bool each,
    bool matmul,
    bool real) {
  const std::string name = join_overload(op_name, overload);
  const auto handle = find_overload(name);
  TORCH_CHECK_VALUE(handle.has_value(), "the dispatcher has no overload ", name);
  TORCH_CHECK_VALUE(handle->schema().arguments().size() < 64, name, " has too many arguments");
  const auto make = [&](OpNumber number) {
    TORCH_CHECK(number < kMostOps, "torch_promote: more than ", kMostOps, " ops have a policy or promote");
    return new PromotingOp{
        // never destroyed, like the kernels
        number,
        *handle,
        name,
        functional.empty() ? std::nullopt : find_overload(functional),
        participants,
        written_arguments(handle->schema()),
        static_cast<Computes>(computes),
        rounding_mode,
        each,
        matmul,
        real,
        boxed_kernel_of(number),
    };
  };
  const PromotingOp* op = nullptr;
  const OpNumber number = register_op(op_name, overload, [&](OpNumber new_number) {
    op = make(new_number);
    register_kernel(*op);
  });
  if (op == nullptr) { // the op already has a kernel
    if (number < kMostOps && promoting_op(number) != nullptr) {
      return;
    }
    op = make(number);
  }
  promoting_ops[number].store(op, std::memory_order_release);
}

} // namespace torch_promote
