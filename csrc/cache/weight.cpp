// file: which of the tensors that are cast are weights, and how their casts may be reused
#include <Python.h>

#include "cache/weight.h"

#include "cache/cast_data.h"
#include "cast/cast.h"
#include "policy/torch_declarations.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace torch_promote {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeKey;
using c10::impl::TorchDispatchModeTLS;

// Kept for good.
PyTypeObject* parameter_type = nullptr;
std::vector<PyTypeObject*> replaying_modes;

// Looks at a type and what it derives from, which needs no lock: the tensor, and so its Python object, is alive.
bool is_parameter(const at::TensorBase& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && (Py_TYPE(object) == parameter_type || PyType_IsSubtype(Py_TYPE(object), parameter_type));
}

bool is_weight(const at::TensorBase& tensor) {
  return tensor.is_leaf() && (tensor.requires_grad() || is_parameter(tensor));
}

// PyTorch's own modes, which see tensors that are not what they seem. Those of users see plain tensors.
bool has_infra_mode() {
  return TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value();
}

bool has_replaying_mode() {
  for (int64_t at = 0; at < TorchDispatchModeTLS::stack_len(); ++at) {
    const auto& mode = TorchDispatchModeTLS::get_stack_at(at);
    const PyTypeObject* type = Py_TYPE(mode->ptr(&mode->pyinterpreter()));
    if (std::find(replaying_modes.begin(), replaying_modes.end(), type) != replaying_modes.end()) {
      return true;
    }
  }
  return false;
}

// What a graph of CUDA's captures is not computed now, and what it captures is replayed with other weights. Newer
// releases of PyTorch can say so.
template <class Guard>
bool is_capturing(const Guard& guard, c10::Device device) {
  if constexpr (requires { guard.isStreamCapturing(guard.getStream(device)); }) {
    return guard.isStreamCapturing(guard.getStream(device));
  }
  return false;
}

} // namespace

Weight weight_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) { // without a version, so that nobody knows when it changes
    return {};
  }
  // Read where it is kept, as each of PyTorch's own accessors would: this is asked at every cast.
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && meta->is_view_ && tensor.is_view()) { // and not one of forward-mode AD alone
    const at::TensorBase& base = tensor._base();
    return is_weight(base) ? Weight{Reuse::data, &base, true} : Weight{};
  }
  const bool is_leaf = meta == nullptr || meta->grad_fn_ == nullptr;
  const bool requires_grad = meta != nullptr && meta->requires_grad_;
  if (!is_leaf || !(requires_grad || is_parameter(tensor))) {
    return {};
  }
  // Stock's conditions.
  const bool as_stock = requires_grad && tensor.scalar_type() == at::kFloat && !c10::InferenceMode::is_enabled() &&
                        !at::caching::is_cached_tensor(tensor);
  return {as_stock ? Reuse::node : Reuse::data, &tensor, false};
}

bool gets_node(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad() &&
         !c10::impl::tls_local_dispatch_key_set().excluded_.has(DispatchKey::AutogradFunctionality);
}

bool may_share_data(const at::Tensor& tensor) {
  constexpr DispatchKeySet kLookers({
      DispatchKey::Python,
      DispatchKey::PythonTLSSnapshot,
      DispatchKey::TESTING_ONLY_GenericMode, // the tap
  });
  if (!is_plain(*tensor.unsafeGetTensorImpl()) || at::caching::is_cached_tensor(tensor) || has_tangent(tensor)) {
    return false;
  }
  const DispatchKeySet thread = c10::impl::tls_local_dispatch_key_set().included_;
  if (!has_only_ordinary_keys(thread - kLookers)) {
    return false;
  }
  if (thread.has(DispatchKey::Python) && (has_infra_mode() || has_replaying_mode())) {
    return false;
  }
  return !tensor.is_cuda() || !is_capturing(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA), tensor.device());
}

void set_parameter_type(PyTypeObject* type) {
  parameter_type = type;
}

void set_replaying_modes(std::vector<PyTypeObject*> types) {
  replaying_modes = std::move(types);
}

} // namespace torch_promote
