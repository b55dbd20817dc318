// file: converts arrays between float32 and bfloat16 without calling an op
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_promote {

// Rounds to nearest, ties to even, like PyTorch. Returns false if there is a NaN, and `to` must not be used then: the
// bits of a NaN in bfloat16 depend on PyTorch's kernel for this processor and on the NaN's position in the array.
bool to_bfloat16(const float* from, uint16_t* to, size_t count);

// A bfloat16 is the upper half of a float32; NaNs keep their bits.
void from_bfloat16(const uint16_t* from, float* to, size_t count);

} // namespace torch_promote
