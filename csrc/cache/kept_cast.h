// file: a cast that a cache keeps: whether it is still valid, and the tensor that each use gets
#pragma once

#include "cast/cast.h"
#include "cast/pooled.h"
#include "policy/process.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace torch_promote {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Of a tensor on a GPU: this thread's stream on its device.
c10::Stream current_stream(const at::TensorImpl& impl);

// NOTE [ Casts and other threads ]
// Stock's cache belongs to the process; ours keeps a set of casts for each thread. A thread alone adds and removes the
// casts of its set. Other threads do three things with them:
//
// - The thread that clears PyTorch's cache frees the memory of the casts of all threads (`end_casts_of_all_threads`).
// - The thread that writes to weights without changing their version marks their casts (`forget_casts`).
// - A thread of the autograd engine borrows a cast from the thread that ran the forward (`borrow_cast`). A checkpoint
//   recomputes there, and under stock finds the casts of the forward.
//
// All hold this mutex, and the owner holds it wherever it changes a cast, or which casts there are. So the owner reads
// without a lock, and a use of a kept cast takes none. Only the reference that keeps a cast's memory may go away at any
// time; the owner does not read it, but has a weak one.
//
// While it is locked, take no other lock, and run no code that may wait for the GIL: neither copy nor destroy a tensor
// or a cast. What is taken out is destroyed after the mutex is unlocked.
ForkSafeMutex& casts_mutex();

// What a later use of a tensor shares with the first one.
enum class Kind : uint8_t {
  trainable,  // a weight whose casts stock keeps: the data and, within one graph, the autograd node
  frozen,     // another weight: the data. Stock casts at each use, so each use has a node of its own
  activation, // the same, of any other tensor
};

// What is asked of a cache.
struct CastRequest {
  const Source& source;
  at::ScalarType dtype;
  Kind kind;
  uint64_t aliases;   // the alias_epoch of a frozen weight, else 0
  uint64_t capture;   // the CUDA graph that PyTorch captures, 0 for none; see capture.h
  uint8_t format = 0; // of a float8 weight; see kept_float8
};

// Detects that a source has changed since it was cast. The signature holds the storage weakly, so that its address
// stays taken: after `weight.data = other`, twice, a new storage could lie at the old address and look unchanged.
class SourceSignature {
 public:
  explicit SourceSignature(const Source& source);
  bool matches(const Source& source) const;
  bool is_gone() const { // its memory; of a source that is not plain, false
    return storage_.has_value() && storage_->expired();
  }
  const c10::StorageImpl* storage() const { // to compare with; the storage may be gone
    return storage_.has_value() ? storage_->_unsafe_get_target() : nullptr;
  }

 private:
  uint32_t version_;
  at::ScalarType dtype_;
  std::optional<WeakStorage> storage_; // of a plain source; the members below are valid with it
  const void* data_ = nullptr;
  int64_t offset_ = 0;
  c10::SmallVector<int64_t, 10> geometry_; // size and stride of each dimension
};

// Keeps the memory of a cast.
struct CastMemory {
  c10::Storage storage;
  at::Tensor held; // the cast without a graph, once it has been used; of a cast that is not plain, the cast itself

  CastMemory() = default;
  CastMemory(CastMemory&&) = default;
  CastMemory& operator=(CastMemory&&) = default;
  // A copy keeps nothing: no tensor may be copied under casts_mutex.
  CastMemory(const CastMemory& /*other*/) {}
  CastMemory& operator=(const CastMemory&) = delete;
  ~CastMemory() = default;

  // Whether freeing it runs no Python: no Python object belongs to it.
  bool frees_without_python() const;
};

