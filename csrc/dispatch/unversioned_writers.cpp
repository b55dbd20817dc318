// file: ops that write weights without increasing their version
#include "dispatch/unversioned_writers.h"

#include "cache/thread_cache.h"
#include "policy/op_table.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_fused_adagrad_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <vector>

namespace torch_promote {

namespace {

using Tensors = std::vector<at::Tensor>;

// Runs the op, and drops the casts of the tensors that it wrote to, even if it raises.
template <class Op, class Written>
void run_and_forget(const Op& op, const Written& written) {
  const auto forget = [&] {
    if (any_casts()) {
      forget_casts(written());
    }
  };
  try {
    op();
  } catch (...) {
    forget();
    throw;
  }
  forget();
}

void add(Tensors& written, at::TensorList list) {
  written.insert(written.end(), list.begin(), list.end());
}
template <class Other>
void add(Tensors& /*written*/, const Other& /*argument*/) {}

template <class Op, class Schema = typename Op::schema>
struct FusedOptimizer;
template <class Op, class... Args>
struct FusedOptimizer<Op, void(Args...)> {
  static void call(c10::DispatchKeySet keys, Args... args) {
    run_and_forget(
        [&] { Op::redispatch(keys & c10::after_ADInplaceOrView_keyset, args...); },
        [&] {
          Tensors written; // includes gradients if there is a grad_scale
          (add(written, args), ...);
          return written;
        });
  }
};

void split_with_sizes_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Tensors written;
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensorList()) {
      add(written, value.toTensorVector());
    }
  }
  run_and_forget([&] { op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack); }, [&] { return written; });
}

// Never destroyed: TORCH_LIBRARY_IMPL would unregister each kernel at process exit.
torch::Library& library_on_version_key(const char* name_space) {
  return *new torch::Library(torch::Library::IMPL, name_space, c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
}

template <class... Ops>
void register_fused_optimizers() {
  torch::Library& aten = library_on_version_key("aten");
  (aten.impl(join_overload(Ops::name, Ops::overload_name).c_str(), &FusedOptimizer<Ops>::call), ...);
}

} // namespace

void register_unversioned_writers() {
  using namespace at::_ops;
  register_fused_optimizers<
      _fused_adagrad_, _fused_adagrad__tensor_lr, _fused_adam_, _fused_adam__tensor_lr, _fused_adamw_,
      _fused_adamw__tensor_lr, _fused_sgd_, _fused_sgd__tensor_lr>();
  library_on_version_key("fsdp").impl(
      "split_with_sizes_copy", torch::CppFunction::makeFromBoxedFunction<&split_with_sizes_copy>());
}

} // namespace torch_promote
