// file: which casts are kept, and the path of a use
#include <Python.h>

#include "cache/cached_cast.h"

#include "cache/capture.h"
#include "cache/check.h"
#include "cache/persistent_casts.h"
#include "cache/thread_casts.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>

namespace torch_promote {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeKey;
using c10::impl::TorchDispatchModeTLS;

// --- Which casts are kept?

// Owned references that are never released: the extension stays loaded.
PyTypeObject* parameter_type = nullptr;
std::vector<PyTypeObject*> replaying_modes;

// Takes no GIL: the tensor keeps its Python object alive, and types of live objects are only read.
bool is_parameter(const at::TensorBase& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && (Py_TYPE(object) == parameter_type || PyType_IsSubtype(Py_TYPE(object), parameter_type));
}

// Whether the tensor is a view for backward; forward-mode AD marks views of its own.
bool is_view(const Source& source) {
  return source.autograd != nullptr && source.autograd->is_view_ && source.tensor.is_view();
}

// A float32 leaf that requires a gradient.
// Source: aten/src/ATen/autocast_mode.cpp, cached_cast (v2.13). Stock asks for inference mode, not for tensors made in
// it. Such a tensor has no version counter, so a change of it would not be detected, and ours excludes it.
bool is_stock_weight(const Source& source) {
  return source.autograd != nullptr && source.autograd->requires_grad_ && source.autograd->grad_fn_ == nullptr &&
         source.tensor.scalar_type() == at::kFloat && !is_view(source) && !source.tensor.is_inference() &&
         !source.in_inference_mode && !at::caching::is_cached_tensor(source.tensor);
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

// Whether later uses may get the data of a cast that stock would make again. The tensor has to be plain, so that it can
// be recognized by its memory, and the thread must not run a tool that follows tensors through every op, such as a
// tracer, functorch or FakeTensorMode: it would miss the cast that is not made.
bool may_share_data(const Source& source) {
  // A mode of the user's and the dispatch observer see the ops that run, and need no cast that does not.
  constexpr DispatchKeySet kObserverKeys({
      DispatchKey::Python,
      DispatchKey::PythonTLSSnapshot,
      DispatchKey::TESTING_ONLY_GenericMode,
  });
  if (tls_results_may_alias || !source.plain || source.tensor.is_inference() ||
      !has_only_plain_keys(source.thread_keys - kObserverKeys) || at::caching::is_cached_tensor(source.tensor)) {
    return false;
  }
  return !source.thread_keys.has(DispatchKey::Python) || !(has_infra_mode() || has_replaying_mode());
}

// None if each use has a cast of its own.
std::optional<Kind> kind_of(const Source& source) {
  if (is_stock_weight(source)) {
    return Kind::trainable;
  }
  if (tls_cache_mode == CacheMode::weights || !may_share_data(source)) {
    return std::nullopt;
  }
  const bool view = is_view(source);
  const at::TensorBase& owner = view ? source.tensor._base() : source.tensor;
  if (owner.is_leaf() && (owner.requires_grad() || is_parameter(owner))) { // a weight, or a view of one
    return !view && has_unique_storage(source.tensor) ? std::optional(Kind::frozen) : std::nullopt;
  }
  // The owner of memory that PyTorch did not allocate may write to it at any time.
  const bool ours = source.impl.unsafe_storage().allocator() != nullptr;
  return tls_cache_mode == CacheMode::all && ours ? std::optional(Kind::activation) : std::nullopt;
}

bool may_outlive_region(const CastRequest& wanted) {
  return tls_cache_mode == CacheMode::persistent && wanted.capture == 0 && may_share_data(wanted.source) &&
         has_unique_storage(wanted.source.tensor) && !has_outside_writers(wanted.source.tensor);
}

// The autograd engine carries the autocast key to threads of its own. There a region of PyTorch may be open, in which a
// checkpoint runs its function again, or none: then casts kept there would never be dropped.
bool is_in_region() {
  return tls_region_open || nesting_depth() > 0;
}

// --- The path of a use

// A cast that later uses may get. It may run Python (a dispatch mode, a subclass) that itself casts, enters and leaves
// regions, so the caller must not hold references into a cache.
at::Tensor cast_to_keep(const CastRequest& wanted) {
  const Source& source = wanted.source;
  if (!source.plain) {
    // Kept whole. Like stock, record it in the graph, so that a use after no_grad is differentiable.
    const at::AutoGradMode grad(true);
    return cast(source.tensor, wanted.dtype);
  }
  if (source.in_inference_mode) {
    // Uses outside of inference mode could not get an inference tensor.
    const c10::InferenceMode normal_mode(false);
    const at::AutoGradMode grad(false);
    return cast(source.tensor, wanted.dtype);
  }
  return cast(source, wanted.dtype);
}

// False for the answer of a mode that replaced the tensor by one of its own kind (such as a fake one), and for a cast
// that is kept whole but was made below autograd: later uses would silently have no gradient. The cast may also have
// run code that ended the region.
bool may_be_kept(const Source& source, const at::Tensor& cast) {
  return source.plain == is_plain(*cast.unsafeGetTensorImpl()) && (source.plain || cast.requires_grad()) &&
         is_in_region();
}

// What each use of a kept cast gets. Undefined if another thread has freed the cast.
at::Tensor use_kept(CastSet& here, const CastRequest& wanted, const std::shared_ptr<KeptCast>& kept) {
  at::Tensor cast = kept->use(wanted.source);
  if (!cast.defined()) {
    return cast;
  }
  ++here.hits;
  if (are_casts_checked()) {
    check_reuse(wanted.source, cast, [&] {
      here.catch_up();
      CastRequest now = wanted;
      now.aliases = wanted.aliases == 0 ? 0 : alias_epoch(wanted.source.tensor);
      return here.find(now) == kept;
    });
  }
  return cast;
}

at::Tensor make_kept(CastSet& here, const CastRequest& wanted, const CastTime& began) {
  const Source& source = wanted.source;
  const bool persists = may_outlive_region(wanted);
  const auto kept = KeptCast::make(wanted);
  if (persists) {
    if (const at::Tensor data = find_persistent(wanted); data.defined()) {
      kept->fill(source, data);
      here.insert(wanted, kept, began);
      return use_kept(here, wanted, kept);
    }
  }
  const uint64_t aliases = persists ? alias_epoch(source.tensor) : 0;
  // Asked again: a tensor over the data that was made in between increased the epoch before it was read.
  const bool unique = persists && has_unique_storage(source.tensor);
  at::Tensor result = cast_to_keep(wanted);
  if (!may_be_kept(source, result)) {
    return result;
  }
  kept->fill(source, result);
  // The cast of a half-precision activation in float32, say, would be more memory than the user asked for.
  const bool is_larger = wanted.kind == Kind::activation && result.itemsize() > source.tensor.itemsize();
  if (is_larger && !kept->let_go()) {
    return result;
  }
  ++here.misses;
  note_kept_cast();
  if (are_casts_checked()) {
    remember_line_of(result);
  }
  here.insert(wanted, kept, began);
  if (unique) {
    store_persistent(wanted, kept->signature(), kept->held(source.impl), aliases);
  }
  return result;
}

// In a backward, outside of regions, finds the casts of the thread that called it, as stock does. Keeps none.
at::Tensor cast_outside_regions(const CastRequest& wanted) {
  if (const std::shared_ptr<KeptCast> kept = borrow_cast(wanted)) {
    if (at::Tensor cast = kept->use(wanted.source); cast.defined()) {
      ++casts_of_this_thread().hits;
      if (are_casts_checked()) {
        check_reuse(wanted.source, cast, [&] { return borrow_cast(wanted) != nullptr; });
      }
      return cast;
    }
  }
  return cast(wanted.source, wanted.dtype);
}

// Whether casts are kept at all. jit.trace would record a cast from the cache as a constant.
bool may_keep(const Source& source) {
  return at::autocast::is_autocast_cache_enabled() && !source.has_tangent &&
         !source.thread_keys.has(DispatchKey::Tracer);
}

} // namespace

at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype) {
  const Source source(tensor);
  const std::optional<Kind> kind = may_keep(source) ? kind_of(source) : std::nullopt;
  if (!kind.has_value()) {
    return cast(source, dtype);
  }
  const uint64_t aliases = *kind == Kind::frozen ? alias_epoch(tensor) : 0;
  if (*kind == Kind::frozen && aliases == 0) {
    return cast(source, dtype); // GCOVR_EXCL_LINE: needs a library with a BackendMeta of its own
  }
  const CastRequest wanted{source, dtype, *kind, aliases, current_capture(source)};
  if (!is_in_region()) {
    return cast_outside_regions(wanted);
  }
  CastSet& here = casts_of_this_thread();
  const CastTime began = here.catch_up();
  std::shared_ptr<KeptCast> kept = here.find(wanted);
  if (kept == nullptr && *kind == Kind::trainable && (kept = borrow_cast(wanted)) != nullptr) {
    here.insert(wanted, kept, began);
  }
  if (kept != nullptr) {
    if (at::Tensor cast = use_kept(here, wanted, kept); cast.defined()) {
      return cast;
    }
  }
  return make_kept(here, wanted, began);
}

