// file: the settings of a region, and their packed form
#pragma once

#include "cache/cache_mode.h"
#include "policy/op_table.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>

namespace torch_promote {

// The settings of a region. Python and torch.compile hold them packed into 64 bits, as a constant;
// torch_promote/extension.py packs and unpacks the same bits:
//   bits 0..7 dtype, 8 named, 9 enabled for cpu; 16..23, 24, 25 the same for cuda; 32 cache_enabled;
//   33..34 cache mode: 0 not given, else 1 + CacheMode; 35 keeps_cache; 40..63 change.
struct RegionSpec {
  struct PerDevice {
    bool named = false;
    bool enabled = false;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
  };
  std::array<PerDevice, kNumDevices> devices;
  bool cache_enabled = true;
  bool keeps_cache = false;            // leaves the cache flag as it is
  std::optional<CacheMode> cache_mode; // nullopt: keeps that of the region around it
  uint32_t change = 0;                 // the policy change's number in the registry

  static RegionSpec unpack(uint64_t packed);
  uint64_t pack() const;
};

} // namespace torch_promote
