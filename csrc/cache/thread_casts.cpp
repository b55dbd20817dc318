// file: the casts that each thread keeps, and when they end
#include <Python.h>

#include "cache/thread_casts.h"

#include "cache/persistent_casts.h"
#include "policy/process.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace torch_promote {

namespace {

struct AllCasts {
  ForkSafeMutex mutex;
  std::vector<CastSet*> sets;
};

AllCasts& all_casts = *new AllCasts; // never destroyed; see NOTE [ Fork ]

constinit thread_local bool tls_runs_forwards = false;

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

// Stock holds its lock while it casts, which may need the GIL, so nobody may wait for the lock with the GIL.
class WithoutGil {
 public:
  WithoutGil() : held_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() noexcept(false) { // when Python ends, taking the GIL may end the thread, by unwinding its stack
    if (held_ != nullptr) {
      PyEval_RestoreThread(held_);
    }
  }

 private:
  PyThreadState* held_;
};

} // namespace

ForkSafeMutex& casts_mutex() {
  return all_casts.mutex;
}

// --- A set of casts

CastSet::CastSet() {
  const Lock lock(casts_mutex());
  all_casts.sets.push_back(this);
}

CastSet::~CastSet() {
  const Lock lock(casts_mutex());
  std::erase(all_casts.sets, this);
}

template <class Function>
void CastSet::for_each(const Function& function) const {
  for (const auto& [key, cast] : weights_) {
    function(*cast);
  }
  for (const auto& cast : activations_) {
    if (cast != nullptr) {
      function(*cast);
    }
  }
}

std::shared_ptr<KeptCast> CastSet::find(const CastRequest& wanted) {
  if (wanted.kind == Kind::activation) {
    return find_activation(wanted);
  }
  const auto found = weights_.find(key_of(wanted));
  if (found == weights_.end()) {
    return nullptr;
  }
  if (found->second->is_fresh(wanted)) {
    return found->second;
  }
  ++stale;
  std::shared_ptr<KeptCast> gone;
  const Lock lock(casts_mutex());
  gone = std::move(found->second);
  weights_.erase(found);
  return nullptr;
}

std::shared_ptr<KeptCast> CastSet::find_activation(const CastRequest& wanted) {
  const auto found = std::find_if(activations_.begin(), activations_.end(), [&](const auto& cast) {
    return cast != nullptr && cast->is_of(wanted.source.impl, wanted.dtype);
  });
  if (found == activations_.end()) {
    return nullptr;
  }
  const bool fresh = (*found)->is_fresh(wanted);
  if (fresh && !(*found)->is_freed()) {
    return *found;
  }
  stale += fresh ? 0 : 1;
  std::shared_ptr<KeptCast> gone;
  const Lock lock(casts_mutex());
  gone.swap(*found);
  return nullptr;
}

void CastSet::insert(const CastRequest& wanted, std::shared_ptr<KeptCast> cast, const CastTime& began) {
  std::vector<std::shared_ptr<KeptCast>> gone;
  const Lock lock(casts_mutex());
  if (began.ended != all_casts_ended || began.writes != writes_reported) {
    return;
  }
  tls_has_casts = true;
  if (weights_.size() >= sweep_at_ || wanted.capture != 0 || tls_cache_mode == CacheMode::all) {
    sweep(wanted.capture, gone);
  }
  std::shared_ptr<KeptCast>* place = nullptr;
  if (wanted.kind != Kind::activation) {
    place = &weights_[key_of(wanted)];
  } else {
    place = std::find(activations_.begin(), activations_.end(), nullptr);
    if (place == activations_.end()) {
      place = &activations_[next_activation_];
      next_activation_ = (next_activation_ + 1) % activations_.size();
    }
  }
  if (*place != nullptr) {
    gone.push_back(std::move(*place));
  }
  *place = std::move(cast);
}

template <class Test>
void CastSet::take_weights(std::vector<std::shared_ptr<KeptCast>>& gone, const Test& test) {
  for (auto it = weights_.begin(); it != weights_.end();) {
    if (test(it->first, *it->second)) {
      gone.push_back(std::move(it->second));
      it = weights_.erase(it);
    } else {
      ++it;
    }
  }
}

void CastSet::take_activations(std::vector<std::shared_ptr<KeptCast>>& gone) {
  for (auto& cast : activations_) {
    gone.push_back(std::exchange(cast, nullptr));
  }
  next_activation_ = 0; // the next region fills the places in order, and the oldest has to go first
}

// Takes out the casts of dead tensors: of activations at once, of weights when their number has doubled. When a new
// capture begins, also those of earlier captures.
void CastSet::sweep(uint64_t capture, std::vector<std::shared_ptr<KeptCast>>& gone) {
  for (auto& cast : activations_) {
    if (cast != nullptr && cast->is_dead()) {
      gone.push_back(std::exchange(cast, nullptr));
    }
  }
  const bool captures = capture != 0 && capture != std::exchange(last_capture_, capture);
  if (weights_.size() < sweep_at_ && !captures) {
    return;
  }
  take_weights(gone, [&](const Key& key, const KeptCast& cast) {
    const bool dead = cast.is_dead();
    dropped += dead ? 1 : 0;
    return dead || (captures && key.capture != 0);
  });
  sweep_at_ = 2 * weights_.size() + kFirstSweep;
}

void CastSet::drop_all(uint64_t ended) {
  std::vector<std::shared_ptr<KeptCast>> gone;
  gone.reserve(count());
  const Lock lock(casts_mutex());
  ended_ = ended;
  for (auto& [key, cast] : weights_) {
    gone.push_back(std::move(cast));
  }
  weights_.clear(); // keeps its memory: the next region casts about as many weights
  sweep_at_ = kFirstSweep;
  take_activations(gone);
}

