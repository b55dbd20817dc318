// file: one cast in the cache: when it is still good, and how a use gets it
#pragma once

#include "cache/cast_data.h"
#include "cast/cast_node.h"
#include "cache/weight.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

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
// What stock casts anew at every use (frozen weights, views of weights, activations) has a node for each use there, and
// gradients that are summed in float32. Such uses share the data here, each with a node of its own: the bits of the
// gradients stay stock's.
//
// Only a plain tensor can be taken apart like this. Subclasses, wrappers of functorch, fake and functional tensors are
// held whole, as stock holds them, until the region ends or their source changes.
class CastEntry {
 public:
  // `owner` is the source, or the weight that it is a view of: the entry dies with it. `watch` is what `watch_weight`
  // said before the cast; 0 if nobody asked.
  CastEntry(const at::TensorBase& owner, CastData data, const at::Tensor& cast, Reuse reuse, uint64_t watch = 0);

  bool is_dead() const {
    return owner_.expired();
  }
  // Whether `source` is what was cast, and unchanged since. `watch` as above, of now.
  bool is_fresh(const at::TensorImpl& source, uint64_t watch = 0) const {
    return data_.is_fresh(source) && watch == watch_;
  }
  // Whether it was cast from this tensor or from one that shares its storage.
  bool is_cast_of(const at::TensorImpl& tensor) const {
    return is_owned_by(tensor) || data_.stamp().same_storage(tensor);
  }
  bool is_owned_by(const at::TensorImpl& tensor) const {
    return owner_._unsafe_get_target() == &tensor;
  }
  at::ScalarType dtype() const {
    return data_.dtype();
  }
  CastData& data() {
    return data_;
  }
  const CastData& data() const {
    return data_;
  }

  // The cast as a use under the present grad mode needs it. In anomaly mode this runs Python, which may clear the
  // cache: hold the entry.
  at::Tensor use(const at::Tensor& source);

 private:
  at::Tensor use_in_same_graph(const at::Tensor& source);
  void link(const at::Tensor& cast);

  WeakTensor owner_;
  CastData data_;
  Reuse reuse_;
  uint64_t watch_;
  std::optional<WeakTensor> cast_;
  std::optional<WeakNode> node_;
  std::optional<uint64_t> sequence_nr_; // of the first cast's node
};

} // namespace torch_promote