std::optional<at::Tensor> kept_float8(
    const at::Tensor& weight, uint8_t format, const std::function<at::Tensor()>& make) {
  const Source source(weight);
  if (tls_cache_mode != CacheMode::persistent || !may_keep(source) || !is_in_region() || are_casts_checked()) {
    return std::nullopt;
  }
  const std::optional<Kind> kind = kind_of(source);
  if (!kind.has_value()) {
    return std::nullopt;
  }
  // Before it is asked whether others share the data: those that come later change the epoch.
  const uint64_t aliases = alias_epoch(weight);
  const CastRequest wanted{source, at::kByte, *kind, aliases, current_capture(source), format};
  if (!may_outlive_region(wanted)) {
    return std::nullopt;
  }
  CastSet& here = casts_of_this_thread();
  if (at::Tensor found = find_persistent(wanted); found.defined()) {
    ++here.hits;
    return found;
  }
  const SourceSignature signature(source);
  // Uses outside of inference mode could not get an inference tensor.
  const c10::InferenceMode normal_mode(false);
  const at::AutoGradMode grad(false);
  at::Tensor made = make();
  if (is_plain(*made.unsafeGetTensorImpl())) { // and not the answer of a mode, such as a fake tensor
    ++here.misses;
    store_persistent(wanted, signature, made, aliases);
  }
  return made;
}

bool would_keep(const at::Tensor& tensor, CacheMode mode) {
  const Scoped<CacheMode> in_force{tls_cache_mode, mode};
  const Source source(tensor);
  const std::optional<Kind> kind = source.has_tangent ? std::nullopt : kind_of(source);
  return kind.has_value() &&
         (mode != CacheMode::persistent || may_outlive_region({source, at::kBFloat16, *kind, 0, 0}));
}

void set_parameter_type(PyTypeObject* type) {
  parameter_type = type;
}

void set_replaying_modes(std::vector<PyTypeObject*> types) {
  replaying_modes = std::move(types);
}

} // namespace torch_promote
