// file: the common dtype of a call's operands under a promotion rule
#pragma once

#include "python/promotion_hooks.h"
#include "promotion/rule.h"

namespace torch_promote {

// Of operands of which one at least is a tensor; kNoDtype if there is none. As
// torch_promote/reference/promotion_rules/rule.py, PromotionRule.common.
DtypeCode common_dtype(const Promotion& promotion, const Operands& operands);

} // namespace torch_promote
