// file: the data of a kept cast, and the check that its source has not changed
#include "cache/cast_data.h"

#include "cache/casts_mutex.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <utility>

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
    data_ = impl.unsafe_storage().data();
    offset_ = impl.storage_offset();
    const at::IntArrayRef sizes = impl.sizes();
    const at::IntArrayRef strides = impl.strides();
    geometry_.resize_for_overwrite(2 * sizes.size());
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      geometry_[2 * dim] = sizes[dim];
      geometry_[2 * dim + 1] = strides[dim];
    }
  }
}

bool SourceSignature::matches(const Source& source) const {
  const at::TensorImpl& impl = source.impl;
  if (version_ != impl.version_counter().current_version() || dtype_ != source.tensor.scalar_type() ||
      storage_.has_value() != source.plain) {
    return false;
  }
  return !storage_.has_value() || (same_storage(impl) && data_ == impl.unsafe_storage().data() && is_same_part(impl));
}

void CastData::fill(const Source& source, const at::Tensor& cast) {
  plain_ = torch_promote::is_plain(*cast.unsafeGetTensorImpl());
  dtype_ = cast.scalar_type();
  if (!plain_) {
    memory_.held = cast;
    return;
  }
  const at::TensorImpl& impl = *cast.unsafeGetTensorImpl();
  memory_.storage = impl.unsafe_storage();
  storage_.emplace(memory_.storage.getWeakStorageImpl());
  bytes_ = memory_.storage.nbytes();
  counter_ = impl.version_counter();
  version_ = counter_.current_version();
  stream_ = stream_of(impl);
  shaped_as_source_ = impl.strides() == source.impl.strides();
  offset_ = impl.storage_offset();
  if (!cast.requires_grad()) {
    memory_.held = cast; // the tensor itself, so that tools which know tensors by identity recognize it
  } else if (!shaped_as_source_) {
    memory_.held = detached_alias(cast);
  }
  if (memory_.held.defined()) {
    held_.emplace(memory_.held.getIntrusivePtr());
  }
}

at::Tensor CastData::alias(const at::TensorImpl& source) const {
  if (!shaped_as_source_) {
    const at::Tensor held(held_->lock());
    return held.defined() ? detached_alias(held) : held;
  }
  c10::Storage storage(storage_->lock());
  if (!storage) {
    return {};
  }
  const c10::DispatchKey key = source.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype_));
  at::TensorImpl& impl = *result.unsafeGetTensorImpl();
  impl.set_storage_offset(offset_);
  impl.set_sizes_and_strides(source.sizes(), source.strides());
  impl.set_version_counter(counter_);
  return result;
}

at::Tensor CastData::held(const at::TensorImpl& source) {
  if (!plain_) {
    return memory_.held;
  }
  if (held_.has_value()) {
    if (auto held = held_->lock(); held.defined()) {
      return at::Tensor(std::move(held));
    }
  }
  const c10::InferenceMode normal_mode(false); // uses outside of inference mode get this tensor too
  at::Tensor held = alias(source);
  if (held.defined()) {
    const std::lock_guard<std::mutex> lock(casts_mutex());
    held_.emplace(held.getIntrusivePtr());
    if (memory_.storage) {
      memory_.held = held; // no Python object belongs to it yet
    }
  }
  return held;
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
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(memory_.storage.data_ptr(), stream);
}

void CastData::let_go() {
  CastMemory gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  std::swap(gone, memory_);
  bytes_ = 0;
}

CastMemory CastData::take_memory() {
  return plain_ && memory_.frees_without_python() ? std::exchange(memory_, CastMemory()) : CastMemory();
}

bool CastData::hold() {
  memory_.storage = c10::Storage(storage_->lock());
  if (held_.has_value()) {
    memory_.held = at::Tensor(held_->lock());
  }
  return memory_.storage && (shaped_as_source_ || memory_.held.defined());
}

bool CastMemory::frees_without_python() const {
  const auto has_object = [](const auto& impl) { return impl.pyobj_slot()->load_pyobj() != nullptr; };
  return !(storage && has_object(*storage.unsafeGetStorageImpl())) &&
         !(held.defined() && has_object(*held.unsafeGetTensorImpl()));
}

void CastData::leak_unless_plain() {
  if (!plain_) {
    (void)memory_.held.unsafeReleaseTensorImpl();
  }
}

} // namespace torch_promote
