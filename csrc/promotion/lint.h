// file: classifies silent promotion for the lint
#pragma once

#include "promotion/operands.h"

#include <cstdint>

namespace torch_promote {

// Returns the kinds that the rule's lint looks for and that describe the call, a bit each. `any` is among them only if
// no other kind is. The op computes in `computed`.
uint8_t kinds_of_promotion(const Promotion& promotion, const Operands& operands, c10::ScalarType computed);

} // namespace torch_promote
