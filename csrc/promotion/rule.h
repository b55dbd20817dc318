// file: a promotion rule as lookup tables, and what a region does besides with it
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace torch_promote {

// Room for the number of every dtype; c10::ScalarType is well below.
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

// A rule under one default dtype; torch_promote/reference/promotion_rules/rule.py says what each table means. They are
// total: what the rule has no row for is filled in as its methods say.
struct PromotionTables {
  DtypePairs tensors;
  std::array<DtypeRow, kNumbers> numbers;
  DtypeRow floats;
  DtypePairs zero_dims;
  std::array<uint64_t, kDtypes> castable; // by the dtype computed: a bit for each dtype that it may be written to
  uint64_t content = 0;                   // a hash of the rest

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

// What the lint looks for; a bit each. Their names are in torch_promote/promoting/lint.py, in this order.
enum class LintKind : uint8_t { zero_dim, overflow, low_precision, float64, any };

struct PromotionOptions {
  bool zero_dim_is_weak = false;
  bool associative = true;
  bool is_stock = false;     // PyTorch's own rule, which the ops themselves obey
  bool matmul = false;       // whether it is for matrix products too
  uint8_t lint = 0;          // the kinds that are reported; 0: none
  uint32_t lint_handler = 0; // who is told; its number in Python

  bool operator==(const PromotionOptions& other) const = default;
  bool reports(LintKind kind) const {
    return (lint >> static_cast<unsigned>(kind) & 1) != 0;
  }
};

// A rule in the service of regions. They live for good; equal ones are one object.
class Promotion {
 public:
  Promotion(
      uint32_t number,
      std::string name,
      PromotionOptions options,
      c10::ScalarType default_dtype,
      PromotionTables tables);

  const uint32_t number; // from 1
  const std::string name;
  const PromotionOptions options;
  const uint64_t content; // a hash that is the same in every process

  // Those for the default dtype of this moment.
  const PromotionTables& tables() const;
  // Those that any default dtype has alike: what dtypes make of themselves, and fitting numbers of them.
  const PromotionTables& any_tables() const {
    return *first_;
  }
  void put_tables(c10::ScalarType default_dtype, PromotionTables tables) const;

  // The common dtype of a set of more than two dtypes, a bit each, where folding is not it.
  DtypeCode of_many(uint64_t dtypes) const;

 private:
  const PromotionTables* first_;
  mutable std::mutex mutex_;
  mutable std::array<std::atomic<const PromotionTables*>, kDtypes> by_default_dtype_{};
  mutable std::map<std::pair<uint64_t, c10::ScalarType>, DtypeCode> many_; // by the set and the default dtype
};

// Number 0 is none.
uint32_t register_promotion(
    const std::string& name,
    const PromotionOptions& options,
    c10::ScalarType default_dtype,
    const PromotionTables& tables);
const Promotion* promotion_of(uint32_t number);

} // namespace torch_promote
