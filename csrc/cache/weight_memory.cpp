// file: the memory of a weight, to be recognized and read later without keeping the weight alive
#include "cache/weight_memory.h"

#include "cache/persistent_cache.h"

#include <cstring>
#include <utility>

namespace torch_promote {

namespace {

// PyTorch compares version counters nowhere. Two that are the same one have the same representation, a pointer.
bool is_same_counter(const c10::VariableVersion& one, const c10::VariableVersion& other) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(static_cast<const void*>(&one), static_cast<const void*>(&other), sizeof(one)) == 0;
}

c10::DispatchKeySet keys_of(const at::TensorImpl& impl) {
  return c10::DispatchKeySet(impl.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
}

} // namespace

WeightMemory::WeightMemory(const at::TensorImpl& weight)
    : address_(&weight),
      storage_(weight.unsafe_storage().getWeakStorageImpl()),
      counter_(weight.version_counter()),
      data_(weight.data()),
      keys_(keys_of(weight)),
      dtype_(c10::typeMetaToScalarType(weight.dtype())),
      offset_(weight.storage_offset()),
      sizes_(weight.sizes()),
      strides_(weight.strides()) {}

bool WeightMemory::is_of(const at::TensorImpl& tensor) const {
  return address_ == &tensor && tensor.has_storage() && storage() == tensor.unsafe_storage().unsafeGetStorageImpl() &&
         is_same_counter(counter_, tensor.version_counter()) && data_ == tensor.data() &&
         dtype_ == c10::typeMetaToScalarType(tensor.dtype()) && offset_ == tensor.storage_offset() &&
         sizes_ == tensor.sizes() && strides_ == tensor.strides();
}

bool WeightMemory::has_one_owner() const {
  const c10::Storage storage(storage_.lock());
  return storage && is_owned_by(storage, 2); // one is here
}

at::Tensor WeightMemory::tensor() const {
  c10::Storage storage(storage_.lock());
  if (!storage) {
    return {};
  }
  int64_t end = offset_ + 1;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    end += (sizes_[i] - 1) * strides_[i];
  }
  const size_t item = c10::elementSize(dtype_);
  const auto* const begin = static_cast<const char*>(storage.data());
  if (begin + offset_ * item != data_ || storage.nbytes() < static_cast<size_t>(end) * item) {
    return {}; // GCOVR_EXCL_LINE: needs a GPU, whose storages can be resized
  }
  at::Tensor result =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys_, c10::scalarTypeToTypeMeta(dtype_));
  at::TensorImpl& impl = *result.unsafeGetTensorImpl();
  impl.set_storage_offset(offset_);
  impl.set_sizes_and_strides(sizes_, strides_);
  return result;
}

} // namespace torch_promote
