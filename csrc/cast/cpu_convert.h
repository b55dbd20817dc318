// file: arrays of float32 to and from bfloat16 and float16, in vectors
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

namespace torch_promote {

// Whether `convert` knows the pair on this processor.
bool is_convertible(c10::ScalarType from, c10::ScalarType to);

// Converts `count` numbers, rounding to nearest, ties to even, as PyTorch does everywhere. False if there was a NaN
// whose bits PyTorch chooses, by the processor and by the place in the array: then `to` holds nothing of use.
bool convert(const void* from, c10::ScalarType from_dtype, void* to, c10::ScalarType to_dtype, size_t count);

} // namespace torch_promote
