// file: persistent casts that CUDA graphs read
#pragma once

#include "cache/weight_casts.h"
#include "cache/weight_memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch_promote {

// NOTE [ Graphs and persistent casts ]
// A graph that is captured in a persistent region reads the casts of the weights where they lie, instead of making them
// at each replay. The graph (its Python object) keeps them alive. Before each replay, those whose weight may have
// changed since are made again in place, by one `_foreach_copy_`. So a step, or a checkpoint that is loaded, between
// two replays costs one kernel, and a generation none.
//
// Such a cast is made before the capture, by the runs that warm up, and then belongs to graphs alone: code outside of
// them, whose autograd graphs could not bear a cast that is overwritten, makes another. A capture that finds none, or
// in which the weight has been written to, makes the cast inside of the graph. All graphs share the casts of a weight.
//
// Only uses without gradients read such casts. What autograd saves in a capture has to last until the backward, which
// may be another graph: a refresh before a replay in between would change it.
//
// A replay may write to weights, and nothing tells. But during the capture the versions tell which weights with casts
// the graph writes to. If it writes to none of them, a replay ends no cast but those of weights that had none when the
// capture began. A graph whose capture was not seen from its beginning may write to all.

// The cast of one weight that graphs read.
class GraphCast {
 public:
  // Takes over a cast that nobody else has.
  GraphCast(const at::Tensor& weight, PersistentCast& cast);

  const at::Tensor& cast() const {
    return cast_;
  }
  // Whoever notes a write clears it.
  const std::shared_ptr<std::atomic<bool>>& is_fresh() const {
    return is_fresh_;
  }
  bool is_of(const at::TensorImpl& weight, at::ScalarType dtype) const {
    return cast_.scalar_type() == dtype && memory_.is_of(weight);
  }
  // Whether it still is the cast of its weight.
  bool is_current() const;
  // The weight's memory, to make the cast again from. Undefined if it is gone.
  at::Tensor weight() const {
    return memory_.tensor();
  }
  // Before the weight is read to make the cast again, and after it was, on the current stream.
  void begin_refresh();
  void end_refresh();
  // Lets the current stream wait until the cast is made, and keeps the memory from being reused before the stream is.
  void wait();

 private:
  WeightMemory memory_;
  WeakMeta meta_;
  at::Tensor cast_;
  std::shared_ptr<std::atomic<bool>> is_fresh_;
  uint32_t version_;
  c10::Event made_;
  std::atomic<c10::StreamId> ready_on_; // the stream that made it, or has waited last
};

// What a captured graph reads and writes of the weights that have casts.
struct CapturedCasts {
  std::vector<std::shared_ptr<GraphCast>> read;
  // The first weight, in the order of WeightCasts::number, that the graph may write to.
  uint64_t writes_from = 0;
};

// A capture begins, or has ended. The graph owns the result, from the beginning on.
std::shared_ptr<CapturedCasts> begin_graph();
void end_graph(const std::shared_ptr<CapturedCasts>& casts);
// Around a replay. Null: nothing is known of the graph.
void before_replay(const CapturedCasts* casts);
void after_replay(const CapturedCasts* casts);

// In a capture: the data of the weight's cast, which the graph may read at each replay. Undefined if there is none.
at::Tensor cast_for_graph(const Source& source, at::ScalarType dtype);

} // namespace torch_promote
