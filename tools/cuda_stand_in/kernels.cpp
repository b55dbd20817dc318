// file: the kernels of the stand-in device: the CPU's, on CPU tensors over the same memory
#include "state.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_to_copy_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>
#include <vector>

namespace cuda_stand_in {

namespace {

using at::Tensor;
using c10::IValue;

constexpr c10::DispatchKeySet lazy_bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

void copy_geometry(const Tensor& from, const Tensor& to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

// One call of an op, carried out by the CPU's kernel.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(Stack* stack) {
    const Copies copies = copies_of(op_, *stack);
    const size_t arguments = op_.schema().arguments().size();
    for (auto it = stack->end() - static_cast<int64_t>(arguments); it != stack->end(); ++it) {
      *it = on_cpu(*it);
    }
    replace_half_to_float(stack);
    narrow_statistics(stack);
    {
      // The kernel may call other ops. A CUDA kernel's would see CUDA's autocast state, and these are of the CPU.
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    for (const Pair& pair : pairs_) {
      write_back(pair);
    }
    if (result_dtype_) {
      convert(stack->back(), *result_dtype_);
    }
    widen_statistics(stack);
    const size_t results = op_.schema().returns().size();
    for (auto it = stack->end() - static_cast<int64_t>(results); it != stack->end(); ++it) {
      *it = on_cuda(*it);
    }
    if (!only_views()) {
      count(op_, copies);
    }
  }

 private:
  struct Pair {
    Tensor cuda;
    Tensor cpu;
    c10::Storage storage; // the CPU tensor's, before the op ran
    const void* data;
    size_t bytes;
  };

  // --- arguments

  IValue on_cpu(const IValue& value) {
    if (value.isTensor()) {
      return on_cpu(value.toTensor());
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      found(value.toDevice());
      return c10::Device(c10::kCPU);
    }
    if (value.isList()) {
      auto list = value.toList().copy();
      for (const auto i : c10::irange(list.size())) {
        if (const IValue element = list.get(i); element.isTensor()) {
          list.set(i, on_cpu(element.toTensor()));
        }
      }
      return list;
    }
    return value;
  }

  Tensor on_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return tensor;
    }
    found(tensor.device());
    for (const Pair& pair : pairs_) {
      if (pair.cuda.is_same(tensor)) {
        return pair.cpu;
      }
    }
    const Tensor cpu = at::detail::make_tensor<c10::TensorImpl>(
        storage_on_cpu(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    copy_geometry(tensor, cpu);
    if (tensor.is_conj()) {
      cpu._set_conj(true);
    }
    if (tensor.is_neg()) {
      cpu._set_neg(true);
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    pairs_.push_back({tensor, cpu, cpu.storage(), cpu.storage().data(), cpu.storage().nbytes()});
    return cpu;
  }

  c10::Storage storage_on_cpu(const c10::Storage& cuda) {
    for (const Pair& pair : pairs_) {
      if (pair.cuda.storage().is_alias_of(cuda)) {
        return pair.storage;
      }
    }
    // It keeps the original's memory for as long as an op keeps it.
    auto owner = std::make_unique<c10::Storage>(cuda);
    void* data = cuda.mutable_data();
    c10::DataPtr host(
        data, owner.release(), [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::kCPU);
    return {
        c10::Storage::use_byte_size_t(), cuda.nbytes(), std::move(host), c10::GetAllocator(c10::kCPU),
        /*resizable=*/true};
  }

  void found(c10::Device device) {
    device = {c10::kCUDA, index_of(device)};
    TORCH_CHECK(
        !device_ || *device_ == device || op_.schema().name().ends_with("copy_"),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ", device,
        "! (", op_.schema().name(), " on the stand-in)");
    device_ = device_ ? device_ : device;
  }

  // CUDA's softmax of a half tensor can give float32 without an intermediate tensor. The CPU's kernels cannot, and the
  // backward kernel would write float32 into memory for halves.
  void replace_half_to_float(Stack* stack) {
    const std::string& name = op_.schema().name();
    if ((name == "aten::_softmax" || name == "aten::_log_softmax") && stack->back().toBool()) {
      convert((*stack)[stack->size() - 3], at::kFloat);
      stack->back() = false;
    } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
      const at::ScalarType grad = (*stack)[stack->size() - 4].toTensor().scalar_type();
      const auto input = static_cast<at::ScalarType>(stack->back().toInt());
      if (grad != input) {
        result_dtype_ = input;
        stack->back() = static_cast<int64_t>(grad);
      }
    }
  }

  // CUDA's batch norm of halves has its statistics in float32, but the CPU's only if the weights are in float32.
  void widen_statistics(Stack* stack) {
    const std::string& name = op_.schema().name();
    const auto& returns = op_.schema().returns();
    if ((name == "aten::native_batch_norm" || name == "aten::_native_batch_norm_legit" ||
         name == "aten::_batch_norm_with_update") &&
        returns[0].alias_info() == nullptr) {
      convert((*stack)[stack->size() - returns.size() + 1], at::kFloat);
      convert((*stack)[stack->size() - returns.size() + 2], at::kFloat);
    }
  }

  void narrow_statistics(Stack* stack) {
    if (op_.schema().name() != "aten::native_batch_norm_backward" &&
        op_.schema().name() != "aten::batch_norm_backward") {
      return;
    }
    IValue* arguments = &(*stack)[stack->size() - op_.schema().arguments().size()];
    const at::ScalarType input = arguments[1].toTensor().scalar_type();
    const bool in_float = std::any_of(arguments + 2, arguments + 5, [](const IValue& value) {
      return value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kFloat;
    });
    if (!in_float && at::isReducedFloatingType(input)) {
      convert(arguments[5], input);
      convert(arguments[6], input);
    }
  }

  static void convert(IValue& value, at::ScalarType dtype) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() != dtype &&
        value.toTensor().scalar_type() != at::kDouble) {
      value = at::_ops::_to_copy::redispatch(
          c10::DispatchKeySet(c10::DispatchKey::CPU), value.toTensor(), dtype, {}, {}, {}, false, {});
    }
  }

