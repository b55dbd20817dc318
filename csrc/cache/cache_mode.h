// file: which casts a thread keeps; regions set the mode
#pragma once

#include <array>
#include <cstdint>

namespace torch_promote {

// Which casts are kept for later uses while a region's cache flag is on; see docs/casts.md.
//
//   mode        trainable float32 leaf    other weight                activation
//   weights     in the region             -                           -
//   all         in the region             in the region               the last four, in the region
//   persistent  on the weight             on the weight               -
enum class CacheMode : uint8_t { weights, persistent, all };
constexpr std::array<const char*, 3> kCacheModeNames = {"weights", "persistent", "all"}; // in the enum's order

// Set by the innermost open region that specifies a mode.
inline constinit thread_local CacheMode tls_cache_mode = CacheMode::weights;

// Whether an autocast region of ours is open in this thread. (Regions that name no device, such as those of
// `promotion`, are no autocast regions.)
inline constinit thread_local bool tls_region_open = false;

} // namespace torch_promote
