// file: the last few casts of activations, for their next consumers
#pragma once

#include "cast_entry.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace torch_promote {

// Query, key and value, or gate and up, are projections of one activation: it is cast once, and autograd saves one
// copy. A cast stays until its activation dies, as many others have been cast since, or the outermost region of the
// thread ends.
class ActivationCasts {
 public:
  // Drops what has died, too.
  CastEntry* find(const at::Tensor& source, at::ScalarType dtype);
  void insert(CastEntry entry);
  void clear();
  size_t count() const;
  size_t bytes() const;

 private:
  // The consumers of an activation follow on one another, with other casts between them.
  static constexpr size_t kCount = 4;

  std::array<std::optional<CastEntry>, kCount> entries_;
  size_t next_ = 0;
};

} // namespace torch_promote
