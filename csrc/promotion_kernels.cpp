// file: the kernels that promoting ops get on our key, typed where their signature is a common one
#include "promotion_kernels.h"

#include "decision.h"
#include "promotion_call.h"
#include "register.h"

#include <ATen/core/boxing/impl/boxing.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace torch_promote {

namespace {

// What boxing a call costs is more than what a rule has to do where all operands are of one dtype. So the signatures of
// arithmetic have a kernel without it; it boxes what is not plain.
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
      const PromotingOp* acted = acted_on(table.promotion, op_->number);
      if (acted == nullptr) {
        return handle_.redispatch(keys & kBelowOurs, std::forward<Args>(args)...);
      }
      if (PlainCall(*op_, *table.promotion).is_plain(args...)) {
        const InsidePromoted inside;
        return handle_.redispatch(keys & kBelowOurs, std::forward<Args>(args)...);
      }
    }
    return c10::impl::BoxedKernelWrapper<Result(Args...)>::call(
        op_->boxed, op_->handle, keys, std::forward<Args>(args)...);
  }

 private:
  const PromotingOp* op_;
  c10::TypedOperatorHandle<Result(Args...)> handle_;
};

// A schema's arguments, a letter each: T a tensor, t an optional one, W a tensor that is written, N a number, n an
// optional one, s an optional string, ? anything else.
char letter_of(const c10::Argument& argument) {
  const auto optional = argument.real_type()->cast<c10::OptionalType>();
  const c10::TypeKind kind = (optional ? optional->getElementType() : argument.real_type())->kind();
  const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  switch (kind) {
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
    letters += argument.kwarg_only() && letter_of(argument) == 'W' ? '?' : letter_of(argument); // out= is rare
  }
  const bool returns_tensor =
      schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::TensorType;
  return returns_tensor ? letters : "?";
}

using T = const at::Tensor&;
using W = at::Tensor&;
using N = const at::Scalar&;
using OptT = const std::optional<at::Tensor>&;
using OptN = const std::optional<at::Scalar>&;
using OptS = std::optional<std::string_view>;

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
    {"T", &typed<at::Tensor(T)>},
    {"TT", &typed<at::Tensor(T, T)>},
    {"TTT", &typed<at::Tensor(T, T, T)>},
    {"TTN", &typed<at::Tensor(T, T, N)>},
    {"TTTN", &typed<at::Tensor(T, T, T, N)>},
    {"TTs", &typed<at::Tensor(T, T, OptS)>},
    {"TN", &typed<at::Tensor(T, N)>},
    {"TNN", &typed<at::Tensor(T, N, N)>},
    {"NT", &typed<at::Tensor(N, T)>},
    {"Tnn", &typed<at::Tensor(T, OptN, OptN)>},
    {"Ttt", &typed<at::Tensor(T, OptT, OptT)>},
    {"W", &typed<at::Tensor&(W)>},
    {"WT", &typed<at::Tensor&(W, T)>},
    {"WTT", &typed<at::Tensor&(W, T, T)>},
    {"WTN", &typed<at::Tensor&(W, T, N)>},
    {"WTTN", &typed<at::Tensor&(W, T, T, N)>},
    {"WTs", &typed<at::Tensor&(W, T, OptS)>},
    {"WN", &typed<at::Tensor&(W, N)>},
    {"WNN", &typed<at::Tensor&(W, N, N)>},
    {"Wnn", &typed<at::Tensor&(W, OptN, OptN)>},
    {"Wtt", &typed<at::Tensor&(W, OptT, OptT)>},
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

} // namespace

void register_kernel(const PromotingOp& op) {
  const size_t colons = op.name.find("::");
  static torch::Library& aten = library_on_our_key("aten");
  TORCH_CHECK(op.name.starts_with("aten::"), op.name, " is not an op of PyTorch's own");
  aten.impl(op.name.substr(colons + 2).c_str(), kernel_of(op));
}

} // namespace torch_promote
