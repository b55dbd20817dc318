// file: the kernels and casts that the stand-in device counts
#include "state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace cuda_stand_in {

namespace {

using at::Tensor;

bool is_foreach_copy(const c10::OperatorHandle& op) {
  return op.schema().name() == "aten::_foreach_copy_";
}

// Whether CUDA's kernel copies all tensors in one launch; otherwise it copies them one by one.
// Source: aten/src/ATen/native/cuda/ForeachBinaryOpList.cu, foreach_tensor_copy_list_kernel_cuda_ (v2.13)
bool takes_fast_route(const Copies& copies) {
  const Tensor& first = copies.front().first;
  const auto is_dense = [&first](const Tensor& tensor) {
    return tensor.device() == first.device() && tensor.is_non_overlapping_and_dense();
  };
  return std::all_of(copies.begin(), copies.end(), [&](const auto& copy) {
    const auto& [source, target] = copy;
    return is_dense(source) && is_dense(target) && source.scalar_type() == first.scalar_type() &&
           source.sizes() == target.sizes() && source.strides() == target.strides();
  });
}

bool is_leaf_with_gradient(const Tensor& tensor) {
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
  return owner.requires_grad() && owner.is_leaf();
}

} // namespace

Copies copies_of(const c10::OperatorHandle& op, const Stack& stack) {
  const c10::IValue* arguments = stack.data() + stack.size() - op.schema().arguments().size();
  if (op.schema().name() == "aten::copy_") {
    return {{arguments[1].toTensor(), arguments[0].toTensor()}};
  }
  Copies copies;
  if (is_foreach_copy(op)) {
    const auto targets = arguments[0].toTensorVector(), sources = arguments[1].toTensorVector();
    for (size_t at = 0; at < sources.size(); ++at) {
      copies.emplace_back(sources[at], targets.at(at));
    }
  }
  return copies;
}

void count(const c10::OperatorHandle& op, const Copies& copies) {
  const auto& name = op.operator_name();
  const bool one_by_one = is_foreach_copy(op) && !copies.empty() && !takes_fast_route(copies);
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (one_by_one) {
    state().kernels["aten::copy_"] += static_cast<int64_t>(copies.size());
  } else {
    state().kernels[name.overload_name.empty() ? name.name : name.name + "." + name.overload_name] += 1;
  }
  if (!state().notes_casts) {
    return;
  }
  for (const auto& [source, target] : copies) {
    if (source.is_cuda() && target.is_cuda() && source.scalar_type() != target.scalar_type()) {
      state().casts.push_back(
          {source.scalar_type(), target.scalar_type(), source.numel(), target.numel(), source.storage().data(),
           is_leaf_with_gradient(source), backward});
    }
  }
}

} // namespace cuda_stand_in

// The recorded casts, one line each. Valid until the thread calls it again.
extern "C" __attribute__((visibility("default"))) const char* stand_in_casts() {
  thread_local std::string text;
  text.clear();
  auto& state = cuda_stand_in::state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  for (const auto& cast : state.casts) {
    const auto number = [](auto value) { return " " + std::to_string(value); };
    text += std::string(c10::toString(cast.from)) + " " + c10::toString(cast.to) +
            number(cast.elements_read * static_cast<int64_t>(c10::elementSize(cast.from))) +
            number(cast.elements_written * static_cast<int64_t>(c10::elementSize(cast.to))) +
            number(reinterpret_cast<uintptr_t>(cast.source)) + number(int{cast.leaf}) + number(int{cast.backward}) +
            "\n";
  }
  return text.c_str();
}

// Starts or stops recording casts.
extern "C" __attribute__((visibility("default"))) void stand_in_note_casts(int on) {
  auto& state = cuda_stand_in::state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.notes_casts = on != 0;
  state.casts.clear();
}
