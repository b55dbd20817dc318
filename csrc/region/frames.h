// file: the open regions of a thread, one frame each, and how the thread's state follows from them
#pragma once

#include "policy/policy_registry.h"
#include "region/region_spec.h"
#include "region/thread_state.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace torch_promote {

// An open region. Its end restores the state of the devices that it names, and the cache mode if it sets one, and
// leaves other devices alone.
struct Frame {
  const void* owner;
  RegionSpec spec;
  ThreadState before;
  PolicyPtr around;    // the policy that its change is applied to; never null
  PolicyPtr policy;    // the policy inside; never null once the region is open
  int graph_task = -1; // see PromotionState; looked up only under a promotion rule

  bool names(size_t device) const {
    return spec.devices[device].named;
  }
  // Whether this is an autocast region. One that names no device (`promotion`, a policy alone) is none: PyTorch does
  // not count it, and no cast lives until its end.
  bool is_autocast() const {
    return std::any_of(spec.devices.begin(), spec.devices.end(), [](auto& device) { return device.named; });
  }
};

// Those of this thread, outermost first. Call `put_flags` whenever they have changed.
std::vector<Frame>& open_frames();
void put_flags();

// Whether a region changes the policy, or is the outermost under a default policy that is not stock's. It then writes
// the slots of the fingerprint; before the first such region is entered, call `read_slots_outside`.
bool writes_slots(const Frame& frame);
bool any_writes_slots();
void read_slots_outside();

bool sets_cache_mode(const Frame& frame);

// Makes a policy the one in force in this thread. `in_slots`: an open region writes the slots, so they are ours.
void put_policy(const PolicyTable* policy, bool in_slots);

// Our key is on where a device's autocast is, and under overrides, which also apply to regions of torch.autocast inside
// a disabled region of ours. Otherwise it is off: PyTorch counts it among the autocast devices when it asks whether any
// is enabled.
void put_key(ThreadKeys& keys, const PolicyTable* policy);

// The policy that a region entered now changes: that of the region around it, which PyTorch may have carried here from
// another thread, or else the default.
PolicyPtr policy_around(const ThreadState& state);

// Composes the policies of the frames from `first` on anew, and returns the innermost one. `before` is the policy that
// the first of them restores, null for none, and `around` the one that its change is applied to.
const PolicyTable* recompose(std::vector<Frame>& frames, size_t first, const PolicyTable* before, PolicyPtr around);

// Ends the innermost region of the thread.
void end_innermost();
// The part of a region's end that concerns PyTorch's count of regions, and the caches.
void leave_nesting(const Frame& frame);
// As in stock, caches live as long as the outermost region of the thread, ours or PyTorch's.
void end_caches();

} // namespace torch_promote
