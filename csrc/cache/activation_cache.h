// file: one thread's last few casts of activations
#pragma once

#include "cache/entry.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <vector>

namespace torch_promote {

// Query, key and value, or gate and up, are projections of one activation. With this cache it is cast once, and
// autograd saves one copy. A cast stays until its activation dies, four other activations have been cast, or the
// thread's outermost region ends, be that through a backward. A cast that is larger than its activation stays only as
// long as autograd has saved it.
class ActivationCache {
 public:
  // Null if there is none from this capture, or from outside of captures. Also drops casts of activations that have
  // died.
  std::shared_ptr<CastEntry> find(const Source& source, at::ScalarType dtype, uint64_t capture);
  void insert(std::shared_ptr<CastEntry> entry, uint64_t capture, const CastTime& made);
  // Takes out the casts of what was written to.
  void take_out(const WritesSince& writes, std::vector<std::shared_ptr<CastEntry>>& gone);
  void drop_if(bool (*test)(const CastEntry&));
  void clear();
  // For other threads, under casts_mutex, as is `swap`. See NOTE [ Casts and other threads ].
  void take_memory(std::vector<CastMemory>& gone);
  void swap(ActivationCache& other);
  size_t count() const;
  size_t bytes() const;

 private:
  // The consumers of an activation follow on one another, with few other casts between them.
  static constexpr size_t kCount = 4;

  using Entries = std::array<std::shared_ptr<CastEntry>, kCount>;

  Entries entries_;
  std::array<uint64_t, kCount> captures_{}; // of the entries
  size_t next_ = 0;
};

} // namespace torch_promote