// NOTE [ What a kept cast holds ]
// The grad_fn of a trainable weight's cast leads to the weight's AccumulateGrad, which owns the weight. A cache that
// holds the cast therefore keeps the weight alive until the region ends, even if it refers to the weight itself weakly.
// So a KeptCast owns the data of the cast only, as a detached alias, and refers weakly to the weight, to the cast and
// to the cast's node. A second use in the same graph gets the same node: gradients are then summed at the same place,
// and to the same bits, as under stock. If the node is gone, so is its graph, and the next use that needs a gradient
// gets a new node over the same data.
//
// Only a plain tensor can be split into data and node. The cache holds casts of subclasses, functorch wrappers, fake
// and functional tensors as they are, like stock, until the region ends or their source changes.
class KeptCast {
 public:
  static std::shared_ptr<KeptCast> make(const CastRequest& wanted) {
    return std::allocate_shared<KeptCast>(PoolAllocator<KeptCast>(), wanted);
  }
  // Before the cast, which may run Python that changes the source; `fill` takes the cast.
  explicit KeptCast(const CastRequest& wanted);
  void fill(const Source& source, const at::Tensor& cast);

  // The cast, with a node if the use needs one; undefined if another thread has freed its memory. In anomaly mode this
  // runs Python, which may clear the cache: the caller has to own the KeptCast.
  at::Tensor use(const Source& source);

  // Whether it still is the cast of the source, and may be used in the capture that is under way.
  bool is_fresh(const CastRequest& now) const;
  bool is_dead() const { // its source has died
    return owner_.has_value() ? owner_->expired() : signature_.is_gone();
  }
  bool is_freed() const {
    return plain_ && storage_->expired();
  }
  bool is_of(const at::TensorImpl& tensor, at::ScalarType dtype) const {
    return address_ == &tensor && dtype_ == dtype;
  }
  Kind kind() const {
    return kind_;
  }
  const SourceSignature& signature() const {
    return signature_;
  }
  size_t bytes() const { // that it keeps
    return bytes_;
  }
  // The cast detached from its graph, undefined if another thread has freed its memory. If it is not plain: the tensor
  // that was cast, graph and all.
  at::Tensor held(const at::TensorImpl& source);

  // From now on keeps the memory only as long as autograd does, for the backward of an op that used the cast. False if
  // that is impossible, because the cast has other strides than the source.
  bool let_go();
  // For the end of the thread: Python may have been finalized, and freeing a subclass's tensor needs it.
  void leak_unless_plain();

  // For other threads, under casts_mutex. See NOTE [ Casts and other threads ].
  const at::TensorImpl* address() const { // of the source, to compare with
    return address_;
  }
  void note_write() { // to the source, without a change of its version
    std::atomic_ref<bool>(written_to_).store(true, std::memory_order_relaxed);
  }
  bool frees_without_python() const {
    return plain_ && memory_.frees_without_python();
  }
  CastMemory take_memory();
  // A copy, which keeps no memory until `hold` is called, without the mutex. False if the memory is gone. Both are
  // recorded by the same node, if there is one.
  std::shared_ptr<KeptCast> copy() const {
    return std::shared_ptr<KeptCast>(new KeptCast(*this));
  }
  bool hold();

 private:
  KeptCast(const KeptCast&) = default;
  at::Tensor use_in_graph(const Source& source);
  at::Tensor alias(const at::TensorImpl& source) const;
  void wait_until_made(const at::TensorImpl& source);

  // --- The source
  const at::TensorImpl* address_;
  // Of a frozen weight none: torch.utils.swap_tensors refuses tensors with weak references, and stock has none.
  std::optional<WeakTensor> owner_;
  SourceSignature signature_;
  Kind kind_;
  uint64_t aliases_;
  uint64_t capture_;
  mutable bool written_to_ = false; // atomic

  // --- The cast
  bool plain_ = false;
  at::ScalarType dtype_;
  CastMemory memory_;
  // The members below describe a plain cast.
  std::optional<WeakStorage> storage_;
  std::optional<WeakTensor> held_;
  size_t bytes_ = 0;
  c10::VariableVersion counter_;
  uint32_t version_ = 0;         // of the cast, when it was made
  bool shaped_as_source_ = true; // the cast has the source's strides
  int64_t offset_ = 0;           // in its storage
  // On a GPU: the stream that made it, and those that have waited for it since.
  c10::SmallVector<c10::StreamId, 2> streams_;

  // --- Its node, of a trainable weight
  std::optional<WeakTensor> cast_;
  std::optional<WeakNode> node_;
  std::optional<uint64_t> sequence_nr_; // of the first cast's node
};

} // namespace torch_promote
