// file: notices when PyTorch's own autocast cache is cleared
#pragma once

#include "policy/torch_declarations.h"

#include <atomic>
#include <cstdint>
#include <utility>

namespace torch_promote {

// NOTE [ When casts end ]
// The casts that stock would keep end when stock's would: when the outermost autocast region of the thread ends, ours
// or PyTorch's, and when somebody calls `torch.clear_autocast_cache()`. PyTorch clears its cache in both cases and
// tells nobody. So while casts of ours are held, a cast in PyTorch's cache carries a sentinel, an object whose
// destructor runs when the cache is cleared. The destructor runs under PyTorch's lock: there it drops the casts of its
// thread, and frees the memory of those of all other threads, except where that could run Python. The count below tells
// all other holders of casts, which drop them before their next use.
//
// PyTorch's cache belongs to the process, so the end of a region in one thread clears it for all. The end of a region
// of ours leaves it alone if other threads hold casts and PyTorch has cast nothing for this thread. Otherwise it clears
// it and plants the sentinel again; the casts of other threads stay. Meanwhile another clearing finds no sentinel. A
// thread whose regions of ours have all ended, and which enters one inside a region of PyTorch's, may have missed the
// end of an earlier region of PyTorch's in this way. It then drops its casts.
//
// Under PyTorch's lock (in a dispatch mode that runs inside stock's cast) planting would deadlock. The mode runs below
// autograd, as kernels do, and no sentinel is planted there.

// How often PyTorch's cache was cleared, not counting the ends of our regions.
inline constinit std::atomic<uint64_t> stock_clears = 0;

// How many autocast regions are open in this thread, stock's and ours.
inline int nesting_depth() {
  const int with_one_more = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return with_one_more - 1;
}

// Somebody who holds casts, which depend on `stock_clears` meanwhile.
class CastHolder {
 public:
  CastHolder() = default;
  CastHolder(const CastHolder&) = delete;
  CastHolder& operator=(const CastHolder&) = delete;
  ~CastHolder() {
    end();
  }

  // Before a cast is held. `on_clear` is called in whichever thread clears PyTorch's cache, under its lock.
  void begin(void (*on_clear)()) {
    if (!watching_) {
      watch(on_clear);
    }
  }
  void end();
  // Whether the casts that are held are still valid.
  bool is_current() const {
    return !holds_ || clears_ == stock_clears.load(std::memory_order_relaxed);
  }
  // Whether a region of ours has ended in another thread since casts are held.
  bool may_have_missed_a_clear() const;
  // Whether there is a sentinel. If there is none, the end of the autocast region around ours goes unnoticed.
  bool is_watching() const {
    return watching_;
  }
  void swap(CastHolder& other) {
    std::swap(holds_, other.holds_);
    std::swap(watching_, other.watching_);
    std::swap(clears_, other.clears_);
    std::swap(silent_clears_, other.silent_clears_);
  }

 private:
  void watch(void (*on_clear)());

  bool holds_ = false;
  bool watching_ = false;
  uint64_t clears_ = 0;
  uint64_t silent_clears_ = 0;
};

// Whether PyTorch's autocast kernels may have cast weights in this thread since its cache was last cleared here: some
// region of ours was disabled, so that PyTorch's could act inside it, or enabled CUDA, of which some ops are left to
// PyTorch.
inline constinit thread_local bool tls_stock_may_have_cast = false;

// At the end of a region of ours, clears PyTorch's cache: other threads keep their casts.
void clear_stock_cache();
// The same as PyTorch does it: the casts of all threads end.
void clear_stock_cache_for_all_threads();

} // namespace torch_promote
