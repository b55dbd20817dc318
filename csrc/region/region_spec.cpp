// file: the settings of a region, and their packed form
#include "region/region_spec.h"

namespace torch_promote {

namespace {

constexpr unsigned kBitsPerDevice = 16;
constexpr unsigned kNamedBit = 8;
constexpr unsigned kEnabledBit = 9;
constexpr unsigned kCacheBit = 32;
constexpr unsigned kCacheModeShift = 33;
constexpr unsigned kKeepsCacheBit = 35;
constexpr unsigned kChangeShift = 40;

} // namespace

RegionSpec RegionSpec::unpack(uint64_t packed) {
  RegionSpec spec;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const uint64_t field = packed >> (kBitsPerDevice * device);
    spec.devices[device].named = (field >> kNamedBit & 1) != 0;
    spec.devices[device].enabled = (field >> kEnabledBit & 1) != 0;
    spec.devices[device].dtype = static_cast<c10::ScalarType>(field & 0xFF);
  }
  spec.cache_enabled = (packed >> kCacheBit & 1) != 0;
  if (const uint64_t mode = packed >> kCacheModeShift & 3; mode != 0) {
    spec.cache_mode = static_cast<CacheMode>(mode - 1);
  }
  spec.keeps_cache = (packed >> kKeepsCacheBit & 1) != 0;
  spec.change = static_cast<uint32_t>(packed >> kChangeShift);
  return spec;
}

uint64_t RegionSpec::pack() const {
  uint64_t packed = static_cast<uint64_t>(change) << kChangeShift;
  packed |= static_cast<uint64_t>(cache_enabled) << kCacheBit;
  if (cache_mode.has_value()) {
    packed |= (static_cast<uint64_t>(*cache_mode) + 1) << kCacheModeShift;
  }
  packed |= static_cast<uint64_t>(keeps_cache) << kKeepsCacheBit;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const PerDevice& wanted = devices[device];
    if (wanted.named) {
      const uint64_t field = static_cast<uint64_t>(wanted.dtype) | (1U << kNamedBit) |
                             (static_cast<uint64_t>(wanted.enabled) << kEnabledBit);
      packed |= field << (kBitsPerDevice * device);
    }
  }
  return packed;
}

} // namespace torch_promote
