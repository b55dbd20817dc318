// file: ops that write weights without bumping their version
#include "unversioned_writers.h"

#include "cast_cache.h"
#include "region.h"
#include "register.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <string>
#include <string_view>
#include <vector>

namespace torch_promote {

namespace {

// The tensors that the op's schema says it writes.
std::vector<at::Tensor> written_by(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  std::vector<at::Tensor> written;
  const auto& arguments = schema.arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      continue;
    }
    const c10::IValue& value = stack[first + i];
    if (value.isTensor()) {
      written.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      const std::vector<at::Tensor> tensors = value.toTensorVector();
      written.insert(written.end(), tensors.begin(), tensors.end());
    }
  }
  return written;
}

void forget_and_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  forget_casts_of(written_by(op.schema(), *stack));
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kOurKey), stack);
}

void register_writers(torch::Library& library, std::string_view name_space) {
  for (const std::string_view name : kUnversionedWriters) {
    if (name.substr(0, name_space.size()) == name_space) {
      library.impl(name.data() + name_space.size(), torch::CppFunction::makeFromBoxedFunction<&forget_and_call>());
    }
  }
}

} // namespace

void register_unversioned_writers() {
  for (const char* name_space : {"aten", "fsdp"}) {
    register_writers(library_on_our_key(name_space), std::string(name_space) + "::");
  }
}

} // namespace torch_promote
