// file: the ops that promote their operands, and the arguments that take part
#pragma once

#include "policy/inside_kernel.h"
#include "policy/op_table.h"
#include "promotion/rule.h"
#include "region/current_policy.h"

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
  floats,  // that dtype, or a floating dtype if it is integral, as in true division
  boolean, // that dtype; the result is a bool, as in a comparison
  opaque,  // the rule acts neither on this op nor on the ops that it calls
};

// The operands for which an op raises before it promotes them; torch_promote/regions/promotion_tables.py.
enum class Refuses : uint8_t { nothing, boolean, integral, complex, mixed };

struct PromotingOp {
  OpNumber number;
  c10::OperatorHandle handle;
  std::string name;
  std::optional<c10::OperatorHandle> functional; // for an op that writes to an argument: its functional overload
  uint64_t participants = 0;                     // a bit for each argument that takes part
  uint64_t written = 0;                          // a bit for each argument that the op writes to
  Computes computes = Computes::common;
  int rounding_mode = -1; // the argument that turns `floats` into `common` if it is given
  bool each = false;      // the op iterates over its lists in parallel: each element is a separate call
  bool matmul = false;    // a matrix product, which PyTorch does not promote
  Refuses refuses = Refuses::nothing;
  c10::BoxedKernel boxed; // for calls that are not plain; see PlainCall

  bool takes_part(size_t argument) const {
    return (participants >> argument & 1) != 0;
  }
  bool writes(size_t argument) const {
    return (written >> argument & 1) != 0;
  }
};

// Indexed by op number; null for ops that do not promote.
constexpr size_t kMostOps = 4096;
inline std::array<std::atomic<const PromotingOp*>, kMostOps> promoting_ops{};

inline const PromotingOp* promoting_op(OpNumber number) {
  return number < kMostOps ? promoting_ops[number].load(std::memory_order_acquire) : nullptr;
}

// The op, or null if the rule does not act on it in this thread's current state.
inline const PromotingOp* acted_on(const Promotion* promotion, OpNumber number) {
  if (promotion == nullptr || tls_promotion.inside || inside_kernel()) {
    return nullptr;
  }
  const PromotingOp* op = promoting_op(number);
  return op != nullptr && (!op->matmul || promotion->options.matmul) ? op : nullptr;
}

} // namespace torch_promote
