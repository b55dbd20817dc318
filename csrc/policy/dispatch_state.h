// file: the dispatch keys of this library and of stock autocast, and PyTorch's functions that get and set their state
#pragma once

#include "policy/op_table.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

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

} // namespace at::autocast

namespace at::caching {

TORCH_API bool is_cached_tensor(const at::Tensor& tensor);

} // namespace at::caching

namespace torch_promote {

constexpr c10::DispatchKey kAutocastKey = c10::DispatchKey::AutocastPrivateUse1;

// NOTE [ Inside kernels ]
// PyTorch's kernels call ops on temporary tensors and read the results through raw pointers of the dtype that they
// passed: `median` clones its argument and sorts the clone's floats. If a policy changed the dtype there, the kernel
// would read garbage or write out of bounds. So inside a kernel, policies other than stock's cast nothing, and
// promotion rules do not act. Stock's policies act there as they do in stock. Composite ops, which call other ops and
// touch no data, do not count as kernels.
//
// Detection: the autograd kernel of an op excludes ADInplaceOrView while the op's own kernel runs, with or without
// gradients. All but a dozen of the 2,176 ops with a kernel have an autograd kernel. In inference mode PyTorch skips
// autograd kernels, so a kernel's calls look like any others. Nearly all of these calls only move data; ops that only
// move data therefore have no casting policy in any mode (torch_promote/policy/overrides.py). The few ops whose kernels
// call ops that compute, and depend on their dtype, are marked by a kernel of ours (kClosedOps).
// functorch excludes the key as well while it interprets a level; there the policy applies when the call reaches the
// level below.
inline bool inside_kernel(c10::DispatchKeySet excluded) {
  return excluded.has(c10::DispatchKey::ADInplaceOrView);
}
inline bool inside_kernel() {
  return inside_kernel(c10::impl::tls_local_dispatch_key_set().excluded_);
}

} // namespace torch_promote
