// file: the kernels that promoting ops get on our key, typed where their signature is a common one
#pragma once

#include "promotion/ops.h"

namespace torch_promote {

// Registers a kernel for the op on our key, for good.
void register_kernel(const PromotingOp& op);

} // namespace torch_promote
