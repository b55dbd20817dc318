// file: one cast in the cache: what it holds, when it is still good, and how a use gets it
#include "cast_entry.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_promote {

namespace {

// clang-format off
constexpr c10::DispatchKeySet kNotPlain = c10::DispatchKeySet({
    c10::DispatchKey::Python,
    c10::DispatchKey::PythonTLSSnapshot,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::BatchedNestedTensor,
    c10::DispatchKey::Batched,
    c10::DispatchKey::Conjugate,
    c10::DispatchKey::Negative,
    c10::DispatchKey::ZeroTensor,
    c10::DispatchKey::NestedTensor,
    c10::DispatchKey::AutogradNestedTensor,
});
// clang-format on

at::Tensor detached_alias(const at::Tensor& tensor) {
  // A Python mode would otherwise be shown a `detach` that no program made.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

} // namespace

bool is_plain(const at::TensorImpl& impl) {
  return impl.layout() == at::kStrided && impl.has_storage() && !impl.key_set().has_any(kNotPlain) &&
         !impl.has_symbolic_sizes_strides() && (impl.is_cpu() || impl.is_cuda());
}

Stamp::Stamp(const at::TensorImpl& impl) : version_(impl.version_counter().current_version()) {
  if (is_plain(impl)) {
    storage_.emplace(impl.unsafe_storage().getWeakStorageImpl());
    data_ = impl.data();
  }
}

bool Stamp::matches(const at::TensorImpl& impl) const {
  if (version_ != impl.version_counter().current_version() || storage_.has_value() != is_plain(impl)) {
    return false;
  }
  return !storage_.has_value() || (same_storage(impl) && data_ == impl.data());
}

bool Stamp::same_storage(const at::TensorImpl& impl) const {
  return storage_.has_value() && impl.has_storage() &&
         storage_->_unsafe_get_target() == impl.unsafe_storage().unsafeGetStorageImpl();
}

CastEntry::CastEntry(const at::Tensor& source, Stamp stamp, const at::Tensor& cast)
    : source_(source.getIntrusivePtr()),
      stamp_(std::move(stamp)),
      plain_(is_plain(*source.unsafeGetTensorImpl())),
      held_(plain_ ? detached_alias(cast) : cast),
      held_version_(held_.is_inference() ? 0 : held_._version()) {
  if (plain_) {
    link(cast);
  }
}

bool CastEntry::is_dead() const {
  return source_.expired();
}

bool CastEntry::is_fresh(const at::TensorImpl& source) const {
  // An op that returned its argument, or a view of it, may have let somebody write into the cast: that ends it too.
  return stamp_.matches(source) && (held_.is_inference() || held_version_ == held_._version());
}

bool CastEntry::is_cast_of(const at::TensorImpl& tensor) const {
  return source_._unsafe_get_target() == &tensor || stamp_.same_storage(tensor);
}

size_t CastEntry::bytes() const {
  return plain_ ? held_.nbytes() : 0;
}

at::Tensor CastEntry::use(const at::Tensor& source) {
  if (!plain_ || !at::GradMode::is_enabled()) {
    return held_;
  }
  if (cast_.has_value()) {
    if (auto cast = cast_->lock(); cast.defined()) {
      return at::Tensor(std::move(cast));
    }
  }
  at::Tensor cast = detached_alias(held_);
  if (NodePtr node = node_.has_value() ? node_->lock() : NodePtr(); node != nullptr) {
    put_in_graph(cast, std::move(node));
  } else {
    put_in_graph(cast, source, sequence_nr_ ? *sequence_nr_ : next_sequence_nr());
  }
  link(cast);
  return cast;
}

void CastEntry::leak_unless_plain() {
  if (!plain_) {
    (void)held_.unsafeReleaseTensorImpl();
  }
}

void CastEntry::link(const at::Tensor& cast) {
  const NodePtr node = cast.grad_fn();
  if (node == nullptr) {
    return; // cast below autograd, in the kernel of a custom op: good as data, and for no graph
  }
  cast_.emplace(cast.getIntrusivePtr());
  sequence_nr_ = node->sequence_nr();
  node_.emplace(node);
}

} // namespace torch_promote
