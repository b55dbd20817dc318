// file: `tensor.to(dtype)`, bypassing the dispatcher for plain tensors, and the autograd node of a cast
#pragma once

#include "policy/dispatch_state.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace torch_promote {

// NOTE [ Plain tensors ]
// `tensor.to(dtype)` passes the dispatcher four times: `to`, `_to_copy`, `empty_strided` and `copy_`, with autograd
// above the second. If only PyTorch's own kernels can observe these calls, an allocation, a conversion and, if a
// gradient is required, an autograd node give the same result. The dispatch keys of the tensor and of the thread show
// whether anything else is involved. The list below is an allowlist: a Python mode, a subclass, functorch, a fake or
// functional tensor, a tracer, the dispatch observer, conjugate and negative bits, named, sparse, nested and quantized
// tensors, and keys that a later PyTorch adds, all go through the dispatcher.
inline constexpr c10::DispatchKeySet kPlainKeys = c10::DispatchKeySet({
    c10::DispatchKey::Dense,
    c10::DispatchKey::AutogradFunctionality,
    c10::DispatchKey::ADInplaceOrView,
    c10::DispatchKey::BackendSelect,
    c10::DispatchKey::AutocastCPU,
    c10::DispatchKey::AutocastCUDA,
    kAutocastKey,
});

inline bool has_only_plain_keys(c10::DispatchKeySet keys) {
  return (keys.raw_repr() & ~(c10::full_backend_mask | kPlainKeys.raw_repr())) == 0;
}

// Whether the tensor is a dense CPU or CUDA tensor that only PyTorch's own kernels handle. (Sparse, nested and mkldnn
// tensors have their own keys.)
inline bool is_plain(const at::TensorImpl& impl) {
  return has_only_plain_keys(impl.key_set()) && impl.has_storage() && !impl.has_symbolic_sizes_strides() &&
         (impl.is_cpu() || impl.is_cuda());
}

// A tensor to be cast, with the properties that the cast needs. They are valid for this thread and for the grad mode
// and inference mode at construction: code that changes a mode constructs a new Source.
struct Source {
  explicit Source(const at::Tensor& source);

  const at::Tensor& tensor;
  at::TensorImpl& impl;
  const torch::autograd::AutogradMeta* autograd; // null if the tensor has no autograd metadata
  c10::DispatchKeySet thread_keys;               // included in this thread's dispatch state
  bool wants_grad;                               // grad mode is on, and the tensor requires a gradient
  bool needs_node;                               // wants_grad, and autograd is not excluded: autograd records the use
  bool in_inference_mode;                        // this thread is in inference mode
  bool has_tangent;                              // of forward-mode AD, which has no dispatch key
  bool plain;                                    // see is_plain
  bool takes_fast_path;                          // tensor and thread are plain; see NOTE [ Plain tensors ]
};

// Casts the tensor, with the bits, strides and gradients of `tensor.to(dtype)`.
at::Tensor cast(const Source& source, at::ScalarType dtype);
inline at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  return cast(Source(tensor), dtype);
}

// torch::autograd::Node is held by shared_ptr in PyTorch 2.11 and by intrusive_ptr in later releases.
using NodePtr = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;
using WeakNode = std::conditional_t<
    std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>,
    std::weak_ptr<torch::autograd::Node>,
    c10::weak_intrusive_ptr<torch::autograd::Node>>;

// Consumes and returns the sequence number of this thread's next node.
uint64_t next_sequence_nr();

// Gives `cast`, which belongs to no graph yet, a node that leads to `source`. The autograd engine sums gradients in the
// order of the sequence numbers, so the number decides the bits of the sum.
void attach_node(const at::Tensor& cast, const at::Tensor& source, uint64_t sequence_nr);

// The node of a tensor that is not a view, or null.
inline const NodePtr* node_of(const at::Tensor& cast) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(cast.unsafeGetTensorImpl()->autograd_meta());
  return meta != nullptr && meta->grad_fn_ != nullptr ? &meta->grad_fn_ : nullptr;
}

// Makes `cast` another output of the node of a tensor that shares its data.
void attach_node(const at::Tensor& cast, NodePtr node);

} // namespace torch_promote