void CastSet::drop_beyond_stock() {
  std::vector<std::shared_ptr<KeptCast>> gone;
  const Lock lock(casts_mutex());
  take_weights(gone, [](const Key& /*key*/, const KeptCast& cast) { return cast.kind() != Kind::trainable; });
  take_activations(gone);
}

void CastSet::take_memory(std::vector<CastMemory>& gone) {
  for_each([&gone](KeptCast& cast) { gone.push_back(cast.take_memory()); });
}

std::shared_ptr<KeptCast> CastSet::copy(const CastRequest& wanted) const {
  const auto found = weights_.find(key_of(wanted));
  const bool usable = found != weights_.end() && !has_ended() && found->second->is_fresh(wanted);
  return usable ? found->second->copy() : nullptr;
}

void CastSet::swap(CastSet& other) {
  const Lock lock(casts_mutex());
  weights_.swap(other.weights_);
  activations_.swap(other.activations_);
  std::swap(next_activation_, other.next_activation_);
  std::swap(sweep_at_, other.sweep_at_);
  std::swap(last_capture_, other.last_capture_);
  std::swap(ended_, other.ended_);
}

size_t CastSet::count() const {
  const auto free = std::count(activations_.begin(), activations_.end(), nullptr);
  return weights_.size() + activations_.size() - static_cast<size_t>(free);
}

size_t CastSet::bytes() const {
  size_t bytes = 0;
  for_each([&bytes](const KeptCast& cast) { bytes += cast.bytes(); });
  return bytes;
}

// --- Casts of this thread

namespace {

struct CastsOfThread : CastSet {
  ~CastsOfThread() {
    tls_has_casts = false; // PyTorch's cache may be cleared later in this thread
    for_each([](KeptCast& cast) { cast.leak_unless_plain(); });
  }
};

} // namespace

CastSet& casts_of_this_thread() {
  // Not in the thread's own memory: after a fork, other threads are gone in the child, and their casts are still
  // listed.
  return of_this_thread<CastsOfThread>();
}

void note_kept_cast() {
  tls_runs_forwards = tls_runs_forwards || !in_backward();
}

bool borrows_casts() {
  return !tls_runs_forwards && in_backward();
}

std::shared_ptr<KeptCast> borrow_cast(const CastRequest& wanted) {
  if (!borrows_casts() || !wanted.source.plain) {
    return nullptr;
  }
  std::shared_ptr<KeptCast> found;
  {
    const Lock lock(casts_mutex());
    for (auto set = all_casts.sets.begin(); found == nullptr && set != all_casts.sets.end(); ++set) {
      found = (*set)->copy(wanted);
    }
  }
  return found != nullptr && found->hold() ? found : nullptr;
}

// --- When casts end

void drop_casts_of_thread() {
  tls_has_casts = false;
  casts_of_this_thread().clear();
}

void end_casts_beyond_stock() {
  ++tls_casts_ended;
  if (tls_has_casts) {
    casts_of_this_thread().drop_beyond_stock();
  }
}

void end_caches() {
  if (borrows_casts()) { // the end of a checkpoint's recomputation: stock frees the casts of the forward here
    end_casts_of_all_threads();
  } else {
    end_casts_of_thread();
  }
  const WithoutGil without_gil;
  at::autocast::clear_cache();
}

void end_casts_of_all_threads() {
  end_casts_of_thread();
  std::vector<CastMemory> gone;
  const Lock lock(casts_mutex());
  ++all_casts_ended;
  for (CastSet* casts : all_casts.sets) {
    casts->take_memory(gone);
  }
}

void clear_casts() {
  end_casts_of_all_threads();
  forget_beyond_stock();
}

std::shared_ptr<CastSet> take_casts() {
  if (!tls_has_casts) {
    return nullptr;
  }
  casts_of_this_thread().catch_up();
  auto taken = std::make_shared<CastSet>(); // may throw
  tls_has_casts = false;
  taken->swap(casts_of_this_thread());
  return taken;
}

void put_casts(CastSet& taken) {
  if (!tls_has_casts && !taken.has_ended()) {
    tls_has_casts = true;
    casts_of_this_thread().swap(taken);
  }
}

// --- Writes that change no version

void forget_casts(const std::vector<at::Tensor>& written) {
  std::unordered_set<const void*> addresses; // of storages, and of the tensors: subclasses have no storage
  for (const at::Tensor& tensor : written) {
    const at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    addresses.insert(impl);
    if (impl->has_storage()) {
      addresses.insert(impl->unsafe_storage().unsafeGetStorageImpl());
    }
  }
  {
    const Lock lock(casts_mutex());
    ++writes_reported;
    for (const CastSet* casts : all_casts.sets) {
      casts->for_each([&](KeptCast& cast) {
        if (addresses.contains(cast.address()) || addresses.contains(cast.signature().storage())) {
          cast.note_write();
        }
      });
    }
  }
  forget_persistent(written);
}

// --- What there is

std::map<std::string, uint64_t> cast_cache_info() {
  CastSet& here = casts_of_this_thread();
  here.catch_up();
  std::map<std::string, uint64_t> info = {{"entries", here.count()}, {"bytes", here.bytes()},
                                          {"hits", here.hits},       {"misses", here.misses},
                                          {"stale", here.stale},     {"dropped", here.dropped}};
  std::tie(info["persistent_entries"], info["persistent_bytes"]) = persistent_casts();
  return info;
}

} // namespace torch_promote
