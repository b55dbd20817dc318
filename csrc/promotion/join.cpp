// file: the common dtype of a call's operands under a promotion rule
#include "promotion/join.h"

#include <algorithm>
#include <cstdint>
#include <optional>

namespace torch_promote {

namespace {

using c10::ScalarType;

// Tensors of one state: those with dimensions, or 0-dim ones where they are weak.
class Join {
 public:
  explicit Join(const Promotion& promotion) : promotion_(promotion), tables_(promotion.tables()) {}

  void add(ScalarType dtype) {
    const uint64_t bit = uint64_t{1} << static_cast<size_t>(dtype);
    if ((seen_ & bit) != 0) {
      return;
    }
    seen_ |= bit;
    ++count_;
    if (count_ == 1) {
      dtype_ = to_code(dtype);
    } else if (dtype_ != kNoDtype) {
      dtype_ = tables_.pair(dtype_, to_code(dtype));
    }
  }
  bool is_empty() const {
    return count_ == 0;
  }
  // kNoDtype if they have none.
  DtypeCode dtype() const {
    return count_ > 2 && !promotion_.options.associative ? promotion_.of_many(seen_) : dtype_;
  }

 private:
  const Promotion& promotion_;
  const PromotionTables& tables_;
  uint64_t seen_ = 0;
  int count_ = 0;
  DtypeCode dtype_ = kNoDtype;
};

} // namespace

DtypeCode common_dtype(const Promotion& promotion, const Operands& operands) {
  const PromotionTables& tables = promotion.tables();
  Join dims(promotion);
  Join zeros(promotion);
  std::optional<Number> number;
  for (const Operand& operand : operands) {
    if (operand.number.has_value()) {
      number = std::max(number.value_or(Number::boolean), *operand.number);
    } else if (promotion.options.zero_dim_is_weak && operand.is_zero_dim()) {
      zeros.add(operand.dtype);
    } else {
      dims.add(operand.dtype);
    }
  }
  const bool has_weak = !dims.is_empty() && !zeros.is_empty();
  DtypeCode strong = dims.is_empty() ? zeros.dtype() : dims.dtype();
  DtypeCode weak = has_weak ? zeros.dtype() : kNoDtype;
  if (strong == kNoDtype || (has_weak && weak == kNoDtype)) {
    return kNoDtype;
  }
  if (number.has_value()) {
    DtypeCode& joined = has_weak ? weak : strong;
    joined = tables.number(*number, joined);
    if (joined == kNoDtype) {
      return kNoDtype;
    }
  }
  return has_weak ? tables.zero_dim(strong, weak) : strong;
}

} // namespace torch_promote
