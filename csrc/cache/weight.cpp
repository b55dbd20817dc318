// file: which tensors are weights, and what later uses of a weight may share of its cast
#include <Python.h>

#include "cache/weight.h"

#include "cast/source.h"
#include "policy/torch_declarations.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace torch_promote {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeKey;
using c10::impl::TorchDispatchModeTLS;

// Owned references that are never released: the extension stays loaded.
PyTypeObject* parameter_type = nullptr;
std::vector<PyTypeObject*> replaying_modes;

// Takes no GIL: the tensor keeps its Python object alive, and types of live objects are only read.
bool is_parameter(const at::TensorBase& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && (Py_TYPE(object) == parameter_type || PyType_IsSubtype(Py_TYPE(object), parameter_type));
}

bool is_weight(const at::TensorBase& tensor) {
  return tensor.is_leaf() && (tensor.requires_grad() || is_parameter(tensor));
}

// Whether the tensor is a view for backward; forward-mode AD marks views of its own.
bool is_view(const Source& source) {
  return source.autograd != nullptr && source.autograd->is_view_ && source.tensor.is_view();
}

// PyTorch's own modes work on tensors that stand for others. Users' modes get plain tensors.
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

} // namespace

// Source: aten/src/ATen/autocast_mode.cpp, cached_cast (v2.13). Stock asks for inference mode, not for tensors made in
// it. Such a tensor has no version counter, so a change of it would not be detected, and ours excludes it.
bool is_stock_weight(const Source& source) {
  return source.autograd != nullptr && source.autograd->requires_grad_ && source.autograd->grad_fn_ == nullptr &&
         source.tensor.scalar_type() == at::kFloat && !is_view(source) && !source.tensor.is_inference() &&
         !source.in_inference_mode && !at::caching::is_cached_tensor(source.tensor);
}

std::optional<Weight> weight_beyond_stock(const Source& source) {
  if (source.tensor.is_inference()) { // it has no version counter
    return std::nullopt;
  }
  const bool view = is_view(source);
  const at::TensorBase& owner = view ? source.tensor._base() : source.tensor;
  return is_weight(owner) ? std::optional(Weight{Reuse::data_only, &owner, view}) : std::nullopt;
}

bool may_share_data(const Source& source) {
  // A mode of the user's and the dispatch observer see the ops that run, and need no cast that does not.
  constexpr DispatchKeySet kObserverKeys({
      DispatchKey::Python,
      DispatchKey::PythonTLSSnapshot,
      DispatchKey::TESTING_ONLY_GenericMode,
  });
  if (!source.plain || source.has_tangent || !has_only_plain_keys(source.thread_keys - kObserverKeys) ||
      at::caching::is_cached_tensor(source.tensor)) {
    return false;
  }
  return !source.thread_keys.has(DispatchKey::Python) || !(has_infra_mode() || has_replaying_mode());
}

void set_parameter_type(PyTypeObject* type) {
  parameter_type = type;
}

void set_replaying_modes(std::vector<PyTypeObject*> types) {
  replaying_modes = std::move(types);
}

} // namespace torch_promote
