// file: collectives, which write without increasing versions
#include "dispatch/collectives.h"

#include "cache/thread_cache.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <vector>

namespace torch_promote {

namespace {

constexpr std::array kCollectives = {
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::allgather_",
    "c10d::allgather_coalesced_",
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_",
    "c10d::allreduce_coalesced_",
    "c10d::alltoall_",
    "c10d::alltoall_base_",
    "c10d::broadcast_",
    "c10d::gather_",
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::reduce_",
    "c10d::reduce_scatter_",
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::scatter_",
    "_c10d_functional::all_reduce_",
    "_c10d_functional::all_reduce_coalesced_",
    "_c10d_functional::broadcast_",
};

// Adds the tensors in an argument: one, a list, or a list of lists.
void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      add_tensors(element, tensors);
    }
  }
}

// The schemas of most collectives do not declare which arguments they write to, so the casts of all arguments are
// dropped.
void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    add_tensors(value, tensors);
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  forget_casts(tensors);
}

} // namespace

void watch_collectives() {
  static const bool once = [] {
    for (const std::string name : kCollectives) {
      const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
      // If a PyTorch release has a kernel there, that kernel increases the version.
      if (op.has_value() && !op->hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
        const size_t colons = name.find("::");
        auto* library = new torch::Library( // never destroyed: that would unregister the kernel at process exit
            torch::Library::IMPL, name.substr(0, colons), c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
        library->impl(name.substr(colons + 2).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_collective>());
      }
    }
    return true;
  }();
  (void)once;
}

} // namespace torch_promote
