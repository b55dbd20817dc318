// file: the casts that each thread keeps, and when they end
#pragma once

#include "cache/kept_cast.h"
#include "policy/dispatch_state.h"

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch_promote {

// Which casts are kept for later uses while a region's cache flag is on; see docs/casts.md.
//
//   mode        trainable float32 leaf    other weight                activation
//   weights     in the region             -                           -
//   all         in the region             in the region               the last four, in the region
//   persistent  on the weight             on the weight               -
enum class CacheMode : uint8_t { weights, persistent, all };
constexpr std::array<const char*, 3> kCacheModeNames = {"weights", "persistent", "all"}; // in the enum's order

// Set by the innermost open region that specifies a mode.
inline constinit thread_local CacheMode tls_cache_mode = CacheMode::weights;

// Whether an autocast region of ours is open in this thread. (Regions that name no device, such as those of
// `promotion`, are no autocast regions.)
inline constinit thread_local bool tls_region_open = false;

// How often the casts of all threads have ended, and how often a write that changes no version was reported. Both only
// increase, under casts_mutex.
inline constinit std::atomic<uint64_t> all_casts_ended = 0;
inline constinit std::atomic<uint64_t> writes_reported = 0;

// When a cast began. It is kept only if neither has changed since: the cast may have read old data.
struct CastTime {
  uint64_t ended;
  uint64_t writes;
};

// Casts that end together: those of a thread, or of suspended regions. `find` returns shared casts, and what is dropped
// is destroyed only when the set is consistent again: using a cast and destroying a tensor may both run Python, which
// may call the cache.
class CastSet {
 public:
  CastSet();
  CastSet(const CastSet&) = delete;
  CastSet& operator=(const CastSet&) = delete;
  ~CastSet();

  // Drops the casts if they have ended. To be called before each use; returns the time at which a cast now begins.
  CastTime catch_up() {
    const CastTime now{
        all_casts_ended.load(std::memory_order_relaxed), writes_reported.load(std::memory_order_relaxed)};
    if (now.ended != ended_) {
      drop_all(now.ended);
    }
    return now;
  }
  // Null if there is none. Drops one that is not fresh.
  std::shared_ptr<KeptCast> find(const CastRequest& wanted);
  void insert(const CastRequest& wanted, std::shared_ptr<KeptCast> cast, const CastTime& began);
  void clear() {
    drop_all(ended_);
  }
  // Those that stock would make again.
  void drop_beyond_stock();

  // For other threads, under casts_mutex, except for `swap`, which takes it.
  void take_memory(std::vector<CastMemory>& gone);
  template <class Function>
  void for_each(const Function& function) const; // of the casts
  std::shared_ptr<KeptCast> copy(const CastRequest& wanted) const;
  void swap(CastSet& other); // the casts, and not the counts

  bool has_ended() const {
    return ended_ != all_casts_ended;
  }
  size_t count() const;
  size_t bytes() const;

  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t stale = 0;   // dropped because the source had changed
  uint64_t dropped = 0; // because the source had died

 private:
  struct Key {
    const at::TensorImpl* weight;
    at::ScalarType dtype;
    Kind kind; // one leaf may be used in both ways, and uses with their own nodes must not get the shared one
    uint64_t capture;
    bool operator==(const Key& other) const = default;
  };
  struct HashOfKey {
    size_t operator()(const Key& key) const {
      return reinterpret_cast<uintptr_t>(key.weight) ^ (static_cast<size_t>(key.dtype) << 56) ^
             (static_cast<size_t>(key.kind) << 48) ^ (key.capture << 32);
    }
  };
  using Weights = ska::flat_hash_map<Key, std::shared_ptr<KeptCast>, HashOfKey>;
  // Query, key and value, or gate and up, are projections of one activation: its uses follow on one another, with few
  // other casts between them.
  using Activations = std::array<std::shared_ptr<KeptCast>, 4>;

  static constexpr size_t kFirstSweep = 16;

  static Key key_of(const CastRequest& wanted) {
    return {&wanted.source.impl, wanted.dtype, wanted.kind, wanted.capture};
  }
  std::shared_ptr<KeptCast> find_activation(const CastRequest& wanted);
  void drop_all(uint64_t ended);
  void sweep(uint64_t capture, std::vector<std::shared_ptr<KeptCast>>& gone);
  template <class Test>
  void take_weights(std::vector<std::shared_ptr<KeptCast>>& gone, const Test& test);
  void take_activations(std::vector<std::shared_ptr<KeptCast>>& gone);

  Weights weights_;
  Activations activations_;
  size_t next_activation_ = 0;    // the place that the next one takes if none is free
  size_t sweep_at_ = kFirstSweep; // the number of weights at which dead ones are looked for
  uint64_t last_capture_ = 0;
  uint64_t ended_ = 0;
};

// --- Casts of this thread

CastSet& casts_of_this_thread();
// Whether there may be any. Most regions make none.
inline constinit thread_local bool tls_has_casts = false;

// A copy of another thread's cast. Null if there is no fresh one, or if this thread may use none.
std::shared_ptr<KeptCast> borrow_cast(const CastRequest& wanted);
// Whether this thread may: it runs a backward, and has kept no casts outside of one, so it is a thread of the autograd
// engine. A thread that runs forwards keeps to its own casts, in their backward too.
bool borrows_casts();
// Notes that this thread keeps a cast that it has made.
void note_kept_cast();

// --- When casts end
//
// As under stock: when the outermost autocast region of the thread ends, ours or PyTorch's, and when
// `torch.clear_autocast_cache` is called, which torch_promote/integrations/cast_invalidation.py wraps. PyTorch's own
// regions call that function.

// How often this thread's casts have ended: two uses can share a cast only if the number is the same.
inline constinit thread_local uint64_t tls_casts_ended = 0;

void drop_casts_of_thread();
inline void end_casts_of_thread() {
  ++tls_casts_ended;
  if (tls_has_casts) {
    drop_casts_of_thread();
  }
}
// Our outermost region ends where a region of torch.autocast is still open: drops the casts that stock would not keep.
void end_casts_beyond_stock();
// The thread's outermost autocast region ends: ends the casts, and clears PyTorch's cache.
void end_caches();
// Drops the casts of this thread, and frees the memory of those of all other threads that can be freed without Python.
// They drop the rest before their next use.
void end_casts_of_all_threads();
// The same, and drops persistent casts.
void clear_casts();

// How many autocast regions are open in this thread, stock's and ours.
inline int nesting_depth() {
  const int with_one_more = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return with_one_more - 1;
}

// The casts of regions that are suspended. `take_casts` takes this thread's, null if there are none. `put_casts` makes
// them a thread's again, unless that has casts of a region around, or they have ended meanwhile.
std::shared_ptr<CastSet> take_casts();
void put_casts(CastSet& taken);

// --- Writes that change no version

// NOTE [ Unversioned writes ]
// Fused optimizers and FSDP2's all-gather write weights without increasing their version, and may do so on any thread:
// in a hook on a device thread of autograd, for example. The hooks in torch_promote/integrations/cast_invalidation.py
// report such writes after they have happened. All casts of these tensors, or of tensors that share a storage with one,
// are then stale, in all threads, and so are their persistent casts.
void forget_casts(const std::vector<at::Tensor>& written);

// --- What there is

// By name, as torch_promote.cache_info documents them.
std::map<std::string, uint64_t> cast_cache_info();

} // namespace torch_promote
