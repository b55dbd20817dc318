// file: a promotion rule as lookup tables, with the options of its region, and the calls of Python that it needs
#pragma once

#include "policy/op_table.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace torch_promote {

// An upper bound of c10::ScalarType's numbers.
constexpr size_t kDtypes = 64;

// The number of a dtype in c10::ScalarType, or kNoDtype.
using DtypeCode = int8_t;
constexpr DtypeCode kNoDtype = -1;

constexpr DtypeCode to_code(c10::ScalarType dtype) {
  return static_cast<DtypeCode>(dtype);
}

// The type of a Python number, weakest first.
enum class Number : uint8_t { boolean, integer, floating, complex, count };
constexpr size_t kNumbers = static_cast<size_t>(Number::count);

using DtypeRow = std::array<DtypeCode, kDtypes>;
using DtypePairs = std::array<DtypeRow, kDtypes>;

// The tables of a rule under one default dtype. torch_promote/reference/promotion_rules/rule.py explains each table and
// fills in entries that the rule omits, so these tables are complete.
struct PromotionTables {
  DtypePairs tensors;
  std::array<DtypeRow, kNumbers> numbers;
  DtypeRow floats;
  DtypePairs zero_dims;
  std::array<uint64_t, kDtypes> castable; // indexed by the computed dtype: a bit for each dtype it may be written to
  uint64_t content = 0;                   // a hash of the tables

  DtypeCode pair(DtypeCode a, DtypeCode b) const {
    return tensors[static_cast<size_t>(a)][static_cast<size_t>(b)];
  }
  DtypeCode number(Number number, DtypeCode dtype) const {
    return numbers[static_cast<size_t>(number)][static_cast<size_t>(dtype)];
  }
  DtypeCode zero_dim(DtypeCode dims, DtypeCode zero) const {
    return zero_dims[static_cast<size_t>(dims)][static_cast<size_t>(zero)];
  }
  DtypeCode floating(DtypeCode dtype) const {
    return floats[static_cast<size_t>(dtype)];
  }
  bool can_write(c10::ScalarType computed, c10::ScalarType written) const {
    return (castable[static_cast<size_t>(computed)] >> static_cast<size_t>(written) & 1) != 0;
  }
};

struct PromotionOptions {
  bool zero_dim_is_weak = false;
  bool associative = true;
  bool is_stock = false;     // PyTorch's own rule, which ops apply themselves
  bool matmul = false;       // whether the rule acts on matrix products
  uint8_t lint = 0;          // the kinds to report, as bits in the order of PromotionKind (regions/promotion.py)
  uint32_t lint_handler = 0; // Python's number for the handler that receives the reports

  bool operator==(const PromotionOptions& other) const = default;
  // Whether a kind is among them that describes calls with Python numbers: INT_OVERFLOW or FLOAT_OVERFLOW.
  bool reports_numbers() const {
    return (lint & 0b110) != 0;
  }
};

// A rule that regions refer to. It is never destroyed: a process has few of them, with 9 KB each.
class Promotion {
 public:
  Promotion(
      uint32_t number,
      std::string name,
      PromotionOptions options,
      c10::ScalarType default_dtype,
      PromotionTables tables);
  Promotion(const Promotion&) = delete;

  const uint32_t number; // from 1
  const std::string name;
  const PromotionOptions options;
  const uint64_t content; // a hash, the same in every process

  // The tables for the current default dtype.
  const PromotionTables& tables() const;
  // The tables for any default dtype. Read only entries that do not depend on it: a dtype with itself, and a dtype with
  // a number that does not promote it.
  const PromotionTables& any_tables() const {
    return *first_;
  }
  void put_tables(c10::ScalarType default_dtype, PromotionTables tables) const;

  // The common dtype of a set of more than two dtypes (one bit each), under a rule that is not associative.
  DtypeCode of_many(uint64_t dtypes) const;

 private:
  const PromotionTables* first_;
  mutable std::array<std::atomic<const PromotionTables*>, kDtypes> by_default_dtype_{};
  mutable std::map<std::pair<uint64_t, c10::ScalarType>, DtypeCode> many_; // keyed by the set and the default dtype
};

struct Operand;

// Calls of Python, off the fast path: errors, reports, and dtypes missing from the tables. python/callbacks.cpp defines
// them with functions of torch_promote/regions/promotion_tables.py.

// Puts the rule's tables for a default dtype into the rule.
void ask_for_tables(const Promotion& promotion, c10::ScalarType default_dtype);
// The number of the common dtype of a set of dtypes (one bit each), or kNoDtype.
DtypeCode ask_for_common_dtype(const Promotion& promotion, uint64_t dtypes);
// Raises because the operands have no common dtype. `floats`: the op computes in floating point.
void refuse_operands(
    const Promotion& promotion, const std::string& op, const std::vector<Operand>& operands, bool floats);
// Raises because the rule does not allow writing the result to a tensor of dtype `written`.
void refuse_to_write(
    const Promotion& promotion,
    const std::string& op,
    const std::vector<Operand>& operands,
    c10::ScalarType computed,
    c10::ScalarType written);
// Reports a call for the lint; `region` is the owner of the innermost region that set the rule. May raise.
void report(
    const Promotion& promotion,
    const void* region,
    const std::string& op,
    const std::vector<Operand>& operands,
    c10::ScalarType computed);

// Returns the rule's number, from 1 on.
uint32_t register_promotion(
    const std::string& name,
    const PromotionOptions& options,
    c10::ScalarType default_dtype,
    const PromotionTables& tables);
// Raises if there is no such rule.
const Promotion& promotion_of(uint32_t number);

inline PromotionReference reference_to(const Promotion& rule) {
  return {&rule, rule.content};
}

} // namespace torch_promote
