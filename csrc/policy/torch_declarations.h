// file: declarations of PyTorch functions whose own headers include all of ATen
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

// ATen/autocast_mode.h and ATen/CachedTensorUtils.h include ATen/ATen.h, which doubles the compile time of a unit. Each
// declaration must equal PyTorch's; tests/native/test_extension.py compares them.

namespace at::autocast {

TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API void set_autocast_enabled(at::DeviceType device_type, bool enabled);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API void set_autocast_dtype(at::DeviceType device_type, at::ScalarType dtype);
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API void clear_cache();
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);

} // namespace at::autocast

namespace at::caching {

TORCH_API bool is_cached_tensor(const at::Tensor& tensor);

} // namespace at::caching
