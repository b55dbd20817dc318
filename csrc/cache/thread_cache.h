// file: the casts that are kept for later uses: of weights and activations
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torch_promote {

// `tensor.to(dtype)`, from this thread's cache where that is allowed. The caller has seen that `tensor` is eligible and
// has another dtype.
at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype);

// While one lives, the thread casts for an op that may return a view of an argument, which its caller may write to. No
// data is shared there beyond what stock shares.
inline constinit thread_local bool tls_results_may_alias = false;
class ResultsMayAlias {
 public:
  ResultsMayAlias() : before_(std::exchange(tls_results_may_alias, true)) {}
  ~ResultsMayAlias() {
    tls_results_may_alias = before_;
  }
  ResultsMayAlias(const ResultsMayAlias&) = delete;
  ResultsMayAlias& operator=(const ResultsMayAlias&) = delete;

 private:
  bool before_;
};

// Drops this thread's casts of tensors that are about to be written unseen, and of others that share their storage.
void forget_casts_of(const std::vector<at::Tensor>& tensors);

struct CacheInfo {
  uint64_t entries = 0;            // casts held now
  uint64_t bytes = 0;              // that they occupy
  uint64_t hits = 0;               // casts served from the cache since the thread began
  uint64_t misses = 0;             // casts made for it
  uint64_t stale = 0;              // entries made again because their source had changed
  uint64_t dropped = 0;            // entries dropped because their source had died
  uint64_t persistent_entries = 0; // casts that outlive regions, in the whole process
  uint64_t persistent_bytes = 0;
};

CacheInfo cast_cache_info();

// Drops this thread's casts. For the end of its outermost region, which has made none often enough.
inline constinit thread_local bool tls_has_casts = false;
void drop_casts_of_thread();
inline void end_cast_cache() {
  if (tls_has_casts) {
    drop_casts_of_thread();
  }
}

// Drops those, and all that outlive regions.
void clear_cast_cache();

} // namespace torch_promote
