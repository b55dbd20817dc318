// file: callbacks from promotion to Python, off the fast path: errors, reports, and dtypes missing from the tables
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_promote {

class Promotion;
struct Operand;

// python/promotion_hooks.cpp sets them to functions that call torch_promote/regions/promotion_tables.py.
struct PromotionCallbacks {
  // Puts the rule's tables for a default dtype into the rule.
  void (*put_tables)(const Promotion& promotion, c10::ScalarType default_dtype);
  // The number of the common dtype of a set of dtypes (one bit each), or -1.
  int8_t (*common_dtype)(const Promotion& promotion, uint64_t dtypes);
  // Raises because the operands have no common dtype. `floats`: the op computes in floating point.
  void (*refuse_operands)(
      const Promotion& promotion, const std::string& op, const std::vector<Operand>& operands, bool floats);
  // Raises because the rule does not allow writing the result to a tensor of dtype `written`.
  void (*refuse_to_write)(
      const Promotion& promotion,
      const std::string& op,
      const std::vector<Operand>& operands,
      c10::ScalarType computed,
      c10::ScalarType written);
  // Reports a promotion that the lint looks for; `kinds` has a bit for each LintKind that describes it, and `region` is
  // the owner of the innermost region that set the rule. May raise.
  void (*report)(
      const Promotion& promotion,
      const void* region,
      const std::string& op,
      const std::vector<Operand>& operands,
      c10::ScalarType result,
      uint8_t kinds);
};

// Set before the first rule is registered.
inline PromotionCallbacks promotion_callbacks{};

} // namespace torch_promote
