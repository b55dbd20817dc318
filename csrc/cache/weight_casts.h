// file: the casts that hang on one weight
#pragma once

#include "cache/cast_data.h"
#include "cast/cast.h"
#include "policy/fork_safe_mutex.h"

#include <c10/core/Event.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch_promote {

// Stock makes the node of a weight's cast at the first use in a region, under no_grad too, and the node's number
// decides the order of the backward. A use under no_grad takes the number for the first use in its span that needs a
// node; see HeldCasts::span. If several threads use the weight at once, the last note counts: stock's threads share the
// casts, so the order of its backward is not fixed either.
struct FirstUse {
  at::ScalarType dtype; // of the cast
  uint64_t span;
  uint64_t sequence_nr;
};

// A cast, which any thread may use on any stream.
class PersistentCast {
 public:
  PersistentCast(CastData data, const at::TensorImpl& source) : data_(std::move(data)) {
    if (source.is_cuda()) {
      made_.emplace(c10::DeviceType::CUDA);
      made_->record(current_stream(source));
    }
  }

  const CastData& data() const {
    return data_;
  }
  // Under the mutex of the weight: whether that has been written to since.
  bool outdated = false;
  // Lets the current stream, if it is not that of the cast, wait until the cast is done, and keeps the memory from
  // being reused before the stream is. `mutex` is that of the weight.
  void prepare_for_current_stream(const at::TensorImpl& source, ForkSafeMutex& mutex) {
    if (!made_.has_value()) {
      return;
    }
    const c10::Stream stream = current_stream(source);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (data_.stream() == stream.id() || std::find(prepared_.begin(), prepared_.end(), stream) != prepared_.end()) {
        return;
      }
    }
    made_->block(stream);
    data_.record_on(stream);
    const std::lock_guard<std::mutex> lock(mutex);
    prepared_.push_back(stream);
  }

 private:
  CastData data_;
  std::optional<c10::Event> made_;
  std::vector<c10::Stream> prepared_;
};

// Shared, so that a cast is copied and destroyed outside of the lock: both may run Python, or wait for the GIL.
using PersistentCasts = std::vector<std::shared_ptr<PersistentCast>>;

// The casts of one weight. Also made for a weight that has none, to learn when a tensor is made that shares its data.
class WeightCasts final : public c10::BackendMeta {
 public:
  explicit WeightCasts(const at::TensorImpl* weight);
  ~WeightCasts() override;
  WeightCasts(const WeightCasts&) = delete;
  WeightCasts& operator=(const WeightCasts&) = delete;

  // The weight has died, and an entry of a region still refers to this weakly.
  void release_resources() override;
  // PyTorch calls this when it makes a tensor that shares the weight's data and may have its own version counter. The
  // copy gets no BackendMeta.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override;

  void drop() const;
  void begin_epoch() const;
  uint64_t epoch() const {
    return epoch_.load(std::memory_order_relaxed);
  }
  // Guards what follows. It is found by the address of the weight's TensorImpl: the casts stay there. A swap of tensors
  // gives the TensorImpl to another Python object, and a copy of its metadata gets no casts.
  ForkSafeMutex& mutex() const {
    return mutex_;
  }
  PersistentCasts& casts() const {
    return casts_;
  }
  void note_use_without_node(at::ScalarType dtype, uint64_t span) const {
    if (first_use(dtype, span) == nullptr) {
      std::erase_if(first_uses_, [span](const FirstUse& use) { return use.span != span; });
      first_uses_.push_back({dtype, span, next_sequence_nr()});
    }
  }
  const FirstUse* first_use(at::ScalarType dtype, uint64_t span) const {
    const auto found = std::find_if(first_uses_.begin(), first_uses_.end(), [&](const FirstUse& use) {
      return use.span == span && use.dtype == dtype;
    });
    return found != first_uses_.end() ? &*found : nullptr;
  }

 private:
  ForkSafeMutex& mutex_;
  mutable PersistentCasts casts_; // oldest first
  mutable std::vector<FirstUse> first_uses_; // one for each dtype
  mutable std::atomic<uint64_t> epoch_;
};

// All weights that may have casts.
struct WeightRegistry {
  ForkSafeMutex mutex; // locked before that of a weight, if both are
  std::unordered_set<const WeightCasts*> weights;
  std::atomic<size_t> size = 0; // of `weights`, to be read without the lock
};
WeightRegistry& weight_registry();

// Null if the weight has no BackendMeta, or another library's.
WeightCasts* casts_of(const at::TensorBase& weight);
// The same, with `mutex()` locked if it is not null.
struct LockedCasts {
  WeightCasts* casts;
  std::unique_lock<std::mutex> lock;
};
LockedCasts lock_casts_of(const at::TensorBase& weight);
// Makes them if the slot is empty. (If another thread copies the tensor at this moment, that is a race inside PyTorch:
// a tensor's metadata must not be written while it is read.)
WeightCasts* make_casts_of(const at::TensorBase& weight);

} // namespace torch_promote
