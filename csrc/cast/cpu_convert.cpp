// file: arrays of float32 to and from bfloat16 and float16, in vectors
#include "cast/cpu_convert.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // GCC 12's own headers: what a full mask does not read
#endif
#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,f16c")))
#endif

namespace torch_promote {

namespace {

using c10::ScalarType;

// The bits of float32 and bfloat16.
constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kHalfwayLess = 0x7FFF; // less than half of bfloat16's last place, by the least there is

// One number: the tails of arrays, and whole arrays where there are no vectors.

uint32_t load(const float* from) {
  uint32_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

// Whether one of them is a NaN.
bool to_bfloat16_each(const float* from, uint16_t* to, size_t count) {
  bool nan = false;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = load(from + i);
    nan |= (bits & kMagnitude) > kInfinity;
    to[i] = static_cast<uint16_t>((bits + kHalfwayLess + (bits >> 16 & 1)) >> 16);
  }
  return nan;
}

void from_bfloat16_each(const uint16_t* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

#if defined(__x86_64__)

enum class Vectors : uint8_t { none, avx2, avx512 };

Vectors vectors() {
  static const Vectors here = [] {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    if (!f16c || !__builtin_cpu_supports("avx2")) {
      return Vectors::none;
    }
    const bool wide =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    return wide ? Vectors::avx512 : Vectors::avx2;
  }();
  return here;
}

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// --- 512 bits: 16 numbers at a time, the last ones under a mask (a masked store is slow to be read again)

AVX512 __mmask16 mask_of(size_t left) {
  return static_cast<__mmask16>((1U << left) - 1);
}

AVX512 __m256i rounded_512(__m512 numbers) {
  const __m512i bits = _mm512_castps_si512(numbers);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(odd, _mm512_set1_epi32(kHalfwayLess));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(bits, up), 16));
}

AVX512 __m512 widened_512(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

AVX512 __mmask16 nans_of(__m512 numbers) {
  return _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
}

AVX512 bool to_bfloat16_512(const float* from, uint16_t* to, size_t count) {
  __mmask16 nans = 0;
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512 first = _mm512_loadu_ps(from + i);
    const __m512 second = _mm512_loadu_ps(from + i + 16);
    nans |= _mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q); // either of them
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), rounded_512(first));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 16), rounded_512(second));
  }
  for (; i < count; i += 16) {
    const size_t left = count - i;
    const __mmask16 mask = left < 16 ? mask_of(left) : __mmask16{0xFFFF};
    const __m512 numbers = _mm512_maskz_loadu_ps(mask, from + i);
    nans |= nans_of(numbers);
    _mm256_mask_storeu_epi16(to + i, mask, rounded_512(numbers));
  }
  return nans != 0;
}

AVX512 void from_bfloat16_512(const uint16_t* from, float* to, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(to + i, widened_512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  }
  if (i < count) {
    const __mmask16 mask = mask_of(count - i);
    _mm512_mask_storeu_ps(to + i, mask, widened_512(_mm256_maskz_loadu_epi16(mask, from + i)));
  }
}

AVX512 bool to_float16_512(const float* from, uint16_t* to, size_t count) {
  __mmask16 nans = 0;
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 numbers = _mm512_loadu_ps(from + i);
    nans |= nans_of(numbers);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtps_ph(numbers, kNearest));
  }
  if (i < count) {
    const __mmask16 mask = mask_of(count - i);
    const __m512 numbers = _mm512_maskz_loadu_ps(mask, from + i);
    nans |= nans_of(numbers);
    _mm256_mask_storeu_epi16(to + i, mask, _mm512_cvtps_ph(numbers, kNearest));
  }
  return nans != 0;
}

AVX512 bool from_float16_512(const uint16_t* from, float* to, size_t count) {
  __mmask16 nans = 0;
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 numbers = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    nans |= nans_of(numbers);
    _mm512_storeu_ps(to + i, numbers);
  }
  if (i < count) {
    const __mmask16 mask = mask_of(count - i);
    const __m512 numbers = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from + i));
    nans |= nans_of(numbers);
    _mm512_mask_storeu_ps(to + i, mask, numbers);
  }
  return nans != 0;
}

// --- 256 bits: 8 numbers at a time, the last ones in an array of their own

AVX2 bool any_nan(__m256 unordered) {
  return _mm256_movemask_ps(unordered) != 0;
}

AVX2 __m256i rounded_256(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(kHalfwayLess));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
}

