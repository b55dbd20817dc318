// file: a set of casts that end together: those of a thread, or of suspended regions
#include "cache/held_casts.h"

#include "cache/casts_mutex.h"
#include "policy/registry_sizes.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_promote {

namespace {

struct AllCasts {
  ForkSafeMutex mutex;
  std::vector<HeldCasts*> sets;
};

AllCasts& all_casts() {
  static auto* instance = new AllCasts; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Made at import: see NOTE [ Fork ].
[[maybe_unused]] const AllCasts& all_casts_at_import = all_casts();

[[maybe_unused]] const bool noted_sets_of_casts = note_registry("sets of casts", [] {
  const std::lock_guard<std::mutex> lock(all_casts().mutex);
  return all_casts().sets.size();
});

constinit thread_local bool tls_runs_forwards = false;

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

} // namespace

ForkSafeMutex& casts_mutex() {
  return all_casts().mutex;
}

HeldCasts::HeldCasts() {
  const std::lock_guard<std::mutex> lock(casts_mutex());
  all_casts().sets.push_back(this);
}

HeldCasts::~HeldCasts() {
  const std::lock_guard<std::mutex> lock(casts_mutex());
  std::erase(all_casts().sets, this);
}

uint64_t HeldCasts::next_span() {
  static std::atomic<uint64_t> last = 0;
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

void HeldCasts::drop_written() {
  std::vector<std::shared_ptr<CastEntry>> gone;
  const WritesSince writes(epoch);
  epoch = writes.until();
  weights.take_out(writes, gone);
  activations.take_out(writes, gone);
}

void HeldCasts::clear() {
  holder.end();
  holds.put(false);
  weights.clear();
  activations.clear();
}

void HeldCasts::drop_if(bool (*test)(const CastEntry&)) {
  weights.drop_if(test);
  activations.drop_if(test);
}

void HeldCasts::swap(HeldCasts& other) {
  const std::lock_guard<std::mutex> lock(casts_mutex());
  holder.swap(other.holder);
  holds.swap(other.holds);
  std::swap(epoch, other.epoch);
  std::swap(span, other.span);
  weights.swap(other.weights);
  activations.swap(other.activations);
}

void free_casts_of_all_threads() {
  std::vector<CastMemory> gone;
  const std::lock_guard<std::mutex> lock(casts_mutex());
  for (HeldCasts* casts : all_casts().sets) {
    casts->weights.take_memory(gone);
    casts->activations.take_memory(gone);
  }
}

void note_kept_cast() {
  tls_runs_forwards = tls_runs_forwards || !in_backward();
}

bool borrows_casts() {
  return !tls_runs_forwards && in_backward();
}

std::shared_ptr<CastEntry> borrow_cast(const Source& source, const WeightKey& key) {
  if (!borrows_casts()) {
    return nullptr;
  }
  WeightCache::Copy found;
  {
    const std::lock_guard<std::mutex> lock(casts_mutex());
    for (const HeldCasts* casts : all_casts().sets) {
      found = casts->weights.copy(source, key);
      if (found.entry != nullptr) {
        break;
      }
    }
  }
  const bool fresh = found.entry != nullptr && !was_written(source.tensor, found.writes) && found.entry->data().hold();
  return fresh ? found.entry : nullptr;
}

} // namespace torch_promote
