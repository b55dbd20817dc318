// file: what CUDA has kernels for and the CPU has not, put together from ops that both have
#include "state.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace cuda_stand_in {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A kernel of CUDA's would call no ops: nothing acts on those that these call.
struct InsideAKernel {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// --- softmax with a result in float32 from an argument in half precision

void softmax_half_to_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (stack->back().toBool()) {
    const InsideAKernel inside;
    c10::IValue& self = (*stack)[stack->size() - 3];
    self = self.toTensor().to(at::kFloat);
    stack->back() = false;
  }
  run_on_cpu(op, stack);
}

void softmax_backward_to_half(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::ScalarType wanted = stack->back().toScalarType();
  const at::ScalarType given = (*stack)[stack->size() - 4].toTensor().scalar_type();
  stack->back() = given;
  run_on_cpu(op, stack);
  if (wanted != given) {
    const InsideAKernel inside;
    stack->back() = stack->back().toTensor().to(wanted);
  }
}

// --- cells

Tensor joined(std::initializer_list<Tensor> parts) {
  return at::cat(at::ITensorListRef(at::TensorList(parts)), 1);
}

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

Tensor or_zeros(const OptionalTensor& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : like * 0;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const InsideAKernel inside;
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, joined({i, f, g, o})};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy,
    const OptionalTensor& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  const InsideAKernel inside;
  const auto gates = workspace.chunk(4, 1);
  const Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const Tensor hy = or_zeros(grad_hy, cx), tanh_cy = cy.tanh();
  const Tensor c = hy * o * (1 - tanh_cy * tanh_cy) + or_zeros(grad_cy, cx);
  const Tensor grad_gates =
      joined({c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), hy * tanh_cy * o * (1 - o)});
  return {grad_gates, c * f, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const InsideAKernel inside;
  const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor r = (of_input[0] + of_hidden[0]).sigmoid(), z = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor n = (of_input[2] + r * of_hidden[2]).tanh();
  return {n + z * (hx - n), joined({r, z, n, hx, of_hidden[2]})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const InsideAKernel inside;
  const auto parts = workspace.chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hidden_n = parts[4];
  const Tensor in_n = grad * (1 - z) * (1 - n * n), in_z = grad * (hx - n) * z * (1 - z);
  const Tensor in_r = in_n * hidden_n * r * (1 - r);
  const Tensor of_input = joined({in_r, in_z, in_n}), of_hidden = joined({in_r, in_z, in_n * r});
  return {of_input, of_hidden, grad * z, has_bias ? of_input.sum(0) : Tensor(), has_bias ? of_hidden.sum(0) : Tensor()};
}

// --- cuDNN's convolutions

Tensor cudnn_convolution(
    const Tensor& self,
    const Tensor& weight,
    at::IntArrayRef padding,
    at::IntArrayRef stride,
    at::IntArrayRef dilation,
    int64_t groups,
    bool,
    bool,
    bool) {
  const InsideAKernel inside;
  return at::convolution(self, weight, {}, stride, padding, dilation, false, {0}, groups);
}

Tensor cudnn_convolution_transpose(
    const Tensor& self,
    const Tensor& weight,
    at::IntArrayRef padding,
    at::IntArrayRef output_padding,
    at::IntArrayRef stride,
    at::IntArrayRef dilation,
    int64_t groups,
    bool,
    bool,
    bool) {
  const InsideAKernel inside;
  return at::convolution(self, weight, {}, stride, padding, dilation, true, output_padding, groups);
}

// The kernel for all devices would look for one of CUDA.
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_cpu(op, stack);
}

// --- attention

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    double dropout_p,
    bool is_causal,
    bool,
    std::optional<double> scale) {
  const InsideAKernel inside;
  TORCH_CHECK(
      query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16,
      "FlashAttention only support fp16 and bf16 data type");
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, {}, scale);
  // For one length of sequence, CUDA's has no cumulative lengths either. Nothing is drawn: there is no random state.
  const Tensor state = query.new_empty({0}, at::kLong);
  return {output,          logsumexp, Tensor(),      Tensor(),     query.sym_size(2),
          key.sym_size(2), state,     state.clone(), state.clone()};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& out,
    const Tensor& logsumexp,
    const Tensor&,
    const Tensor&,
    c10::SymInt,
    c10::SymInt,
    double dropout_p,
    bool is_causal,
    const Tensor&,
    const Tensor&,
    std::optional<double> scale) {
  const InsideAKernel inside;
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, logsumexp, dropout_p, is_causal, {}, scale);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"_softmax", "_log_softmax"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_half_to_float>());
  }
  for (const char* name : {"_softmax_backward_data", "_log_softmax_backward_data"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward_to_half>());
  }
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("cudnn_convolution", cudnn_convolution);
  m.impl("cudnn_convolution_transpose", cudnn_convolution_transpose);
  m.impl("_scaled_dot_product_flash_attention", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
}

} // namespace cuda_stand_in
