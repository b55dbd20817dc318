// file: the casts of weights that a region is expected to need, made together
#include "cache/weight_batch.h"

#include "cache/capture.h"
#include "cache/casts_mutex.h"
#include "cache/outside_writers.h"
#include "cache/persistent_cache.h"
#include "cache/weight_casts.h"
#include "policy/of_this_thread.h"
#include "policy/registry_sizes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <utility>

namespace torch_promote {

namespace {

struct BatchedWeights {
  ForkSafeMutex mutex; // guards the members of the weights, too
  ska::flat_hash_map<const at::TensorImpl*, std::weak_ptr<BatchedWeight>> all;
  std::atomic<bool> any = false; // to be read without the lock
  size_t sweep_at = 64;
};

BatchedWeights& batched_weights() {
  static auto* instance = new BatchedWeights; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Made at import: see NOTE [ Fork ].
[[maybe_unused]] const BatchedWeights& batched_weights_at_import = batched_weights();

[[maybe_unused]] const bool noted_batched_weights = note_registry("batched weights", [] {
  const std::lock_guard<std::mutex> lock(batched_weights().mutex);
  return batched_weights().all.size();
});

std::optional<WeakMeta> meta_of(const at::Tensor& weight) {
  WeightCasts* const casts = make_casts_of(weight);
  return casts != nullptr ? std::optional(WeakMeta(c10::intrusive_ptr<c10::BackendMeta>::reclaim_copy(casts)))
                          : std::nullopt;
}

// That of a weight on a GPU. Made if there is none.
std::shared_ptr<BatchedWeight> find_weight(const at::Tensor& tensor) {
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  BatchedWeights& weights = batched_weights();
  std::shared_ptr<BatchedWeight> weight; // destroyed without the lock
  const std::lock_guard<std::mutex> lock(weights.mutex);
  std::weak_ptr<BatchedWeight>& place = weights.all[&impl];
  weight = place.lock();
  if (weight == nullptr || !weight->memory.is_of(impl)) {
    weight = std::make_shared<BatchedWeight>(tensor);
    place = weight;
    weights.any = true;
  }
  if (weights.all.size() > weights.sweep_at) {
    for (auto it = weights.all.begin(); it != weights.all.end();) {
      it = it->second.expired() ? weights.all.erase(it) : std::next(it);
    }
    weights.sweep_at = 2 * weights.all.size() + 64;
  }
  return weight;
}

// The weight's writes up to now precede new work on the stream.
void note_writes_before(BatchedWeight& weight, c10::StreamId stream) {
  const uint64_t aliases = weight.alias_epoch();
  const std::lock_guard<std::mutex> lock(batched_weights().mutex);
  weight.version = weight.memory.version();
  weight.aliases = aliases;
  weight.replays = replays_begun();
  weight.stream = stream;
}

using BatchedList = std::vector<std::shared_ptr<BatchedWeight>>;

} // namespace

BatchedWeight::BatchedWeight(const at::Tensor& weight) : memory(*weight.unsafeGetTensorImpl()), meta(meta_of(weight)) {}

uint64_t BatchedWeight::alias_epoch() const {
  const auto casts = meta.has_value() ? meta->lock() : c10::intrusive_ptr<c10::BackendMeta>();
  return casts ? static_cast<const WeightCasts&>(*casts).epoch() : 0;
}

struct BatchPlan {
  at::ScalarType dtype;
  BatchedList weights;
  size_t wasted = 0;
};

namespace {

constexpr size_t kMaxPlans = 64;
constexpr size_t kMaxWasted = 2;
// An input that requires a gradient is cast like a weight, and is another tensor each time. So a region may begin with
// a few that no plan knows.
constexpr size_t kMaxInputs = 4;

std::vector<std::shared_ptr<BatchPlan>>& plans() { // oldest first
  return of_this_thread<std::vector<std::shared_ptr<BatchPlan>>>();
}

// The plan whose first living weight this is.
std::shared_ptr<BatchPlan> find_plan(const at::TensorImpl& first, at::ScalarType dtype) {
  const auto begins_with_it = [&](const std::shared_ptr<BatchPlan>& plan) {
    const BatchedList& weights = plan->weights;
    const auto alive =
        std::find_if(weights.begin(), weights.end(), [](const auto& weight) { return !weight->memory.is_gone(); });
    return plan->dtype == dtype && alive != weights.end() && (*alive)->memory.is_of(first);
  };
  const auto found = std::find_if(plans().begin(), plans().end(), begins_with_it);
  return found != plans().end() ? *found : nullptr;
}

std::shared_ptr<BatchPlan> make_plan(at::ScalarType dtype) {
  std::erase_if(plans(), [](const auto& plan) {
    return std::all_of(
        plan->weights.begin(), plan->weights.end(), [](auto& weight) { return weight->memory.is_gone(); });
  });
  if (plans().size() == kMaxPlans) {
    plans().erase(plans().begin());
  }
  return plans().emplace_back(std::make_shared<BatchPlan>(dtype));
}

// A weight that was written to in the region was cast twice.
void remove_repeated(BatchedList& weights) {
  ska::flat_hash_set<const BatchedWeight*> known;
  std::erase_if(weights, [&known](const auto& weight) { return !known.insert(weight.get()).second; });
}

void tidy_up(BatchedList& weights, size_t& at) {
  if (weights.size() < at) {
    return;
  }
  remove_repeated(weights);
  std::erase_if(weights, [](const auto& weight) { return weight->memory.is_gone(); });
  at = 2 * weights.size() + 64;
}

// Regions may end in another thread than they began in, and only its own thread may change a plan.
bool is_of_this_thread(const std::shared_ptr<BatchPlan>& plan) {
  return std::find(plans().begin(), plans().end(), plan) != plans().end();
}

} // namespace

WeightBatch::Group& WeightBatch::group_of(const Source& source, at::ScalarType dtype) {
  const c10::Device device = source.impl.device();
  const auto found = std::find_if(groups_.begin(), groups_.end(), [&](const Group& group) {
    return group.dtype == dtype && group.device == device;
  });
  if (found != groups_.end()) {
    return *found;
  }
  const std::lock_guard<std::mutex> lock(casts_mutex());
  groups_.push_back({dtype, device, at::GradMode::is_enabled(), {}, nullptr, {}, 64, 0, {}});
  return groups_.back();
}

at::Tensor WeightBatch::take(const Source& source, at::ScalarType dtype, const CastTime& now) {
  if (!source.impl.is_cuda() || !source.takes_fast_path || !source.impl.is_non_overlapping_and_dense() ||
      source.impl.numel() == 0) {
    return {};
  }
  const Moment moment{current_stream(source.impl).id(), current_capture(source), replays_begun(), now};
  Group& group = group_of(source, dtype); // now: asking for the capture may run Python, which may end the region
  if (!group.learns) {
    return {};
  }
  if (group.plan == nullptr && group.cast.size() <= kMaxInputs) {
    group.plan = find_plan(source.impl, dtype);
    if (group.plan != nullptr && group.plan->wasted < kMaxWasted) {
      cast_together(group, source, moment);
    }
  }
  at::Tensor result;
  if (Pending* const pending = find_pending(group, source, moment)) {
    group.cast.push_back(pending->weight);
    group.next = static_cast<size_t>(pending - group.pending.data()) + 1;
    pending->used = true;
    const std::lock_guard<std::mutex> lock(casts_mutex());
    std::swap(result, pending->cast.held);
  } else {
    group.cast.push_back(find_weight(source.tensor));
  }
  if (moment.capture == 0) {
    note_writes_before(*group.cast.back(), moment.stream);
  }
  tidy_up(group.cast, group.tidy_at);
  return result;
}

// The weights' memory is read here, at the first miss, and the result is used up to the end of the region.
void WeightBatch::cast_together(Group& group, const Source& first, const Moment& moment) {
  // Work that is captured runs at a replay, after all that was launched before.
  const auto is_settled = [&](const BatchedWeight& weight, uint32_t version, uint64_t aliases) {
    const std::lock_guard<std::mutex> lock(batched_weights().mutex);
    const bool on_another_stream = weight.stream != moment.stream || weight.replays != moment.replays;
    return weight.version == version && weight.aliases == aliases && (!on_another_stream || moment.capture != 0);
  };
  std::vector<Pending> pending;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> casts;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  try {
    for (const std::shared_ptr<BatchedWeight>& weight : group.plan->weights) {
      const uint32_t version = weight->memory.version();
      const uint64_t aliases = weight->alias_epoch();
      at::Tensor tensor = weight->memory.tensor();
      const bool writers_are_known = aliases != 0 && tensor.defined() && is_owned_by(tensor.storage(), 2) &&
                                     !has_outside_writers(*tensor.storage().unsafeGetStorageImpl());
      if (!writers_are_known || !(weight->memory.is_of(first.impl) || is_settled(*weight, version, aliases))) {
        continue;
      }
      CastMemory memory;
      memory.held = at::_ops::empty_strided::call(
          c10::fromIntArrayRefSlow(tensor.sizes()), c10::fromIntArrayRefSlow(tensor.strides()), group.dtype, {},
          group.device, {});
      casts.push_back(memory.held);
      weights.push_back(std::move(tensor));
      pending.push_back({weight, version, aliases, std::move(memory)});
    }
  } catch (const c10::OutOfMemoryError&) { // GCOVR_EXCL_LINE: needs a GPU
    return;                                // GCOVR_EXCL_LINE: there may be enough for one at a time
  }
  if (pending.size() < 2) {
    return;
  }
  at::_ops::_foreach_copy_::call(casts, weights, /*non_blocking=*/false);
  group.made = moment;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  group.pending.swap(pending);
}

// A cast that is not valid stays where it is: it was wasted.
WeightBatch::Pending* WeightBatch::find_pending(Group& group, const Source& source, const Moment& moment) {
  const auto is_here = [&source](const Pending& pending) {
    return pending.weight->memory.address() == &source.impl && !pending.used;
  };
  const auto begin = group.pending.begin();
  auto found = std::find_if(begin + static_cast<ptrdiff_t>(group.next), group.pending.end(), is_here);
  if (found == group.pending.end()) {
    found = std::find_if(begin, group.pending.end(), is_here);
  }
  const auto is_valid = [&](const Pending& pending) {
    const WeightMemory& memory = pending.weight->memory;
    return memory.is_of(source.impl) && pending.version == memory.version() && group.made.stream == moment.stream &&
           group.made.capture == moment.capture && group.made.replays == moment.replays &&
           group.made.time.stock_clears == moment.time.stock_clears &&
           pending.alias_epoch == pending.weight->alias_epoch() &&
           has_unique_storage(source.tensor, /*is_view=*/false) && !was_written(source.tensor, group.made.time.writes);
  };
  return found != group.pending.end() && is_valid(*found) ? &*found : nullptr;
}

void WeightBatch::end() {
  std::vector<Group> ended;
  {
    const std::lock_guard<std::mutex> lock(casts_mutex());
    ended.swap(groups_);
  }
  for (Group& group : ended) {
    if (group.plan == nullptr && group.cast.size() < 2) {
      continue;
    }
    count_replays();
    if (group.plan == nullptr) {
      group.plan = make_plan(group.dtype);
    } else if (!is_of_this_thread(group.plan)) {
      continue;
    }
    group.plan->wasted += static_cast<size_t>(std::count_if(
        group.pending.begin(), group.pending.end(), [](const Pending& cast) { return cast.cast.held.defined(); }));
    if (group.plan->weights != group.cast) {
      remove_repeated(group.cast);
      group.plan->weights = std::move(group.cast);
    }
  }
}

void WeightBatch::take_memory(std::vector<CastMemory>& gone) {
  for (Group& group : groups_) {
    for (Pending& pending : group.pending) {
      gone.push_back(std::exchange(pending.cast, CastMemory()));
    }
  }
}

bool any_batched_weights() {
  return batched_weights().any.load(std::memory_order_relaxed);
}

void note_batched_step(const at::Tensor& weight) {
  if (!weight.is_cuda()) {
    return;
  }
  const at::TensorImpl& impl = *weight.unsafeGetTensorImpl();
  std::shared_ptr<BatchedWeight> found;
  {
    const std::lock_guard<std::mutex> lock(batched_weights().mutex);
    const auto& all = batched_weights().all;
    if (const auto place = all.find(&impl); place != all.end()) {
      found = place->second.lock();
    }
  }
  if (found != nullptr && found->memory.is_of(impl)) {
    note_writes_before(*found, current_stream(impl).id());
  }
}

} // namespace torch_promote
