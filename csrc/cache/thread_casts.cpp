// file: the casts that this thread keeps, and when they end
#include "cache/thread_casts.h"

#include "cache/entry.h"
#include "cache/persistent_cache.h"
#include "policy/of_this_thread.h"

namespace torch_promote {

ThreadCaches& caches() {
  // Not in the thread's own memory: after a fork, other threads are gone in the child, and their casts are still
  // listed.
  return of_this_thread<ThreadCaches>();
}

void drop_outdated_casts() {
  if (tls_has_casts && !caches().holder.is_current()) {
    drop_casts_of_thread();
  }
}

CacheInfo cast_cache_info() {
  drop_outdated_casts();
  const ThreadCaches& here = caches();
  const PersistentInfo persistent = persistent_info();
  CacheInfo info;
  info.entries = here.weights.count() + here.activations.count();
  info.bytes = here.weights.bytes() + here.activations.bytes();
  info.hits = here.hits;
  info.misses = here.misses;
  info.stale = here.weights.stale();
  info.dropped = here.weights.dropped();
  info.persistent_entries = persistent.entries;
  info.persistent_bytes = persistent.bytes;
  return info;
}

void drop_casts_if_a_clear_was_missed() {
  if (tls_has_casts && caches().holder.may_have_missed_a_clear()) {
    drop_casts_of_thread();
  }
}

void drop_casts_of_thread() {
  tls_has_casts = false;
  caches().clear();
}

void drop_casts_beyond_stock() {
  if (caches().holder.is_watching()) {
    caches().drop_if([](const CastEntry& entry) { return entry.reuse() != Reuse::shared_grad_fn; });
  } else {
    drop_casts_of_thread();
  }
}

struct CastsOfRegions : HeldCasts {
  uint64_t clears = hand_clears;

  ~CastsOfRegions() {
    clear();
  }
};

std::shared_ptr<CastsOfRegions> take_casts() {
  drop_outdated_casts();
  if (!tls_has_casts) {
    return nullptr;
  }
  auto taken = std::make_shared<CastsOfRegions>(); // may throw
  tls_has_casts = false;
  taken->swap(caches());
  return taken;
}

void put_casts(CastsOfRegions& taken) {
  drop_outdated_casts();
  if (!tls_has_casts && taken.holder.is_current() && taken.clears == hand_clears) {
    tls_has_casts = true;
    caches().swap(taken);
  }
}

void clear_cast_cache() {
  ++hand_clears;
  end_cast_cache();
  clear_persistent();
}

} // namespace torch_promote
