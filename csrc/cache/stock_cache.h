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
// destructor runs when the cache is cleared. The destructor runs under PyTorch's lock: there it destroys the casts of
// its thread, except those whose destruction could run Python. The count below tells all other holders of casts, which
// drop them before their next use.
//
// PyTorch's cache belongs to the process, so the end of a region in one thread clears it for all. Where that region is
// ours, the casts of other threads stay, and the sentinel is planted again.
//
// Under PyTorch's lock (a dispatch mode that runs inside stock's cast) planting would deadlock. See
// tls_may_be_inside_stock_cast.

// How often PyTorch's cache was cleared, not counting the ends of our regions.
inline constinit std::atomic<uint64_t> stock_clears = 0;

// How many autocast regions are open in this thread, stock's and ours.
inline int nesting_depth() {
  const int with_one_more = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return with_one_more - 1;
}

// Set while a region of ours is open that was entered inside another autocast region with autocast off, as in an op
// that stock autocast handles. No sentinel is planted meanwhile, and casts end with our regions.
inline constinit thread_local bool tls_may_be_inside_stock_cast = false;

// Somebody who holds casts, which depend on `stock_clears` meanwhile.
class CastHolder {
 public:
  CastHolder() = default;
  CastHolder(const CastHolder&) = delete;
  CastHolder& operator=(const CastHolder&) = delete;
  ~CastHolder() {
    end();
  }

  // Before the first cast is held. `on_clear` is called in whichever thread clears PyTorch's cache, under its lock.
  void begin(void (*on_clear)());
  void end();
  // Whether the casts that are held are still valid.
  bool is_current() const {
    return clears_ == stock_clears.load(std::memory_order_relaxed);
  }
  // Whether there is a sentinel. If there is none, the end of the autocast region around ours goes unnoticed.
  bool is_watching() const {
    return watching_;
  }
  void swap(CastHolder& other) {
    std::swap(holds_, other.holds_);
    std::swap(watching_, other.watching_);
    std::swap(clears_, other.clears_);
  }

 private:
  bool holds_ = false;
  bool watching_ = false;
  uint64_t clears_ = 0;
};

// Clears PyTorch's cache at the end of a region of ours: other threads keep their casts.
void clear_stock_cache();

} // namespace torch_promote
