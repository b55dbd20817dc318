// file: the casts of weights that a region is expected to need, made together
#pragma once

#include "cache/entry.h"
#include "cache/weight_memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch_promote {

// NOTE [ Weights cast together ]
// On a GPU, the cast of a small weight costs little more than its launch, and each iteration of a training casts the
// same weights. So a thread remembers which weights its regions cast on a GPU, by the first that is still alive.
// When a later region begins with this weight, all of them are cast in one `_foreach_copy_`, at this first miss. Only
// the data is made in advance. A weight's entry and node are made at its first use, with the sequence number of that
// use, so the backward sums in stock's order; and each cast has memory of its own, which is freed when stock would free
// it.
//
// A cast in advance reads the weight earlier than stock does. That gives the same bits only if nothing that was
// launched before the first miss still has to write to the weight, on another stream for example (code that streams
// weights to the GPU waits for each of them just before its use). So a weight is cast in advance only if its last write
// is known to come first: its version and alias epoch are those of the last region's cast, or of an optimizer's step,
// on this stream, and nobody else writes to its memory. A write between the cast and the use changes the version, or is
// noted (NOTE [ Unversioned writes ]), or goes through a tensor that shares the memory, as in `weight.data.clamp_(-1,
// 1)`: that changes the alias epoch. So these weights get a BackendMeta in all modes. The replay of a graph may write,
// too, and another stream may still be at it: no cast from before a replay is used after it, and only weights that a
// region has used since are cast in advance.
//
// Casts in advance take memory earlier than stock's. At the end of a forward whose graph is kept it is the same, and
// there such a forward needs most. So it is done only where gradients are wanted. A weight that is not used costs its
// cast, until the region ends. A region that has wasted two casts is the last: weights that it begins with are no
// longer cast in advance.

// A weight that regions of some thread cast. They share it, because one thread may step what another casts.
struct BatchedWeight {
  explicit BatchedWeight(const at::Tensor& weight);
  // 0 if the weight is gone, or another library's BackendMeta occupies its slot.
  uint64_t alias_epoch() const;

  const WeightMemory memory;
  const std::optional<WeakMeta> meta;
  // Under the mutex of all batched weights: up to which version and alias epoch its writes precede new work on a
  // stream, and how many graphs had been replayed then.
  uint32_t version = 0;
  uint64_t aliases = 0;
  c10::StreamId stream = 0;
  uint64_t replays = 0;
};

struct BatchPlan; // what regions cast to one dtype

// Of one thread's region, or of suspended ones.
class WeightBatch {
 public:
  WeightBatch() = default;
  WeightBatch(const WeightBatch&) = delete;
  WeightBatch& operator=(const WeightBatch&) = delete;
  ~WeightBatch() = default;

  // The cast of a weight that no cache has, without a node, if it was made in advance; it may make those of other
  // weights with it. Undefined otherwise. `now` is the time at which a cast now begins.
  at::Tensor take(const Source& source, at::ScalarType dtype, const CastTime& now);
  // The region ends: remembers what it cast.
  void end();
  // For other threads, under casts_mutex, as is `swap`. See NOTE [ Casts and other threads ].
  void take_memory(std::vector<CastMemory>& gone);
  void swap(WeightBatch& other) {
    groups_.swap(other.groups_);
  }

 private:
  // When and where casts are made.
  struct Moment {
    c10::StreamId stream = 0;
    uint64_t capture = 0;
    uint64_t replays = 0;
    CastTime time{};
  };
  // A cast in advance. It is empty if another thread has freed it.
  struct Pending {
    std::shared_ptr<BatchedWeight> weight;
    uint32_t version;
    uint64_t alias_epoch;
    CastMemory cast;
    bool used = false;
  };
  // The casts to one dtype on one device.
  struct Group {
    at::ScalarType dtype;
    c10::Device device;
    bool learns;                                      // the first cast was made in grad mode
    std::vector<std::shared_ptr<BatchedWeight>> cast; // so far in this region
    std::shared_ptr<BatchPlan> plan;                  // by which `pending` was cast
    std::vector<Pending> pending;
    size_t tidy_at = 64; // the size of `cast` at which it is tidied up: a region may go on for a whole training
    size_t next = 0;     // the place in `pending` where the next use is expected
    Moment made;         // `pending`
  };

  Group& group_of(const Source& source, at::ScalarType dtype);
  static void cast_together(Group& group, const Source& first, const Moment& moment);
  static Pending* find_pending(Group& group, const Source& source, const Moment& moment);

  std::vector<Group> groups_;
};

// An optimizer has made a step with this weight, on the current stream.
void note_batched_step(const at::Tensor& weight);
// Whether there are any, so that the above does anything.
bool any_batched_weights();

} // namespace torch_promote
