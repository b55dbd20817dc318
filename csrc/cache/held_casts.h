// file: a set of casts that end together: those of a thread, or of suspended regions
#pragma once

#include "cache/activation_cache.h"
#include "cache/stock_cache.h"
#include "cache/weight_cache.h"
#include "cache/write_log.h"

#include <cstdint>
#include <memory>

namespace torch_promote {

// Other threads free the memory of these casts and borrow them, until the destructor; see
// NOTE [ Casts and other threads ].
struct HeldCasts {
  CastHolder holder;
  WeightCache weights;
  ActivationCache activations;
  HoldsCasts holds;
  uint64_t epoch = 0; // up to which unversioned writes are known
  // The time from the first use of these casts until they are dropped; unique in the process.
  uint64_t span = 0;

  HeldCasts();
  HeldCasts(const HeldCasts&) = delete;
  HeldCasts& operator=(const HeldCasts&) = delete;
  ~HeldCasts();

  // For each use of these casts: drops those of what has been written to, and returns the epoch at which a cast now
  // begins. See NOTE [ Unversioned writes ].
  uint64_t catch_up() {
    if (!holds.put(true)) { // before the epoch is read: from now on, writes are logged
      epoch = write_epoch;
      span = next_span();
    } else if (write_epoch.load(std::memory_order_relaxed) != epoch) {
      drop_written();
    }
    return epoch;
  }
  void clear();
  void drop_if(bool (*test)(const CastEntry&));
  void swap(HeldCasts& other);

 private:
  static uint64_t next_span();
  void drop_written();
};

// Frees the memory of all casts that can be freed without Python. PyTorch's cache has been cleared, so the owners drop
// the entries before their next use.
void free_casts_of_all_threads();

// Notes that this thread keeps a cast that it has made.
void note_kept_cast();
// Whether this thread may use casts of others: it runs a backward, and has kept no casts outside of one, so it is a
// thread of the autograd engine. A thread that runs forwards keeps to its own casts, in their backward too.
bool borrows_casts();
// A copy of another thread's entry for this weight. Null if there is no fresh one, or if this thread may use none.
std::shared_ptr<CastEntry> borrow_cast(const Source& source, const WeightKey& key);

} // namespace torch_promote
