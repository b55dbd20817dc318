// file: the data of a kept cast, and the check that its source has not changed
#pragma once

#include "cast/source.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <type_traits>

namespace torch_promote {

// Of a tensor on a GPU: this thread's stream on its device.
c10::Stream current_stream(const at::TensorImpl& impl);

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
using WeakMeta = c10::weak_intrusive_ptr<c10::BackendMeta>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Detects that a source has changed since it was cast. The signature holds the storage weakly, so that its address
// stays taken: after `weight.data = other`, twice, a new storage could lie at the old address and look unchanged.
class SourceSignature {
 public:
  explicit SourceSignature(const Source& source);
  bool matches(const Source& source) const;
  // Whether the tensor is the same part of its storage. This is how a view is recognized, of which each use makes a new
  // tensor.
  bool is_same_part(const at::TensorImpl& impl) const {
    const at::IntArrayRef sizes = impl.sizes();
    const at::IntArrayRef strides = impl.strides();
    if (offset_ != impl.storage_offset() || geometry_.size() != 2 * sizes.size()) {
      return false;
    }
    for (size_t dim = 0; dim < sizes.size(); ++dim) { // shorter than two calls of memcmp
      if (geometry_[2 * dim] != sizes[dim] || geometry_[2 * dim + 1] != strides[dim]) {
        return false;
      }
    }
    return true;
  }
  bool same_storage(const at::TensorImpl& impl) const {
    return impl.has_storage() && storage() != nullptr && storage() == impl.unsafe_storage().unsafeGetStorageImpl();
  }
  // To compare with; the storage may be gone.
  const c10::StorageImpl* storage() const {
    return storage_.has_value() ? storage_->_unsafe_get_target() : nullptr;
  }

 private:
  uint32_t version_;
  at::ScalarType dtype_;
  std::optional<WeakStorage> storage_; // of a plain source; the members below are valid with it
  const void* data_ = nullptr;
  int64_t offset_ = 0;
  c10::SmallVector<int64_t, 2 * c10::kDimVectorStaticSize> geometry_; // size and stride of each dimension
};

// Keeps the memory of a cast.
struct CastMemory {
  c10::Storage storage;
  at::Tensor held; // the cast without a graph, once it has been used; of a cast that is not plain, the cast itself

  CastMemory() = default;
  CastMemory(CastMemory&&) = default;
  CastMemory& operator=(CastMemory&&) = default;
  // A copy keeps nothing. It is made under casts_mutex, where no tensor may be copied.
  CastMemory(const CastMemory& /*other*/) {}
  CastMemory& operator=(const CastMemory&) = delete;
  ~CastMemory() = default;

  // Whether freeing it runs no Python: no Python object belongs to it.
  bool frees_without_python() const;
};

// Else a vector that grows would copy.
static_assert(std::is_nothrow_move_constructible_v<CastMemory>);

// The data of a cast, kept for later uses of its source. The caches of threads hold this data, and of them other
// threads may free the memory: see NOTE [ Casts and other threads ].
class CastData {
 public:
  // Before the cast, which may run Python that changes the source. `fill` takes the cast, unless it is not to be kept.
  explicit CastData(const Source& source) : signature_(source) {}
  void fill(const Source& source, const at::Tensor& cast);
  // A cast that was made of a source with this signature.
  CastData(const SourceSignature& signature, const Source& source, const at::Tensor& cast) : signature_(signature) {
    fill(source, cast);
  }

  // Whether the data is still the cast of `source`.
  bool is_unchanged(const Source& source) const;
  // The same, and whether the data may be used on the current stream.
  bool is_fresh(const Source& source) const;
  const SourceSignature& signature() const {
    return signature_;
  }
  // The cast of `source`, detached from every graph. If it is not plain, this is the tensor that was cast, graph and
  // all. Undefined if the memory was freed.
  at::Tensor held(const at::TensorImpl& source);
  // The same, of a cast that was made without a node, and that no other thread frees.
  const at::Tensor& tensor() const {
    return memory_.held;
  }
  // A new tensor over the data of a plain cast, which may be given a node. Undefined if the memory was freed.
  at::Tensor alias(const at::TensorImpl& source) const;
  at::ScalarType dtype() const {
    return dtype_;
  }
  bool is_plain() const {
    return plain_;
  }
  c10::StreamId stream() const {
    return stream_;
  }
  // Keeps the memory of a plain cast from being reused before work on a stream is done.
  void record_on(const c10::Stream& stream) const;
  size_t bytes() const { // that it keeps
    return bytes_;
  }
  // Keeps the memory only as long as somebody else does, such as autograd for the backward of an op that used the cast.
  // The cast has to have the source's strides.
  void let_go();
  bool is_freed() const {
    return plain_ && storage_->expired();
  }
  bool is_shaped_as_source() const {
    return shaped_as_source_;
  }
  // Under casts_mutex.
  const CastMemory& memory() const {
    return memory_;
  }
  CastMemory take_memory();
  // Of a copy, which keeps no memory: keeps that of the original. False if it is gone.
  bool hold();
  // For the end of the thread: Python may have been finalized, and freeing a subclass's tensor needs it.
  void leak_unless_plain();

 private:
  SourceSignature signature_;
  bool plain_ = false;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  CastMemory memory_;
  // The members below describe a plain cast.
  std::optional<WeakStorage> storage_;
  std::optional<WeakTensor> held_;
  size_t bytes_ = 0;
  c10::VariableVersion counter_;
  uint32_t version_ = 0;         // of the cast, when it was made
  bool shaped_as_source_ = true; // the cast has the source's strides
  int64_t offset_ = 0;           // in its storage
  c10::StreamId stream_ = 0;     // CUDA: where the cast was made. Another stream may run before it is done.
};

} // namespace torch_promote
