// file: which casts this thread's cache keeps; regions set the mode
#pragma once

#include <array>
#include <cstdint>

namespace torch_promote {

// Which casts are kept for later uses while a region's cache flag is on; see docs/casts.md.
enum class CacheMode : uint8_t { weights, persistent, all };
constexpr std::array<const char*, 3> kCacheModeNames = {"weights", "persistent", "all"}; // in the enum's order

// Set by the innermost open region that specifies a mode.
inline constinit thread_local CacheMode tls_cache_mode = CacheMode::weights;

// Whether this thread has an open region, whose end will clear the cache. The autograd engine carries the autocast key
// to threads of its own, which have none: casts kept there would never be dropped.
inline constinit thread_local bool tls_region_open = false;

} // namespace torch_promote
