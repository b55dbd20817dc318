// file: `tensor.to(dtype)` without the layers of the dispatcher that a plain tensor does not need
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_promote {

// The tensor in another dtype: the same bits, strides and gradients as of `tensor.to(dtype)`, whoever looks on.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

} // namespace torch_promote
