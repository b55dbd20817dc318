// file: `tensor.to(dtype)`, bypassing the dispatcher for plain tensors, and the autograd node of a cast
#include "cast/cast.h"

#include "cast/pooled.h"
#include "cast/vectorized.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <bit>
#include <cstddef>
#include <string>

namespace torch_promote {

namespace {

// --- Conversion of arrays on the CPU, without calling an op

constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kHalfwayLess = 0x7FFF; // one unit below half of bfloat16's last place

// Rounds to nearest, ties to even, like PyTorch. Returns false if there is a NaN, and `to` must not be used then: the
// bits of a NaN in bfloat16 depend on PyTorch's kernel for this processor and on the NaN's position in the array.
VECTORIZED bool to_bfloat16(const float* from, uint16_t* to, size_t count) {
  uint32_t nan = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    nan |= (bits & kMagnitude) > kInfinity ? 1U : 0U;
    to[i] = static_cast<uint16_t>((bits + kHalfwayLess + (bits >> 16 & 1)) >> 16);
  }
  return nan == 0;
}

// A bfloat16 is the upper half of a float32; NaNs keep their bits.
VECTORIZED void from_bfloat16(const uint16_t* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
  }
}

// --- The cast

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::autograd::Node;

// TensorIterator's grain size. Above it, PyTorch's kernel may use several threads, and the conversion takes so long
// that the dispatcher's overhead does not matter.
constexpr int64_t kSmall = 32768;

// An uninitialized CPU tensor with the sizes and strides of `source`, which is dense. It is resizable, as the results
// of at::empty are.
at::Tensor empty_as(const at::TensorImpl& source, at::ScalarType dtype) {
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(dtype);
  const size_t bytes = static_cast<size_t>(source.numel()) * type.itemsize();
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, /*resizable=*/true);
  at::Tensor result =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), type);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides());
  return result;
}

// Returns an undefined tensor for casts that PyTorch's kernel has to make: other dtypes, large tensors, tensors with
// gaps, and NaNs, whose resulting bits depend on that kernel.
at::Tensor convert_small(const Source& source, at::ScalarType dtype) {
  const at::TensorImpl& impl = source.impl;
  const at::ScalarType from = source.tensor.scalar_type();
  const bool narrows = from == at::kFloat && dtype == at::kBFloat16;
  const bool widens = from == at::kBFloat16 && dtype == at::kFloat;
  if (!(narrows || widens) || !impl.is_cpu() || impl.numel() > kSmall || !impl.is_non_overlapping_and_dense()) {
    return {};
  }
  at::Tensor result = empty_as(impl, dtype);
  void* const to = result.unsafeGetTensorImpl()->mutable_data();
  const auto count = static_cast<size_t>(impl.numel());
  if (widens) {
    from_bfloat16(static_cast<const uint16_t*>(impl.data()), static_cast<float*>(to), count);
    return result;
  }
  const bool done = to_bfloat16(static_cast<const float*>(impl.data()), static_cast<uint16_t*>(to), count);
  return done ? result : at::Tensor();
}

at::Tensor convert_without_autograd(const Source& source, at::ScalarType dtype) {
  if (at::Tensor result = convert_small(source, dtype); result.defined()) {
    return result;
  }
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return at::_ops::_to_copy::call(source.tensor, dtype, {}, {}, {}, false, {});
}

at::Tensor fast_cast(const Source& source, at::ScalarType dtype) {
  if (!source.needs_node) {
    return convert_without_autograd(source, dtype);
  }
  const uint64_t sequence_nr = next_sequence_nr(); // before the conversion, as `to` takes it
  at::Tensor result = convert_without_autograd(source, dtype);
  attach_node(result, source.tensor, sequence_nr);
  return result;
}

// Computes the same as the node of `to`. `apply` calls `cast`, which records a node if the backward itself is
// differentiated, so second derivatives need no code here. Forward-mode AD would need a formula, so a tensor with a
// tangent never gets this node.
class CastBackward final : public Node, public Pooled<CastBackward> {
 public:
  CastBackward(uint64_t sequence_nr, const at::Tensor& source) : Node(sequence_nr), dtype_(source.scalar_type()) {
    add_next_edge(torch::autograd::impl::gradient_edge(source));
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const at::Tensor& grad = grads[0];
    return {grad.defined() && grad.scalar_type() != dtype_ ? cast(grad, dtype_) : grad};
  }
  std::string name() const override {
    return "CastBackward";
  }
  // Compiled autograd traces `apply`; there are no saved variables to swap.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& /*saved*/) override {
    return apply(torch::autograd::variable_list(grads));
  }

 private:
  at::ScalarType dtype_;
};

// The autograd metadata that PyTorch attaches to each tensor in a graph.
class CastAutograd final : public torch::autograd::AutogradMeta, public Pooled<CastAutograd> {
 public:
  explicit CastAutograd(NodePtr node)
      : AutogradMeta(nullptr, /*requires_grad=*/false, torch::autograd::Edge(std::move(node), 0)) {}
};

template <class Pointer>
Pointer make_node(uint64_t sequence_nr, const at::Tensor& source) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::make_shared<CastBackward>(sequence_nr, source);
  } else {
    return c10::make_intrusive<CastBackward>(sequence_nr, source);
  }
}

const torch::autograd::AutogradMeta* autograd_of(const at::TensorImpl& impl) {
  return static_cast<const torch::autograd::AutogradMeta*>(impl.autograd_meta());
}

} // namespace

Source::Source(const at::Tensor& source)
    : tensor(source), impl(*source.unsafeGetTensorImpl()), autograd(autograd_of(impl)) {
  const c10::impl::LocalDispatchKeySet thread = c10::impl::tls_local_dispatch_key_set();
  thread_keys = thread.included_;
  // A virtual call: a view requires a gradient as soon as its base does, and its own fields do not show that.
  const bool requires_grad = autograd != nullptr && autograd->requires_grad();
  const c10::AutogradState& modes = c10::AutogradState::get_tls_state();
  wants_grad = requires_grad && modes.get_grad_mode();
  in_inference_mode = modes.get_inference_mode();
  needs_node = wants_grad && !thread.excluded_.has(DispatchKey::AutogradFunctionality);
  // The base of a view may have received a tangent later.
  has_tangent = autograd != nullptr &&
                (autograd->fw_grad_ != nullptr || (autograd->is_view_ && source._fw_grad(/*level=*/0).defined()));
  plain = is_plain(impl);
  takes_fast_path = has_only_plain_keys((impl.key_set() | thread_keys) - thread.excluded_) && !has_tangent;
}

at::Tensor cast(const Source& source, at::ScalarType dtype) {
  if (!source.takes_fast_path) {
    return source.tensor.to(dtype);
  }
  auto profilers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (profilers.has_value()) {
    at::RecordFunction record(*std::move(profilers));
    const c10::IValue input(source.tensor);
    record.before("torch_promote::cast", c10::ArrayRef<const c10::IValue>(&input, 1));
    return fast_cast(source, dtype);
  }
  return fast_cast(source, dtype);
}

uint64_t next_sequence_nr() {
  return at::sequence_number::get_and_increment();
}

void attach_node(const at::Tensor& cast, const at::Tensor& source, uint64_t sequence_nr) {
  NodePtr node = make_node<NodePtr>(sequence_nr, source);
  node->add_input_metadata(cast);
  attach_node(cast, std::move(node));
}

void attach_node(const at::Tensor& cast, NodePtr node) {
  cast.unsafeGetTensorImpl()->set_autograd_meta(std::make_unique<CastAutograd>(std::move(node)));
}

} // namespace torch_promote
