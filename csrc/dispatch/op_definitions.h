// file: counts definitions of ops
#pragma once

#include <cstdint>

namespace torch_promote {

// How often an op was defined or destroyed in this process. A name or a pattern selects the same ops as long as this is
// the same.
uint64_t op_definitions();

} // namespace torch_promote
