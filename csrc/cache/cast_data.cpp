// file: the data of a kept cast, and the check that its source has not changed
#include "cache/cast_data.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_promote {

c10::Stream current_stream(const at::TensorImpl& impl) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(impl.device());
}

namespace {

c10::StreamId stream_of(const at::TensorImpl& impl) {
  return impl.is_cuda() ? current_stream(impl).id() : 0;
}

// A new tensor over the same data and version, detached from every graph.
at::Tensor detached_alias(const at::Tensor& tensor) {
  // Otherwise a Python mode would see a `detach` that the program did not call.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

} // namespace

SourceSignature::SourceSignature(const Source& source)
    : version_(source.impl.version_counter().current_version()), dtype_(source.tensor.scalar_type()) {
  if (source.plain) {
    const at::TensorImpl& impl = source.impl;
    storage_.emplace(impl.unsafe_storage().getWeakStorageImpl());
    data_ = impl.data();
    offset_ = impl.storage_offset();
    sizes_ = impl.sizes();
    strides_ = impl.strides();
  }
}

bool SourceSignature::matches(const Source& source) const {
  const at::TensorImpl& impl = source.impl;
  if (version_ != impl.version_counter().current_version() || dtype_ != source.tensor.scalar_type() ||
      storage_.has_value() != source.plain) {
    return false;
  }
  return !storage_.has_value() || (same_storage(impl) && data_ == impl.data() && is_same_part(impl));
}

CastData::CastData(SourceSignature signature, const Source& source, const at::Tensor& cast)
    : signature_(std::move(signature)),
      plain_(torch_promote::is_plain(*cast.unsafeGetTensorImpl())),
      dtype_(cast.scalar_type()) {
  if (!plain_) {
    held_ = cast;
    return;
  }
  const at::TensorImpl& impl = *cast.unsafeGetTensorImpl();
  storage_ = impl.unsafe_storage();
  counter_ = impl.version_counter();
  version_ = counter_.current_version();
  stream_ = stream_of(impl);
  shaped_as_source_ = impl.strides() == source.impl.strides();
  offset_ = impl.storage_offset();
  if (!cast.requires_grad()) {
    held_ = cast; // the tensor itself, so that tools which know tensors by identity recognize it
  } else if (!shaped_as_source_) {
    held_ = detached_alias(cast);
  }
}

at::Tensor CastData::alias(const at::TensorImpl& source) const {
  if (!shaped_as_source_) {
    return detached_alias(held_);
  }
  const c10::DispatchKey key = source.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype_));
  at::TensorImpl& impl = *result.unsafeGetTensorImpl();
  impl.set_storage_offset(offset_);
  impl.set_sizes_and_strides(source.sizes(), source.strides());
  impl.set_version_counter(counter_);
  return result;
}

const at::Tensor& CastData::held(const at::TensorImpl& source) {
  if (!held_.defined()) {
    const c10::InferenceMode normal_mode(false); // uses outside of inference mode get this tensor too
    held_ = alias(source);
  }
  return held_;
}

bool CastData::is_unchanged(const Source& source) const {
  // An op that returned its argument, or a view of it, may have let its caller write into the cast; the cast's version
  // tells.
  return signature_.matches(source) && (!plain_ || version_ == counter_.current_version());
}

bool CastData::is_fresh(const Source& source) const {
  return is_unchanged(source) && (!plain_ || stream_ == stream_of(source.impl));
}

void CastData::record_on(const c10::Stream& stream) const {
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(storage_.data_ptr(), stream);
}

void CastData::let_go() {
  weak_storage_.emplace(storage_.getWeakStorageImpl());
  held_.reset();
  storage_ = c10::Storage();
}

bool CastData::lock() {
  if (weak_storage_.has_value()) {
    storage_ = c10::Storage(weak_storage_->lock());
    weak_storage_.reset();
    return static_cast<bool>(storage_);
  }
  return true;
}

bool CastData::frees_without_python() const {
  const auto has_object = [](const auto& impl) { return impl.pyobj_slot()->load_pyobj() != nullptr; };
  return plain_ && !(storage_ && has_object(*storage_.unsafeGetStorageImpl())) &&
         !(held_.defined() && has_object(*held_.unsafeGetTensorImpl()));
}

void CastData::leak_unless_plain() {
  if (!plain_) {
    (void)held_.unsafeReleaseTensorImpl();
  }
}

} // namespace torch_promote