  // --- results

  // Writes back tensors that the op resized or moved to another storage.
  void write_back(const Pair& pair) {
    const c10::Storage& now = pair.cpu.storage();
    const c10::Storage& original = pair.cuda.storage();
    if (!now.is_alias_of(pair.storage)) {
      const Pair* other = pair_of(now);
      pair.cuda.unsafeGetTensorImpl()->set_storage_keep_dtype(other ? other->cuda.storage() : adopt_once(now));
    } else if (
        (now.data() != pair.data || now.nbytes() != pair.bytes) &&
        (now.data() != original.data() || now.nbytes() != original.nbytes())) {
      replace_memory(original, now);
    }
    if (pair.cpu.sizes() != pair.cuda.sizes() || pair.cpu.strides() != pair.cuda.strides() ||
        pair.cpu.storage_offset() != pair.cuda.storage_offset()) {
      copy_geometry(pair.cpu, pair.cuda);
    }
  }

  IValue on_cuda(const IValue& value) {
    if (value.isTensor()) {
      return on_cuda(value.toTensor());
    }
    if (value.isList()) {
      auto list = value.toList();
      for (const auto i : c10::irange(list.size())) {
        if (const IValue element = list.get(i); element.isTensor()) {
          list.set(i, on_cuda(element.toTensor()));
        }
      }
    }
    return value;
  }

  Tensor on_cuda(const Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    for (const Pair& pair : pairs_) {
      if (pair.cpu.is_same(result)) {
        return pair.cuda;
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == c10::kStrided && !result.is_quantized() && result.has_storage(),
        "the stand-in has dense tensors only, and ", op_.schema().name(), " returns another kind");
    if (result._is_zerotensor()) {
      return zeros_without_memory(result);
    }
    const c10::DispatchKeySet bits = result.key_set() & lazy_bits;
    Tensor tensor;
    if (const Pair* source = pair_of(result.storage())) {
      // With the argument's keys: in inference mode, a view of a normal tensor is a normal tensor.
      tensor = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(source->cuda.storage()), (source->cuda.key_set() - lazy_bits) | bits,
          result.dtype());
    } else {
      tensor = at::detail::make_tensor<c10::TensorImpl>(
          adopt_once(result.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA) | bits, result.dtype());
    }
    copy_geometry(result, tensor);
    return tensor;
  }

  // Some derivatives are zeros with a shape but without memory.
  Tensor zeros_without_memory(const Tensor& result) const {
    const c10::Device device(c10::kCUDA, index_of(device_));
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), result.storage().nbytes(), c10::DataPtr(nullptr, device), nullptr, false);
    const Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage),
        result.key_set().remove_backend(c10::BackendComponent::CPUBit) | c10::DispatchKeySet(c10::DispatchKey::CUDA),
        result.dtype());
    copy_geometry(result, tensor);
    return tensor;
  }

  const Pair* pair_of(const c10::Storage& cpu) const {
    for (const Pair& pair : pairs_) {
      if (pair.storage.is_alias_of(cpu)) {
        return &pair;
      }
    }
    return nullptr;
  }

  c10::Storage adopt_once(const c10::Storage& cpu) {
    for (const auto& [from, to] : adopted_) {
      if (from.is_alias_of(cpu)) {
        return to;
      }
    }
    adopted_.emplace_back(cpu, adopt(cpu, index_of(device_)));
    return adopted_.back().second;
  }

  bool only_views() const {
    const auto& returns = op_.schema().returns();
    return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
      return result.alias_info() != nullptr && !result.alias_info()->isWrite();
    });
  }

  const c10::OperatorHandle& op_;
  std::vector<Pair> pairs_;
  std::vector<std::pair<c10::Storage, c10::Storage>> adopted_;
  std::optional<c10::Device> device_;
  std::optional<at::ScalarType> result_dtype_; // if not the kernel's
};

bool starts_with_foreach(const c10::OperatorName& name) {
  // PyTorch generates the `out` variants, and the functional `_foreach_copy`, without kernels.
  return name.name.starts_with("aten::_foreach_") && name.name != "aten::_foreach_copy" &&
         !name.overload_name.ends_with("out");
}

// Source: aten/src/ATen/native/cuda/Foreach*.cu, increment_version (v2.13). What runs on the CPU increases the versions
// of its own tensors.
std::vector<Tensor> written_by_foreach(const c10::OperatorHandle& op, const Stack& stack) {
  if (!starts_with_foreach(op.operator_name()) || !op.schema().name().ends_with('_')) {
    return {};
  }
  return torch::jit::peek(stack, 0, op.schema().arguments().size()).toTensorVector();
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const std::vector<Tensor> written = written_by_foreach(op, *stack);
  run_or_record(op, stack, [](const c10::OperatorHandle& kernel, Stack* values) { Call(kernel).run(values); });
  for (const Tensor& tensor : written) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

void no(const c10::OperatorHandle& op, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(false);
}

} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // Their kernels for all devices would look for CUDA's own.
  for (const char* name : {"copy_", "convolution", "_convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  for (const char* name :
       {"_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no>());
  }
  // A kernel for all devices would come before the fallback. CUDA has a kernel of its own where the CPU has one, and
  // for lists of tensors.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() == "aten" &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || starts_with_foreach(name)) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))) {
      m.impl(
          (name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
          torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
  }
}

} // namespace cuda_stand_in
