// file: the cast policies, and the one-byte form in which a policy table holds them
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace torch_promote {

// What a wrapper does with a call. The words are PyTorch's; `unlisted` is the one state that is not a policy:
// the table has no say for this op on this device, so whatever PyTorch registered there decides.
enum class CastPolicy : uint8_t {
  unlisted = 0,
  fallthrough,
  keep,
  banned,
  lower_precision_fp,
  fp32,
  fp32_set_opt_dtype,
  fp32_append_dtype,
  promote,
  match_self,
  // From here on a byte is `run_in + ScalarType`: cast the eligible arguments to that dtype.
  run_in = 64,
};

using PolicyByte = uint8_t;

constexpr PolicyByte to_byte(CastPolicy policy) {
  return static_cast<PolicyByte>(policy);
}

constexpr bool is_run_in(PolicyByte byte) {
  return byte >= to_byte(CastPolicy::run_in);
}

constexpr c10::ScalarType run_in_dtype(PolicyByte byte) {
  return static_cast<c10::ScalarType>(byte - to_byte(CastPolicy::run_in));
}

} // namespace torch_promote
