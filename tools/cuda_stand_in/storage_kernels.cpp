// file: the kernels that make tensors, or change their storage
#include "state.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <optional>
#include <utility>

namespace cuda_stand_in {

namespace {

using at::Tensor;

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard({c10::kCUDA, index_of(device)});
  return Tensor(
      at::detail::empty_generic(
          size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
          dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())), format));
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard({c10::kCUDA, index_of(device)});
  return Tensor(
      at::detail::empty_strided_generic(
          size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
          dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()))));
}

// Grows a tensor's storage to the size that the tensor needs.
void grow_for(const Tensor& self) {
  grow(
      self.storage(), self.numel() == 0 ? 0
                                        : at::detail::computeStorageNbytes(
                                              self.sizes(), self.strides(), self.itemsize(), self.storage_offset()));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    grow_for(self);
  }
  if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    grow_for(self);
  }
  return self;
}

Tensor& set_view(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "set_: expected a storage on ", self.device(), ", and got one on ",
      source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  grow_for(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_view(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return self.is_same(source)
             ? self
             : set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_view(
      self, {c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), /*resizable=*/true}, 0, {0},
      {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
}

} // namespace cuda_stand_in