AVX2 bool to_bfloat16_256(const float* from, uint16_t* to, size_t count) {
  __m256 nans = _mm256_setzero_ps();
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256 low = _mm256_loadu_ps(from + i);
    const __m256 high = _mm256_loadu_ps(from + i + 8);
    nans = _mm256_or_ps(nans, _mm256_cmp_ps(low, high, _CMP_UNORD_Q)); // either of them
    // Packing interleaves the 128-bit halves of its operands; the permutation puts them in order.
    const __m256i packed =
        _mm256_packus_epi32(rounded_256(_mm256_castps_si256(low)), rounded_256(_mm256_castps_si256(high)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permute4x64_epi64(packed, 0xD8));
  }
  const bool nan = to_bfloat16_each(from + i, to + i, count - i);
  return nan || any_nan(nans);
}

AVX2 void from_bfloat16_256(const uint16_t* from, float* to, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), wide);
  }
  from_bfloat16_each(from + i, to + i, count - i);
}

AVX2 bool to_float16_256(const float* from, uint16_t* to, size_t count) {
  __m256 nans = _mm256_setzero_ps();
  for (size_t i = 0; i < count; i += 8) {
    const size_t left = count - i;
    alignas(32) float last[8] = {};
    if (left < 8) {
      std::memcpy(last, from + i, left * sizeof(float));
    }
    const __m256 numbers = _mm256_loadu_ps(left < 8 ? last : from + i);
    nans = _mm256_or_ps(nans, _mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
    const __m128i halves = _mm256_cvtps_ph(numbers, kNearest);
    if (left < 8) {
      std::memcpy(to + i, &halves, left * sizeof(uint16_t));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
    }
  }
  return any_nan(nans);
}

AVX2 bool from_float16_256(const uint16_t* from, float* to, size_t count) {
  __m256 nans = _mm256_setzero_ps();
  for (size_t i = 0; i < count; i += 8) {
    const size_t left = count - i;
    __m128i halves = _mm_setzero_si128();
    std::memcpy(&halves, from + i, (left < 8 ? left : 8) * sizeof(uint16_t));
    const __m256 numbers = _mm256_cvtph_ps(halves);
    nans = _mm256_or_ps(nans, _mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
    std::memcpy(to + i, &numbers, (left < 8 ? left : 8) * sizeof(float));
  }
  return any_nan(nans);
}

bool to_bfloat16(const float* from, uint16_t* to, size_t count) {
  switch (vectors()) {
    case Vectors::avx512:
      return to_bfloat16_512(from, to, count);
    case Vectors::avx2:
      return to_bfloat16_256(from, to, count);
    default:
      return to_bfloat16_each(from, to, count);
  }
}
void from_bfloat16(const uint16_t* from, float* to, size_t count) {
  switch (vectors()) {
    case Vectors::avx512:
      return from_bfloat16_512(from, to, count);
    case Vectors::avx2:
      return from_bfloat16_256(from, to, count);
    default:
      return from_bfloat16_each(from, to, count);
  }
}
bool to_float16(const float* from, uint16_t* to, size_t count) {
  return vectors() == Vectors::avx512 ? to_float16_512(from, to, count) : to_float16_256(from, to, count);
}
bool from_float16(const uint16_t* from, float* to, size_t count) {
  return vectors() == Vectors::avx512 ? from_float16_512(from, to, count) : from_float16_256(from, to, count);
}
bool has_float16() {
  return vectors() != Vectors::none;
}

#else // other processors: what the compiler makes of the loops, and no float16

bool to_bfloat16(const float* from, uint16_t* to, size_t count) {
  return to_bfloat16_each(from, to, count);
}
void from_bfloat16(const uint16_t* from, float* to, size_t count) {
  from_bfloat16_each(from, to, count);
}
bool to_float16(const float* /*from*/, uint16_t* /*to*/, size_t /*count*/) {
  return true;
}
bool from_float16(const uint16_t* /*from*/, float* /*to*/, size_t /*count*/) {
  return true;
}
bool has_float16() {
  return false;
}

#endif

} // namespace

bool is_convertible(ScalarType from, ScalarType to) {
  const bool widens = to == ScalarType::Float;
  if (!widens && from != ScalarType::Float) {
    return false;
  }
  const ScalarType narrow = widens ? from : to;
  return narrow == ScalarType::BFloat16 || (narrow == ScalarType::Half && has_float16());
}

bool convert(const void* from, ScalarType from_dtype, void* to, ScalarType to_dtype, size_t count) {
  if (to_dtype == ScalarType::Float) {
    const auto* narrow = static_cast<const uint16_t*>(from);
    auto* wide = static_cast<float*>(to);
    if (from_dtype == ScalarType::Half) {
      return !from_float16(narrow, wide, count);
    }
    from_bfloat16(narrow, wide, count); // the upper half of a float32: a NaN keeps its bits
    return true;
  }
  const auto* wide = static_cast<const float*>(from);
  auto* narrow = static_cast<uint16_t*>(to);
  return !(to_dtype == ScalarType::Half ? to_float16(wide, narrow, count) : to_bfloat16(wide, narrow, count));
}

} // namespace torch_promote
