// file: the kernels of promoting ops on kAutocastKey, typed for common signatures
#pragma once

#include "promotion/call.h"

#include <cstdint>
#include <string>

namespace torch_promote {

struct PromotingOpRequest {
  std::string op;
  std::string overload;
  std::string functional; // "aten::add.Tensor", or ""
  uint64_t participants = 0;
  Computes computes = Computes::common;
  int rounding_mode = -1;
  bool each = false;
  bool matmul = false;
};

// Makes an op promote, and registers a kernel for it on kAutocastKey unless it has one. Raises if the dispatcher has no
// such overload, or if another library has registered a kernel for it on kAutocastKey.
void register_promoting_op(const PromotingOpRequest& request);

} // namespace torch_promote
