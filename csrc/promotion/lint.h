// file: which kind of silent promotion a call is
#pragma once

#include "python/promotion_hooks.h"

#include <optional>

namespace torch_promote {

// The first of the kinds that are looked for, nullopt if the call is of none. `computed` is what the op computes in.
std::optional<LintKind> kind_of_promotion(
    const Promotion& promotion, const Operands& operands, c10::ScalarType computed);

} // namespace torch_promote
