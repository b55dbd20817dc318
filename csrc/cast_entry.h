// file: one cast in the cache: what it holds, when it is still good, and how a use gets it
#pragma once

#include "cast_node.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace torch_promote {

// NOTE [ What an entry holds ]
// A cast of a trainable weight is a tensor whose grad_fn leads to the weight's AccumulateGrad, and that owns the
// weight. A cache that holds this tensor therefore keeps every weight it has seen alive until the region ends, however
// weak its own reference to the weight is. So an entry owns the *data* of the cast only, as a detached alias, and
// refers weakly to the weight, to the cast itself and to its autograd node. A second use in the same graph gets the
// same node, which is what makes its gradients be summed in the same place, and to the same bits, as stock's. A node
// that nobody holds any more belongs to a graph that is gone; the next use that needs a gradient gets a new one over
// the same data.
//
// Only a plain tensor can be taken apart like this. Subclasses, wrappers of functorch, fake and functional tensors are
// held whole, as stock holds them, until the region ends or their source changes.

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// An ordinary dense tensor, which nobody but PyTorch's core looks into.
bool is_plain(const at::TensorImpl& impl);

// What tells whether a source is still what was cast. The storage is held weakly, so that its address cannot come to
// mean another one: `weight.data = other`, twice, may land on the same data pointer.
class Stamp {
 public:
  explicit Stamp(const at::TensorImpl& impl);
  bool matches(const at::TensorImpl& impl) const;
  bool same_storage(const at::TensorImpl& impl) const;

 private:
  uint32_t version_;
  std::optional<WeakStorage> storage_;
  const void* data_ = nullptr;
};

class CastEntry {
 public:
  // `stamp` is the source's from before the cast.
  CastEntry(const at::Tensor& source, Stamp stamp, const at::Tensor& cast);

  bool is_dead() const;
  bool is_fresh(const at::TensorImpl& source) const;
  bool is_cast_of(const at::TensorImpl& tensor) const;
  size_t bytes() const;

  // The cast as a use under the present grad mode needs it.
  at::Tensor use(const at::Tensor& source);

  // At thread exit Python may be gone, and a subclass's tensor cannot be let go without it.
  void leak_unless_plain();

 private:
  void link(const at::Tensor& cast);

  WeakTensor source_;
  Stamp stamp_;
  bool plain_;
  at::Tensor held_; // plain: the data of the cast; otherwise the cast
  uint32_t held_version_ = 0;
  std::optional<WeakTensor> cast_;
  std::optional<WeakNode> node_;
  std::optional<uint64_t> sequence_nr_; // of the first cast's node
};

} // namespace torch_promote
