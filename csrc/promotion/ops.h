// file: the ops that promote their operands, and the arguments that take part
#pragma once

#include "policy/inside_kernel.h"
#include "policy/op_table.h"
#include "promotion/rule.h"
#include "region/promotion_state.h"

#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace torch_promote {

// The dtype that an op computes in, given the common dtype of its operands.
enum class Computes : uint8_t {
  common,  // that dtype
  floats,  // that dtype, or for an integral one a floating one, as true division does
  boolean, // that dtype; the result is a bool, as of a comparison
  opaque,  // the rule acts neither on this op nor on the ops that it calls
};

// The operands for which an op raises before it promotes them; torch_promote/promoting/ops.py.
enum class Refuses : uint8_t { nothing, boolean, integral, complex, mixed };

struct PromotingOp {
  OpNumber number;
  c10::OperatorHandle handle;
  std::string name;
  std::optional<c10::OperatorHandle> functional; // for an op that writes: the overload that returns its result instead
  uint64_t participants = 0;                     // a bit for each argument that takes part
  uint64_t written = 0;                          // a bit for each argument that is written
  Computes computes = Computes::common;
  int rounding_mode = -1; // the argument that, if given, turns `floats` into `common`
  bool each = false;      // its lists go in step: each element is a call of its own
  bool matmul = false;    // a matrix product, which PyTorch does not promote
  Refuses refuses = Refuses::nothing;
  c10::BoxedKernel boxed; // the kernel for calls that are not plain; see PlainCall

  bool takes_part(size_t argument) const {
    return (participants >> argument & 1) != 0;
  }
  bool writes(size_t argument) const {
    return (written >> argument & 1) != 0;
  }
};

// By number; null for ops that do not promote.
constexpr size_t kMostOps = 4096;
inline std::array<std::atomic<const PromotingOp*>, kMostOps> promoting_ops{};

inline const PromotingOp* promoting_op(OpNumber number) {
  return number < kMostOps ? promoting_ops[number].load(std::memory_order_acquire) : nullptr;
}

// The op, if the rule acts on calls of it in the current state of this thread; otherwise null.
inline const PromotingOp* acted_on(const Promotion* promotion, OpNumber number) {
  if (promotion == nullptr || tls_promotion.inside || inside_kernel()) {
    return nullptr;
  }
  const PromotingOp* op = promoting_op(number);
  return op != nullptr && (!op->matmul || promotion->options.matmul) ? op : nullptr;
}

} // namespace torch_promote
