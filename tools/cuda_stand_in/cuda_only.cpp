// file: kernels that only CUDA has, made from ops that the CPU has
#include "state.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace cuda_stand_in {

namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// Disables autocast and autograd for the ops that a kernel calls.
struct InsideAKernel {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// --- the fused cells of LSTM and GRU. Formulas: aten/src/ATen/native/cuda/RNN.cu (v2.13)

// Kernels compute in float32 or float64.
Tensor wide(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

Tensor wide_or_zero(const Optional& tensor, const Tensor& like) {
  return tensor && tensor->defined() ? wide(*tensor) : wide(like).mul(0);
}

std::vector<Tensor> with_bias(const Tensor& gates, const Optional& bias, int64_t parts) {
  return (bias && bias->defined() ? wide(gates) + wide(*bias) : wide(gates)).chunk(parts, 1);
}

Tensor joined(const std::vector<Tensor>& parts, const Tensor& like) {
  return at::cat(parts, 1).to(like.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const Optional& b1, const Optional& b2) {
  const InsideAKernel inside;
  const auto x = with_bias(input_gates, b1, 4);
  const auto h = with_bias(hidden_gates, b2, 4);
  const Tensor i = (x[0] + h[0]).sigmoid(), f = (x[1] + h[1]).sigmoid();
  const Tensor g = (x[2] + h[2]).tanh(), o = (x[3] + h[3]).sigmoid();
  const Tensor cy = f * wide(cx) + i * g;
  const Tensor hy = o * cy.tanh();
  return {hy.to(cx.scalar_type()), cy.to(cx.scalar_type()), joined({i, f, g, o}, input_gates)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Optional& grad_hy,
    const Optional& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  const InsideAKernel inside;
  const auto gates = wide(workspace).chunk(4, 1);
  const Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const Tensor grad = wide_or_zero(grad_hy, cx);
  const Tensor tanh = wide(cy).tanh();
  const Tensor inner = grad * o * (1 - tanh * tanh) + wide_or_zero(grad_cy, cx);
  const Tensor grad_gates = joined(
      {inner * g * (1 - i) * i, inner * wide(cx) * (1 - f) * f, inner * i * (1 - g * g), grad * tanh * (1 - o) * o},
      workspace);
  return {grad_gates, (inner * f).to(cx.scalar_type()), has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const Optional& b1, const Optional& b2) {
  const InsideAKernel inside;
  const auto x = with_bias(input_gates, b1, 3);
  const auto h = with_bias(hidden_gates, b2, 3);
  const Tensor r = (x[0] + h[0]).sigmoid(), i = (x[1] + h[1]).sigmoid();
  const Tensor n = (x[2] + r * h[2]).tanh();
  const Tensor hy = n + i * (wide(hx) - n);
  return {hy.to(hx.scalar_type()), joined({r, i, n, wide(hx), h[2]}, input_gates)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const InsideAKernel inside;
  const auto saved = wide(workspace).chunk(5, 1);
  const Tensor &r = saved[0], &i = saved[1], &n = saved[2], &hx = saved[3], &hn = saved[4];
  const Tensor grad = wide(grad_hy);
  const Tensor grad_i = grad * (hx - n) * (1 - i) * i;
  const Tensor grad_n = grad * (1 - i) * (1 - n * n);
  const Tensor grad_r = grad_n * hn * (1 - r) * r;
  const Tensor input = joined({grad_r, grad_i, grad_n}, workspace);
  const Tensor hidden = joined({grad_r, grad_i, grad_n * r}, workspace);
  return {
      input, hidden, (grad * i).to(grad_hy.scalar_type()), has_bias ? input.sum(0) : Tensor(),
      has_bias ? hidden.sum(0) : Tensor()};
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
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("cudnn_convolution", cudnn_convolution);
  m.impl("cudnn_convolution_transpose", cudnn_convolution_transpose);
  m.impl("_scaled_dot_product_flash_attention", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
}

} // namespace cuda_stand_in
