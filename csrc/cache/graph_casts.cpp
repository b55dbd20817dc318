// file: persistent casts that CUDA graphs read
#include "cache/graph_casts.h"

#include "cache/capture.h"
#include "cache/persistent_cache.h"
#include "cache/refresh.h"
#include "cache/write_log.h"
#include "policy/registry_sizes.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace torch_promote {

namespace {

using VersionsAndEpochs = std::map<const WeightCasts*, std::pair<uint32_t, uint64_t>>;

// A capture under way, and the weights with casts as they were when it began.
struct Recording {
  std::weak_ptr<CapturedCasts> casts; // expired: its graph is gone, and the capture with it
  VersionsAndEpochs before;
  uint64_t writes = 0;
  uint64_t next_weight = 0;
};

struct Recordings {
  ForkSafeMutex mutex;
  std::vector<Recording> under_way;

  // Where a capture is noted. PyTorch does not tell of several captures under way which one a cast belongs to, so then
  // the graphs make their casts themselves. The caller holds the lock.
  std::shared_ptr<CapturedCasts> only_one() {
    std::erase_if(under_way, [](const Recording& recording) { return recording.casts.expired(); });
    return under_way.size() == 1 ? under_way.front().casts.lock() : nullptr;
  }
  // Whether the weight has not been written to since that capture began, so that its cast holds at a replay, too: it is
  // brought up to date before. The caller holds the lock.
  bool is_unwritten(const WeightCasts& weight) const {
    const Recording& recording = under_way.front();
    const auto before = recording.before.find(&weight);
    return recording.writes == write_epoch && before != recording.before.end() &&
           before->second == std::pair(weight.version(), weight.epoch());
  }
};

Recordings& recordings() {
  static auto* instance = new Recordings; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Made at import: see NOTE [ Fork ].
[[maybe_unused]] const Recordings& recordings_at_import = recordings();

[[maybe_unused]] const bool noted_captures_under_way = note_registry("captures under way", [] {
  const std::lock_guard<std::mutex> lock(recordings().mutex);
  return recordings().under_way.size();
});

VersionsAndEpochs weights_now() {
  VersionsAndEpochs now;
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  for (const WeightCasts* weight : weight_registry().weights) {
    now[weight] = {weight->version(), weight->epoch()};
  }
  return now;
}

void refresh(const std::vector<std::shared_ptr<GraphCast>>& all) {
  std::vector<at::Tensor> casts;
  std::vector<at::Tensor> weights;
  std::vector<GraphCast*> refreshed;
  try {
    for (const auto& cast : all) {
      if (cast->is_current()) {
        continue;
      }
      if (at::Tensor weight = cast->weight(); weight.defined()) {
        refreshed.push_back(cast.get());
        cast->begin_refresh();
        casts.push_back(cast->cast());
        weights.push_back(std::move(weight));
      }
    }
    copy_together(casts, weights);
  } catch (...) {
    for (GraphCast* cast : refreshed) {
      *cast->is_fresh() = false;
    }
    throw;
  }
  for (GraphCast* cast : refreshed) {
    cast->end_refresh();
  }
}

} // namespace

GraphCast::GraphCast(const at::Tensor& weight, PersistentCast& cast)
    : memory_(*weight.unsafeGetTensorImpl()),
      meta_(weak_meta_of(weight)),
      cast_(cast.data().tensor()),
      is_fresh_(std::make_shared<std::atomic<bool>>(true)),
      version_(memory_.version()),
      made_(std::move(cast.made())),
      ready_on_(cast.data().stream()) {}

// Other owners of the memory could write to it without a trace, and so could tensors that took it over when
// `weight.data` was set.
bool GraphCast::is_current() const {
  return *is_fresh_ && version_ == memory_.version() && !meta_.expired() && memory_.has_one_owner();
}

void GraphCast::begin_refresh() {
  wait();
  version_ = memory_.version();
  *is_fresh_ = true;
}

void GraphCast::end_refresh() {
  const c10::Stream stream = current_stream(*cast_.unsafeGetTensorImpl());
  made_.record(stream);
  ready_on_ = stream.id();
}

void GraphCast::wait() {
  const c10::Stream stream = current_stream(*cast_.unsafeGetTensorImpl());
  if (ready_on_.exchange(stream.id()) != stream.id()) {
    made_.block(stream);
    // The graph may die before its replay is done.
    c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(cast_.storage().data_ptr(), stream);
  }
}

std::shared_ptr<CapturedCasts> begin_graph() {
  note_capture();
  auto casts = std::make_shared<CapturedCasts>();
  Recording begun{casts, weights_now(), write_epoch, next_weight_number()};
  const std::lock_guard<std::mutex> lock(recordings().mutex);
  recordings().under_way.push_back(std::move(begun));
  return casts;
}

void end_graph(const std::shared_ptr<CapturedCasts>& casts) {
  if (casts == nullptr) {
    return; // begun before anybody watched
  }
  const auto after = weights_now();
  const std::lock_guard<std::mutex> lock(recordings().mutex);
  std::vector<Recording>& under_way = recordings().under_way;
  const auto ended =
      std::find_if(under_way.begin(), under_way.end(), [&](const auto& known) { return known.casts.lock() == casts; });
  if (ended == under_way.end()) {
    return;
  }
  const bool unchanged =
      ended->writes == write_epoch && std::all_of(after.begin(), after.end(), [&](const auto& weight) {
        const auto before = ended->before.find(weight.first);
        return before == ended->before.end() || before->second == weight.second;
      });
  casts->writes_from = unchanged ? ended->next_weight : 0;
  under_way.erase(ended);
}

void before_replay(const CapturedCasts* casts) {
  if (casts == nullptr) {
    return;
  }
  refresh(casts->read);
  for (const auto& cast : casts->read) {
    cast->wait();
  }
}

void after_replay(const CapturedCasts* casts) {
  const uint64_t writes_from = casts == nullptr ? 0 : casts->writes_from;
  if (writes_from < next_weight_number()) {
    forget_beyond_stock(writes_from);
  }
}

namespace {

// Of a weight's casts, the one that graphs read. Undefined if there is none.
std::shared_ptr<GraphCast> find(const WeightCasts& owner, const at::TensorImpl& weight, at::ScalarType dtype) {
  std::vector<std::shared_ptr<GraphCast>> casts; // destroyed without the lock
  {
    const std::lock_guard<std::mutex> lock(owner.mutex());
    for (const GraphCastOfWeight& cast : owner.graph_casts()) {
      casts.push_back(cast.cast.lock());
    }
  }
  const auto found = std::find_if(
      casts.begin(), casts.end(), [&](const auto& cast) { return cast != nullptr && cast->is_of(weight, dtype); });
  return found != casts.end() ? *found : nullptr;
}

// Makes one of the cast that the runs before the capture have left. Null if there is none, or others have it.
std::shared_ptr<GraphCast> take_over(const WeightCasts& owner, const Source& source, at::ScalarType dtype) {
  std::shared_ptr<PersistentCast> cast;
  {
    const std::lock_guard<std::mutex> lock(owner.mutex());
    PersistentCasts& casts = owner.casts();
    const auto found = std::find_if(casts.begin(), casts.end(), [&](const auto& known) {
      return known->data().dtype() == dtype && !known->outdated && known->data().is_unchanged(source) &&
             known.use_count() == 1 && known->belongs_to_nobody_else();
    });
    if (found == casts.end()) {
      return nullptr;
    }
    cast = std::move(*found);
    casts.erase(found);
  }
  auto made = std::make_shared<GraphCast>(source.tensor, *cast);
  const std::lock_guard<std::mutex> lock(owner.mutex());
  std::erase_if(owner.graph_casts(), [](const GraphCastOfWeight& known) { return known.cast.expired(); });
  owner.graph_casts().push_back({made, source.impl.unsafe_storage().unsafeGetStorageImpl(), made->is_fresh()});
  return made;
}

} // namespace

at::Tensor cast_for_graph(const Source& source, at::ScalarType dtype) {
  const auto here = [] {
    const std::lock_guard<std::mutex> lock(recordings().mutex);
    return recordings().only_one();
  };
  const WeightCasts* const owner = casts_of(source.tensor);
  if (owner == nullptr || here() == nullptr) {
    return {}; // nobody would refresh the cast
  }
  std::shared_ptr<GraphCast> cast = find(*owner, source.impl, dtype);
  if (cast == nullptr) {
    cast = take_over(*owner, source, dtype);
  }
  if (cast == nullptr) {
    return {};
  }
  std::shared_ptr<CapturedCasts> casts; // released without the lock
  const std::lock_guard<std::mutex> lock(recordings().mutex);
  casts = recordings().only_one();
  if (casts == nullptr || !recordings().is_unwritten(*owner)) {
    return {};
  }
  if (std::find(casts->read.begin(), casts->read.end(), cast) == casts->read.end()) {
    casts->read.push_back(cast);
  }
  return cast->cast();
}

} // namespace torch_promote
