// file: the last few casts of activations, for their next consumers
#pragma once

#include "cache/entry.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>

namespace torch_promote {

// Query, key and value, or gate and up, are projections of one activation: it is cast once, and autograd saves one
// copy. A cast stays until its activation dies, as many others have been cast since, or the outermost region of the
// thread ends.
class ActivationCasts {
 public:
  // Null if there is none. Drops what has died, too.
  std::shared_ptr<CastEntry> find(const at::Tensor& source, at::ScalarType dtype);
  void insert(std::shared_ptr<CastEntry> entry);
  void clear();
  size_t count() const;
  size_t bytes() const;

 private:
  // The consumers of an activation follow on one another, with other casts between them.
  static constexpr size_t kCount = 4;

  std::array<std::shared_ptr<CastEntry>, kCount> entries_;
  size_t next_ = 0;
};

} // namespace torch_promote
