// file: aten::flex_attention, an op that stands for the higher-order operator of that name and casts its tensors
#include "policy/dispatch_state.h"
#include "policy/op_table.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <tuple>

// ATen/autocast_mode.h includes every operator.
namespace at::autocast {

TORCH_API at::Tensor cached_cast(at::ScalarType dtype, const at::Tensor& tensor, at::DeviceType device_type);

} // namespace at::autocast

namespace torch_promote {

// NOTE [ An op for flex_attention ]
// flex_attention takes functions, so it has no schema, and its dispatch table is in Python. PyTorch has kernels for it
// on AutocastCPU and AutocastCUDA. The op table, overrides and observers know the ops of the dispatcher only, so this
// library defines one, which returns its arguments. The kernel of flex_attention on kAutocastKey
// (torch_promote/integrations/higher_order_ops.py) calls this op, whose policy casts, in the place of PyTorch's
// kernels.
namespace {

constexpr const char* kName = "aten::flex_attention";

using Casts = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Casts pass_on(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return {query, key, value};
}

// As PyTorch's kernels of flex_attention cast.
template <Device device>
Casts cast_as_stock(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(stock_key_of(device));
  constexpr c10::DeviceType type = device_type_of(device);
  const auto cast = [](const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(type), tensor, type);
  };
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kName, "").typed<decltype(pass_on)>();
  // The order of PyTorch's kernels; arguments of one call have none.
  const at::Tensor first = cast(query);
  const at::Tensor second = cast(key);
  return op.call(first, second, cast(value));
}

template <Device device>
void register_stock() {
  static torch::Library& library = *new torch::Library(
      torch::Library::IMPL, "aten", kDeviceKeys[static_cast<size_t>(device)].key, "torch_promote", __LINE__);
  library.impl("flex_attention", &cast_as_stock<device>);
}

} // namespace

void define_flex_attention() {
  if (c10::Dispatcher::singleton().findSchema({kName, ""})) {
    return; // this PyTorch has the op itself
  }
  static torch::Library& aten =
      *new torch::Library(torch::Library::FRAGMENT, "aten", std::nullopt, "torch_promote", __LINE__);
  aten.def("flex_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)", &pass_on);
  register_stock<Device::cpu>();
  register_stock<Device::cuda>();
}

} // namespace torch_promote
