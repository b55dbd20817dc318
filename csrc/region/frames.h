// file: the stack of open regions of a thread, and the thread state that follows from it
#pragma once

#include "policy/policy_registry.h"
#include "region/region_spec.h"
#include "region/thread_state.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

namespace torch_promote {

// An open region. Its end restores the state of the devices that it names, and the cache mode if it sets one. It does
// not change other devices.
struct Frame {
  const void* owner;
  RegionSpec spec;
  ThreadState before;
  PolicyPtr around; // the policy that its change is applied to; never null
  PolicyPtr policy; // the policy inside; never null once the region is open
  ChangePtr change = nullptr;
  int graph_task = -1; // see PromotionState; looked up only under a promotion rule

  bool names(size_t device) const {
    return spec.devices[device].named;
  }
  // Whether this is an autocast region. A region that names no device (`promotion`, or only a policy) is not one:
  // PyTorch does not count it, and its end frees no casts.
  bool is_autocast() const {
    return std::any_of(spec.devices.begin(), spec.devices.end(), [](auto& device) { return device.named; });
  }
};

// The open regions of this thread, outermost first. Call `put_flags` after each change.
std::vector<Frame>& open_frames();
void put_flags();

// Whether a region writes the slots of the fingerprint: it changes the policy, or it is the outermost region and the
// default policy is not stock's. Call `read_slots_outside` before the first such region is entered.
bool writes_slots(const Frame& frame);
bool any_writes_slots();
void read_slots_outside();

bool sets_cache_mode(const Frame& frame);

// Sets this thread's current policy. `in_slots`: an open region writes the slots, so they are ours.
void put_policy(const PolicyTable* policy, bool in_slots);

// Our key is on if autocast is on for a device, and under overrides, which also apply to regions of torch.autocast
// inside a disabled region of ours. Otherwise it must be off: torch.is_autocast_enabled() counts it among the autocast
// devices.
void put_key(ThreadKeys& keys, const PolicyTable* policy);

// The policy that a region entered now would change: that of the region around it, which PyTorch may have copied here
// from another thread, or the default policy.
PolicyPtr policy_around(const ThreadState& state);

// Recomputes the policies of the frames from `first` on, and returns the innermost one. `before` is the policy that the
// first of them restores (null for none), and `around` the policy that its change is applied to.
const PolicyTable* recompose(std::vector<Frame>& frames, size_t first, const PolicyTable* before, PolicyPtr around);

// Ends the innermost region of the thread, and returns what it was.
Frame end_innermost();
// Decrements PyTorch's count of regions, and frees the caches if the region was the outermost.
void leave_nesting(const Frame& frame);

} // namespace torch_promote
