// file: the open regions of a thread, and the thread state that follows from them
#pragma once

#include "cache/cache_mode.h"
#include "cache/thread_casts.h"
#include "policy/dispatch_key.h"
#include "policy/policy_registry.h"
#include "policy/torch_declarations.h"
#include "region/current_policy.h"
#include "region/region_spec.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace torch_promote {

// PyTorch's autocast state of one device type.
struct DeviceState {
  bool enabled;
  c10::ScalarType dtype;

  static DeviceState read(c10::DeviceType type) {
    return {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
  }
  void write(c10::DeviceType type) const {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
  }
  bool operator==(const DeviceState& other) const {
    return enabled == other.enabled && dtype == other.dtype;
  }
};

// The included and excluded dispatch keys of this thread, read and written once, because PyTorch's own functions look
// up the thread's state for every key. Autocast is on for a device if its key is not excluded.
class ThreadKeys {
 public:
  static ThreadKeys read() {
    return ThreadKeys(c10::impl::tls_local_dispatch_key_set());
  }
  void write() const {
    c10::impl::_force_tls_local_dispatch_key_set(keys_);
  }
  bool enabled(Device device) const {
    return !keys_.excluded_.has(stock_key_of(device));
  }
  bool ours_included() const {
    return keys_.included_.has(kAutocastKey);
  }
  bool ours_excluded() const {
    return keys_.excluded_.has(kAutocastKey);
  }
  void enable(Device device, bool enabled) {
    set(keys_.excluded_, stock_key_of(device), !enabled);
  }
  void put_ours(bool included, bool excluded) {
    set(keys_.included_, kAutocastKey, included);
    set(keys_.excluded_, kAutocastKey, excluded);
  }

 private:
  explicit ThreadKeys(c10::impl::LocalDispatchKeySet keys) : keys_(keys) {}
  static void set(c10::DispatchKeySet& keys, c10::DispatchKey key, bool on) {
    keys = on ? keys.add(key) : keys.remove(key);
  }

  c10::impl::LocalDispatchKeySet keys_;
};

// The thread state that every region changes.
struct ThreadState {
  std::array<DeviceState, kNumDevices> devices;
  bool key_included;
  bool key_excluded;
  bool cache_enabled;
  CacheMode cache_mode;
  int nesting; // PyTorch's count of the autocast regions that are open in this thread, stock's and ours
  const PolicyTable* policy;

  // Reads everything except the nesting, which has no getter.
  static ThreadState read(const ThreadKeys& keys) {
    ThreadState state{};
    for (size_t i = 0; i < kNumDevices; ++i) {
      const auto device = static_cast<Device>(i);
      state.devices[i] = {keys.enabled(device), at::autocast::get_autocast_dtype(device_type_of(device))};
    }
    state.key_included = keys.ours_included();
    state.key_excluded = keys.ours_excluded();
    state.cache_enabled = at::autocast::is_autocast_cache_enabled();
    state.cache_mode = tls_cache_mode;
    state.policy = tls_policy;
    return state;
  }
  static ThreadState read() {
    ThreadState state = read(ThreadKeys::read());
    state.nesting = nesting_depth();
    return state;
  }
  void write_key() const {
    ThreadKeys keys = ThreadKeys::read();
    keys.put_ours(key_included, key_excluded);
    keys.write();
  }
};

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

// The owner of regions that a traced graph opens. If an op of the graph raises, the graph does not end them. They then
// end with the region around them.
constexpr const void* kGraphOwner = nullptr;

// Opens a region in this thread. `owner` identifies the object that opens it; it is compared, never dereferenced.
void enter_region(const void* owner, const RegionSpec& spec);

// Ends the innermost open region of `owner` in this thread, and returns it. Returns nullopt, and changes nothing, if
// there is none. Regions that were opened later stay open, and the state afterwards is what they and the regions around
// ask for.
std::optional<Frame> exit_region(const void* owner);

// The owner of the innermost open region of `promotion` in this thread, or null.
const void* innermost_promotion_region();

// The number of open regions in this thread.
size_t depth();

// A step of a coroutine may end inside its regions. `suspend` removes the regions above `base` from this thread and
// restores the state around them; `resume` enters them again, on top of the thread's state at that time.
struct Suspended;
std::shared_ptr<Suspended> suspend(size_t base);
void resume(const Suspended& regions);

} // namespace torch_promote
