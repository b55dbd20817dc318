// file: `tensor.to(dtype)` without the layers of the dispatcher that a plain tensor does not need
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_promote {

// Whether these are the dispatch keys of ordinary computing alone. See NOTE [ Straight casts ].
bool has_only_ordinary_keys(c10::DispatchKeySet keys);

// Whether forward-mode AD has a tangent for the tensor.
bool has_tangent(const at::Tensor& tensor);

// The tensor in another dtype: the same bits, strides and gradients as of `tensor.to(dtype)`, whoever looks on.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

} // namespace torch_promote
