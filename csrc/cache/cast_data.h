// file: the data of a cast that is kept: whether its source is still what was cast
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>

namespace torch_promote {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// clang-format off
inline constexpr c10::DispatchKeySet kNotPlain = c10::DispatchKeySet({
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

// An ordinary dense tensor, which nobody but PyTorch's core looks into.
inline bool is_plain(const at::TensorImpl& impl) {
  return impl.layout() == at::kStrided && impl.has_storage() && !impl.key_set().has_any(kNotPlain) &&
         !impl.has_symbolic_sizes_strides() && (impl.is_cpu() || impl.is_cuda());
}

// What tells whether a source is still what was cast. The storage is held weakly, so that its address cannot come to
// mean another one: `weight.data = other`, twice, may land on the same data pointer.
class Stamp {
 public:
  explicit Stamp(const at::TensorImpl& impl);
  bool matches(const at::TensorImpl& impl) const;
  // Whether the tensor is the same part of its storage. Of a view this is what it is known by: each use makes another.
  bool is_same_part(const at::TensorImpl& impl) const {
    return offset_ == impl.storage_offset() && sizes_ == impl.sizes() && strides_ == impl.strides();
  }
  bool same_storage(const at::TensorImpl& impl) const {
    return impl.has_storage() && storage() != nullptr && storage() == impl.unsafe_storage().unsafeGetStorageImpl();
  }
  // Compared, never followed.
  const c10::StorageImpl* storage() const {
    return storage_.has_value() ? storage_->_unsafe_get_target() : nullptr;
  }

 private:
  uint32_t version_;
  at::ScalarType dtype_;
  std::optional<WeakStorage> storage_; // plain, and so is what follows
  const void* data_ = nullptr;
  int64_t offset_ = 0;
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

// The data of a cast, kept for later uses of its source.
class CastData {
 public:
  // `stamp` is the source's from before the cast.
  CastData(Stamp stamp, const at::Tensor& source, const at::Tensor& cast);

  // Whether `source` is still what was cast.
  bool is_fresh(const at::TensorImpl& source) const;
  const Stamp& stamp() const {
    return stamp_;
  }
  // The cast of `source`, outside of every graph; except for a tensor that is not plain, which is held whole.
  const at::Tensor& held(const at::TensorImpl& source);
  // Plain: a tensor of its own over the data, for a graph.
  at::Tensor alias(const at::TensorImpl& source) const;
  at::ScalarType dtype() const {
    return dtype_;
  }
  bool is_plain() const {
    return plain_;
  }
  size_t bytes() const {
    return plain_ ? storage_.nbytes() : 0;
  }
  // At thread exit Python may be gone, and a subclass's tensor cannot be let go without it.
  void leak_unless_plain();

 private:
  Stamp stamp_;
  bool plain_;
  at::ScalarType dtype_;
  c10::Storage storage_;         // plain: of the cast
  c10::VariableVersion counter_; // plain: of the cast
  uint32_t version_ = 0;         // of the cast, when it was made
  bool shaped_as_source_ = true; // plain: sizes and strides of the cast are the source's
  at::Tensor held_;              // undefined until somebody asks, if the cast itself is in a graph
  int64_t stream_ = 0;           // where it was made: on a GPU another stream may not have waited for it
};

} // namespace torch_promote
