// file: the kernels of promoting ops on kAutocastKey, typed for common signatures
#include "dispatch/promotion_kernels.h"

#include "dispatch/boxed_wrapper.h"
#include "dispatch/decision.h"
#include "policy/op_table.h"
#include "promotion/call.h"

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

bool autocast_is_off() {
  const c10::DispatchKeySet off = c10::impl::tls_local_dispatch_key_set().excluded_;
  return off.has(stock_key_of(Device::cpu)) && off.has(stock_key_of(Device::cuda));
}

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
    const bool has_policy = table.lookup(Device::cpu, op_->number) != to_byte(CastPolicy::unlisted) ||
                            table.lookup(Device::cuda, op_->number) != to_byte(CastPolicy::unlisted);
    if (!has_policy) {
      const PromotingOp* acted = acted_on(table.promotion.rule, op_->number);
      if (acted == nullptr) {
        return handle_.redispatch(keys & kBelowAutocastKey, std::forward<Args>(args)...);
      }
      keep_if_traced(table);
      if (PlainCall(*op_, *table.promotion.rule).is_plain(args...)) {
        const InsidePromoted inside;
        if constexpr ((is_tensor_list<Args> || ...)) {
          // On the CPU these ops call another op for each element. With autocast off, the kernels on kAutocastKey would
          // do nothing for those calls.
          if (autocast_is_off()) {
            const c10::impl::ExcludeDispatchKeyGuard no_key(kAutocastKey);
            return handle_.redispatch(keys & kBelowAutocastKey, std::forward<Args>(args)...);
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

// The letter of an argument in kSignatures:
//   T tensor   W tensor that the op writes to   t optional tensor
//   L list of tensors             M list of tensors that the op writes to
//   N number   n optional number  S list of numbers
//   s optional string             ? any other type
char letter_of(const c10::Argument& argument) {
  const auto optional = argument.real_type()->cast<c10::OptionalType>();
  const c10::TypePtr type = optional ? optional->getElementType() : argument.real_type();
  const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  switch (type->kind()) {
    case c10::TypeKind::ListType:
      switch (type->expectRef<c10::ListType>().getElementType()->kind()) {
        case c10::TypeKind::TensorType:
          return written ? 'M' : optional ? '?' : 'L';
        case c10::TypeKind::NumberType:
          return optional ? '?' : 'S';
        default:
          return '?';
      }
    case c10::TypeKind::TensorType:
      return written ? 'W' : optional ? 't' : 'T';
    case c10::TypeKind::NumberType:
      return optional ? 'n' : 'N';
    case c10::TypeKind::StringType:
      return optional ? 's' : '?';
    default:
      return '?';
  }
}

std::string letters_of(const c10::FunctionSchema& schema) {
  std::string letters;
  for (const c10::Argument& argument : schema.arguments()) {
    letters += letter_of(argument);
  }
  letters += '>';
  for (const c10::Argument& result : schema.returns()) {
    letters += letter_of(result);
  }
  return letters;
}

using T = const at::Tensor&;
using W = at::Tensor&;
using N = const at::Scalar&;
using OptT = const std::optional<at::Tensor>&;
using OptN = const std::optional<at::Scalar>&;
using OptS = std::optional<std::string_view>;
using L = at::TensorList;
using S = at::ArrayRef<at::Scalar>;
using Made = std::vector<at::Tensor>;

template <class Signature>
torch::CppFunction typed(const PromotingOp& op) {
  return torch::CppFunction(TypedKernel<Signature>(op));
}

using MakeKernel = torch::CppFunction (*)(const PromotingOp&);

struct TypedSignature {
  const char* letters;
  MakeKernel make;
};

constexpr TypedSignature kSignatures[] = {
    {"T>T", &typed<at::Tensor(T)>},
    {"W>W", &typed<at::Tensor&(W)>},
    {"TW>W", &typed<at::Tensor&(T, W)>},
    {"TT>T", &typed<at::Tensor(T, T)>},
    {"WT>W", &typed<at::Tensor&(W, T)>},
    {"TTW>W", &typed<at::Tensor&(T, T, W)>},
    {"TTT>T", &typed<at::Tensor(T, T, T)>},
    {"WTT>W", &typed<at::Tensor&(W, T, T)>},
    {"TTTW>W", &typed<at::Tensor&(T, T, T, W)>},
    {"TTN>T", &typed<at::Tensor(T, T, N)>},
    {"WTN>W", &typed<at::Tensor&(W, T, N)>},
    {"TTNW>W", &typed<at::Tensor&(T, T, N, W)>},
    {"TTTN>T", &typed<at::Tensor(T, T, T, N)>},
    {"WTTN>W", &typed<at::Tensor&(W, T, T, N)>},
    {"TTTNW>W", &typed<at::Tensor&(T, T, T, N, W)>},
    {"TTs>T", &typed<at::Tensor(T, T, OptS)>},
    {"WTs>W", &typed<at::Tensor&(W, T, OptS)>},
    {"TTsW>W", &typed<at::Tensor&(T, T, OptS, W)>},
    {"TN>T", &typed<at::Tensor(T, N)>},
    {"WN>W", &typed<at::Tensor&(W, N)>},
    {"TNW>W", &typed<at::Tensor&(T, N, W)>},
    {"TNN>T", &typed<at::Tensor(T, N, N)>},
    {"WNN>W", &typed<at::Tensor&(W, N, N)>},
    {"TNNW>W", &typed<at::Tensor&(T, N, N, W)>},
    {"NT>T", &typed<at::Tensor(N, T)>},
    {"NTW>W", &typed<at::Tensor&(N, T, W)>},
    {"Tnn>T", &typed<at::Tensor(T, OptN, OptN)>},
    {"Wnn>W", &typed<at::Tensor&(W, OptN, OptN)>},
    {"TnnW>W", &typed<at::Tensor&(T, OptN, OptN, W)>},
    {"Ttt>T", &typed<at::Tensor(T, OptT, OptT)>},
    {"Wtt>W", &typed<at::Tensor&(W, OptT, OptT)>},
    {"TttW>W", &typed<at::Tensor&(T, OptT, OptT, W)>},
    {"TTTNN>T", &typed<at::Tensor(T, T, T, N, N)>},
    {"WTTNN>W", &typed<at::Tensor&(W, T, T, N, N)>},
    {"TTTNNW>W", &typed<at::Tensor&(T, T, T, N, N, W)>},
    {"L>L", &typed<Made(L)>},
    {"M>", &typed<void(L)>},
    {"LL>L", &typed<Made(L, L)>},
    {"ML>", &typed<void(L, L)>},
    {"LN>L", &typed<Made(L, N)>},
    {"MN>", &typed<void(L, N)>},
    {"LS>L", &typed<Made(L, S)>},
    {"MS>", &typed<void(L, S)>},
    {"LT>L", &typed<Made(L, T)>},
    {"MT>", &typed<void(L, T)>},
    {"LLN>L", &typed<Made(L, L, N)>},
    {"MLN>", &typed<void(L, L, N)>},
    {"LTN>L", &typed<Made(L, T, N)>},
    {"MTN>", &typed<void(L, T, N)>},
    {"LLL>L", &typed<Made(L, L, L)>},
    {"MLL>", &typed<void(L, L, L)>},
    {"LLLN>L", &typed<Made(L, L, L, N)>},
    {"MLLN>", &typed<void(L, L, L, N)>},
    {"LLLS>L", &typed<Made(L, L, L, S)>},
    {"MLLS>", &typed<void(L, L, L, S)>},
    {"LLLT>L", &typed<Made(L, L, L, T)>},
    {"MLLT>", &typed<void(L, L, L, T)>},
    {"LLS>L", &typed<Made(L, L, S)>},
    {"MLS>", &typed<void(L, L, S)>},
};

torch::CppFunction kernel_of(const PromotingOp& op) {
  const std::string letters = letters_of(op.handle.schema());
  for (const TypedSignature& signature : kSignatures) {
    if (letters == signature.letters) {
      return signature.make(op);
    }
  }
  return torch::CppFunction::makeFromBoxedKernel(op.boxed);
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

void register_promoting_op(const PromotingOpRequest& request) {
  const std::string name = join_overload(request.op, request.overload);
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
        request.functional.empty() ? std::nullopt : find_overload(request.functional),
        request.participants,
        written_arguments(handle->schema()),
        request.computes,
        request.rounding_mode,
        request.each,
        request.matmul,
        boxed_kernel_of(number),
    };
  };
  const PromotingOp* op = nullptr;
  const OpNumber number = register_op(request.op, request.overload, [&](OpNumber new_number) {
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
