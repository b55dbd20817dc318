// file: the ops that promote their operands, and which of their arguments take part
#pragma once

#include "policy/op_table.h"
#include "promotion/rule.h"
#include "promotion/state.h"

#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace torch_promote {

// What an op makes of the common dtype of its operands.
enum class Computes : uint8_t {
  common,  // itself
  floats,  // a floating one of an integral one, as true division does
  boolean, // a truth value
  opaque,  // nothing: what is inside such an op is its own affair, and it promotes nothing of its own
};

// The operands that an op raises for before it promotes them; torch_promote/promoting/ops.py.
enum class Refuses : uint8_t { nothing, boolean, integral, complex, mixed };

struct PromotingOp {
  OpNumber number;
  c10::OperatorHandle handle;
  std::string name;
  std::optional<c10::OperatorHandle> functional; // what computes the same without writing, of an op that writes
  uint64_t participants = 0;                     // a bit for each argument that takes part
  uint64_t written = 0;                          // a bit for each argument that is written
  Computes computes = Computes::common;
  int rounding_mode = -1; // the argument that, if given, makes `floats` `common`
  bool each = false;      // its lists go in step: each element is a call of its own
  bool matmul = false;    // a matrix product, which PyTorch does not promote
  Refuses refuses = Refuses::nothing;
  c10::BoxedKernel boxed; // what the key does with a call of it that is not plain

  bool takes_part(size_t argument) const {
    return (participants >> argument & 1) != 0;
  }
  bool writes(size_t argument) const {
    return (written >> argument & 1) != 0;
  }
};

// By number; null for what does not promote.
constexpr size_t kMostOps = 4096;
inline std::array<std::atomic<const PromotingOp*>, kMostOps> promoting_ops{};

inline const PromotingOp* promoting_op(OpNumber number) {
  return number < kMostOps ? promoting_ops[number].load(std::memory_order_acquire) : nullptr;
}

// The op, if the rule acts on calls of it here.
inline const PromotingOp* acted_on(const Promotion* promotion, OpNumber number) {
  if (promotion == nullptr || tls_promotion.inside) {
    return nullptr;
  }
  const PromotingOp* op = promoting_op(number);
  return op != nullptr && (!op->matmul || promotion->options.matmul) ? op : nullptr;
}

struct PromotingOpRequest {
  std::string op;
  std::string overload;
  std::string functional; // "aten::add.Tensor", or ""
  uint64_t participants = 0;
  Computes computes = Computes::common;
  int rounding_mode = -1;
  bool each = false;
  bool matmul = false;
  Refuses refuses = Refuses::nothing;
};

// Gives the op a kernel on our key, for good, unless it has one. Raises if the dispatcher knows no such overload or
// another library has a kernel for it on our key.
void register_promoting_op(const PromotingOpRequest& request);

} // namespace torch_promote
