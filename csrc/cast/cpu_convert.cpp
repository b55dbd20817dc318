// file: converts arrays between float32 and bfloat16 without calling an op
#include "cast/cpu_convert.h"

#include <bit>

// The compiler vectorizes the loops once for each of these instruction sets, and the loader picks one. It calls a
// function for that, before it has linked the functions that TSan's instrumentation of this function calls.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define VECTORIZED __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif

namespace torch_promote {

namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kHalfwayLess = 0x7FFF; // one unit below half of bfloat16's last place

} // namespace

VECTORIZED bool to_bfloat16(const float* from, uint16_t* to, size_t count) {
  uint32_t nan = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    nan |= (bits & kMagnitude) > kInfinity ? 1U : 0U;
    to[i] = static_cast<uint16_t>((bits + kHalfwayLess + (bits >> 16 & 1)) >> 16);
  }
  return nan == 0;
}

VECTORIZED void from_bfloat16(const uint16_t* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
  }
}

} // namespace torch_promote
