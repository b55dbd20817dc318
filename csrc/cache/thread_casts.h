// file: the casts that this thread keeps, and when they end
#pragma once

#include "cache/held_casts.h"

#include <cstdint>
#include <memory>

namespace torch_promote {

struct CacheInfo {
  uint64_t entries = 0;            // casts held now
  uint64_t bytes = 0;              // their size
  uint64_t hits = 0;               // casts served from the cache since the thread began
  uint64_t misses = 0;             // casts made and kept
  uint64_t stale = 0;              // entries dropped because their source had changed
  uint64_t dropped = 0;            // entries dropped because their weight had died
  uint64_t persistent_entries = 0; // casts of the whole process that outlive regions
  uint64_t persistent_bytes = 0;
};

CacheInfo cast_cache_info();

// Drops this thread's casts. The end of the thread's outermost autocast region calls it; most regions have made none.
inline constinit thread_local bool tls_has_casts = false;
void drop_casts_of_thread();
void drop_casts_if_a_clear_was_missed(); // see NOTE [ When casts end ]
inline void end_cast_cache() {
  if (tls_has_casts) {
    drop_casts_of_thread();
  }
}

// Drops the casts that stock would not keep. The end of our outermost region calls it where a region of torch.autocast
// is still open; the other casts end with that. See NOTE [ When casts end ].
void drop_casts_beyond_stock();
inline void end_cast_cache_of_regions() {
  if (tls_has_casts) {
    drop_casts_beyond_stock();
  }
}

// The casts of regions that are suspended. `take_casts` takes this thread's, null if there are none. `put_casts` makes
// them a thread's again, unless that has casts of a region around, or PyTorch's cache was cleared meanwhile.
struct CastsOfRegions;
std::shared_ptr<CastsOfRegions> take_casts();
void put_casts(CastsOfRegions& taken);

// Drops this thread's casts, those of suspended regions, and all persistent ones.
void clear_cast_cache();

struct ThreadCaches : HeldCasts {
  uint64_t hits = 0;
  uint64_t misses = 0;

  ~ThreadCaches() {
    tls_has_casts = false; // PyTorch's cache may be cleared later in this thread
  }
};

ThreadCaches& caches();

// See NOTE [ When casts end ].
void drop_outdated_casts();

} // namespace torch_promote
