// file: `tensor.to(dtype)` without the layers of the dispatcher that a plain tensor does not need
#include "cast/cast.h"

#include "cast/cast_node.h"
#include "cast/cpu_convert.h"
#include "region/region.h"
#include "cast/small_blocks.h"
#include "cache/weight.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

namespace torch_promote {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// NOTE [ Straight casts ]
// `to` goes through the dispatcher four times: itself, `_to_copy`, `empty_strided` and `copy_`, the second of them with
// autograd above it. For a tensor that nobody but PyTorch's core looks into, all that comes of this is an allocation, a
// conversion, and a node where a gradient is wanted. Whether somebody looks is in the dispatch keys: of the tensor, and
// of the thread. These are the keys of ordinary computing; with any other one (a Python mode, a subclass, functorch, a
// fake or functional tensor, a tracer, our own tap, conjugate and negative bits, sparse and quantized tensors, ...) the
// cast goes the ordinary way. Forward-mode AD has no key; there the tensor tells.
constexpr DispatchKeySet kOrdinary = DispatchKeySet({
    DispatchKey::Dense,
    DispatchKey::AutogradFunctionality,
    DispatchKey::ADInplaceOrView,
    DispatchKey::BackendSelect,
    DispatchKey::AutocastCPU,
    DispatchKey::AutocastCUDA,
    kAutocastKey,
});

// Above this, TensorIterator's grain size, PyTorch's kernel may use several threads; and what the layers cost is
// nothing to what the cast does.
constexpr int64_t kSmall = 32768;

// A tensor of this geometry, which is dense, on the CPU.
at::Tensor empty_as(const at::TensorImpl& source, at::ScalarType dtype) {
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(dtype);
  const size_t bytes = static_cast<size_t>(source.numel()) * type.itemsize();
  c10::Allocator* const allocator = small_blocks();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, /*resizable=*/true);
  at::Tensor result =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), type);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides());
  return result;
}

// Undefined where the general kernel has to do it.
at::Tensor convert_small(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.is_cpu() || impl.numel() > kSmall || !is_convertible(tensor.scalar_type(), dtype) ||
      !impl.is_non_overlapping_and_dense()) {
    return {};
  }
  at::Tensor result = empty_as(impl, dtype);
  void* const data = result.unsafeGetTensorImpl()->mutable_data();
  const bool done = convert(impl.data(), tensor.scalar_type(), data, dtype, static_cast<size_t>(impl.numel()));
  return done ? result : at::Tensor();
}

at::Tensor convert_straight(const at::Tensor& tensor, at::ScalarType dtype) {
  if (at::Tensor result = convert_small(tensor, dtype); result.defined()) {
    return result;
  }
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return at::_ops::_to_copy::call(tensor, dtype, {}, {}, {}, false, {});
}

at::Tensor cast_straight(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!gets_node(tensor)) {
    return convert_straight(tensor, dtype);
  }
  const uint64_t sequence_nr = next_sequence_nr();
  at::Tensor result = convert_straight(tensor, dtype);
  put_in_graph(result, tensor, sequence_nr);
  return result;
}

} // namespace

bool has_only_ordinary_keys(DispatchKeySet keys) {
  return (keys.raw_repr() & ~(c10::full_backend_mask | kOrdinary.raw_repr())) == 0;
}

bool has_tangent(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->fw_grad_ != nullptr;
}

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  const c10::impl::LocalDispatchKeySet thread = c10::impl::tls_local_dispatch_key_set();
  if (!has_only_ordinary_keys((tensor.key_set() | thread.included_) - thread.excluded_) || has_tangent(tensor)) {
    return tensor.to(dtype);
  }
  auto profilers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (profilers.has_value()) {
    at::RecordFunction record(*std::move(profilers));
    const c10::IValue input(tensor);
    record.before("torch_promote::cast", c10::ArrayRef<const c10::IValue>(&input, 1));
    return cast_straight(tensor, dtype);
  }
  return cast_straight(tensor, dtype);
}

} // namespace torch_promote
