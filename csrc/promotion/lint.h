// file: classifies silent promotion for the lint
#pragma once

#include "promotion/operands.h"

#include <optional>

namespace torch_promote {

// Returns the first kind that the rule's lint looks for and that describes the call; nullopt if there is none. The op
// computes in `computed`.
std::optional<LintKind> kind_of_promotion(
    const Promotion& promotion, const Operands& operands, c10::ScalarType computed);

} // namespace torch_promote
