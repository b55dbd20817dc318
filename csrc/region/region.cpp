// file: enters and leaves regions, and mirrors them in PyTorch's own autocast state
#include "region/region.h"

#include "cache/stock_cache.h"
#include "cache/thread_cache.h"
#include "policy/torch_declarations.h"
#include "region/current_policy.h"
#include "region/promotion_state.h"
#include "region/thread_state.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <utility>
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

namespace {

using Slots = std::array<DeviceState, kSlots.size()>;

struct Thread {
  std::vector<Frame> frames; // outermost first
  Slots slots_outside;       // the fingerprint's slots before the first open region that writes them
};

Thread& thread() {
  static thread_local Thread instance;
  return instance;
}

// Whether a region changes the policy, or is the outermost under a default policy that is not stock's.
bool writes_slots(const Frame& frame) {
  return frame.spec.change != 0 || (frame.before.policy == nullptr && frame.around.get() != &stock_policy_table());
}

bool sets_cache_mode(const Frame& frame) {
  return frame.spec.cache_mode.has_value();
}

bool any_writes_slots() {
  const auto& frames = thread().frames;
  return std::any_of(frames.begin(), frames.end(), writes_slots);
}

void read_slots_outside() {
  for (size_t slot = 0; slot < kSlots.size(); ++slot) {
    thread().slots_outside[slot] = DeviceState::read(kSlots[slot]);
  }
}

// The first slot is that of our own key: regions set its enabled flag, so that only its dtype is written here.
void write_slots(const Slots& slots) {
  at::autocast::set_autocast_dtype(kSlots[0], slots[0].dtype);
  for (size_t slot = 1; slot < slots.size(); ++slot) {
    slots[slot].write(kSlots[slot]);
  }
}

// Makes a policy the one in force in this thread. `in_slots`: an open region writes the slots, so they are ours.
void put_policy(const PolicyTable* policy, bool in_slots) {
  tls_policy = policy;
  Slots slots = thread().slots_outside;
  if (in_slots) {
    if (policy == &stock_policy_table()) { // overrides that restore stock's policy
      slots[0].dtype = kNoFingerprint;
    } else {
      for (size_t slot = 0; slot < slots.size(); ++slot) {
        slots[slot] = {true, policy->fingerprint[slot]};
      }
    }
  }
  write_slots(slots);
}

// Our key is on where a device's autocast is, and under overrides, which also apply to regions of torch.autocast inside
// a disabled region of ours. Otherwise it is off: PyTorch counts it among the autocast devices when it asks whether any
// is enabled.
void put_key(ThreadKeys& keys, const PolicyTable* policy) {
  const bool on = keys.enabled(Device::cpu) || keys.enabled(Device::cuda) || policy != &stock_policy_table();
  keys.put_ours(on, !on);
  tls_stock_may_have_cast |= !on || keys.enabled(Device::cuda);
}

// The policy that a region entered now changes: that of the region around it, which PyTorch may have carried here from
// another thread, or else the default.
PolicyPtr policy_around(const ThreadState& state) {
  if (state.policy != nullptr) {
    return PolicyPtr(state.policy);
  }
  return state.key_included ? PolicyPtr(&policy_of_carried_state()) : default_policy_table();
}

void write_devices(const ThreadState& state) {
  for (size_t device = 0; device < kNumDevices; ++device) {
    state.devices[device].write(device_type_of(static_cast<Device>(device)));
  }
}

void restore(const Frame& frame) {
  ThreadKeys keys = ThreadKeys::read();
  for (size_t i = 0; i < kNumDevices; ++i) {
    if (frame.names(i)) {
      const auto device = static_cast<Device>(i);
      keys.enable(device, frame.before.devices[i].enabled);
      at::autocast::set_autocast_dtype(device_type_of(device), frame.before.devices[i].dtype);
    }
  }
  keys.put_ours(frame.before.key_included, frame.before.key_excluded);
  keys.write();
  at::autocast::set_autocast_cache_enabled(frame.before.cache_enabled);
  if (sets_cache_mode(frame)) {
    tls_cache_mode = frame.before.cache_mode;
  }
  if (writes_slots(frame)) {
    put_policy(frame.before.policy, any_writes_slots());
  } else {
    tls_policy = frame.before.policy;
  }
}

// As in stock, caches live as long as the outermost region of the thread, ours or PyTorch's.
void end_caches() {
  end_cast_cache();
  clear_stock_cache();
}

void leave_nesting(const Frame& frame) {
  if (!frame.is_autocast()) {
    return;
  }
  if (at::autocast::decrement_nesting() == 0) {
    end_caches();
  } else if (!tls_region_open) {
    end_cast_cache_of_regions();
  }
}

// Call it whenever the frames have changed.
void put_flags() {
  const auto& frames = thread().frames;
  tls_region_open = false;
  for (const Frame& frame : frames) {
    tls_region_open |= frame.is_autocast();
  }
  tls_promotion.graph_task = frames.empty() ? -1 : frames.back().graph_task;
}

void end_innermost() {
  const Frame frame = std::move(thread().frames.back());
  thread().frames.pop_back();
  put_flags();
  restore(frame);
  leave_nesting(frame);
}

// Composes the policies of the frames from `first` on anew, and returns the innermost one. `before` is the policy that
// the first of them restores, null for none, and `around` the one that its change is applied to.
const PolicyTable* recompose(std::vector<Frame>& frames, size_t first, const PolicyTable* before, PolicyPtr around) {
  for (size_t i = first; i < frames.size(); ++i) {
    frames[i].before.policy = before;
    if (touch_change(frames[i].spec.change)) { // otherwise the region keeps the table that it has
      frames[i].policy = compose(around.get(), frames[i].spec.change);
    }
    frames[i].around = std::move(around);
    around = frames[i].policy;
    before = around.get();
  }
  return before;
}

// Ends a region while others, opened later, are still open.
void end_below(size_t position) {
  auto& frames = thread().frames;
  const Frame frame = std::move(frames[position]);
  frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(position));
  put_flags();
  // The next region that changes the same state takes over what the ended one would have restored; if there is none, it
  // is restored now. Every region sets the key, and nearly every one the cache flag.
  for (size_t device = 0; device < kNumDevices; ++device) {
    if (!frame.names(device)) {
      continue;
    }
    const auto above = std::find_if(
        frames.begin() + static_cast<std::ptrdiff_t>(position), frames.end(), [&](auto& f) { return f.names(device); });
    if (above != frames.end()) {
      above->before.devices[device] = frame.before.devices[device];
    } else {
      frame.before.devices[device].write(device_type_of(static_cast<Device>(device)));
    }
  }
  if (sets_cache_mode(frame)) {
    const auto above =
        std::find_if(frames.begin() + static_cast<std::ptrdiff_t>(position), frames.end(), sets_cache_mode);
    (above != frames.end() ? above->before.cache_mode : tls_cache_mode) = frame.before.cache_mode;
  }
  ThreadState& above = frames[position].before;
  above.key_included = frame.before.key_included;
  above.key_excluded = frame.before.key_excluded;
  above.cache_enabled = frame.before.cache_enabled;
  const bool none_sets_cache = std::all_of(
      frames.begin() + static_cast<std::ptrdiff_t>(position), frames.end(), [](auto& f) { return f.spec.keeps_cache; });
  if (none_sets_cache && !frame.spec.keeps_cache) {
    at::autocast::set_autocast_cache_enabled(frame.before.cache_enabled);
  }
  if (frame.is_autocast()) {
    std::for_each(
        frames.begin() + static_cast<std::ptrdiff_t>(position), frames.end(), [](Frame& f) { --f.before.nesting; });
  }
  const PolicyTable* policy = recompose(frames, position, frame.before.policy, frame.around);
  if (writes_slots(frame)) {
    put_policy(policy, any_writes_slots());
  }
  ThreadKeys keys = ThreadKeys::read();
  put_key(keys, policy);
  keys.write();
  leave_nesting(frame);
}

} // namespace

void enter_region(const void* owner, const RegionSpec& spec) {
  ThreadKeys keys = ThreadKeys::read();
  Frame frame{owner, spec, ThreadState::read(keys), {}, {}};
  frame.around = policy_around(frame.before);
  frame.policy = compose(frame.around.get(), spec.change); // may throw; nothing below does
  const PolicyTable* policy = frame.policy.get();
  if (writes_slots(frame) && !any_writes_slots()) {
    read_slots_outside();
  }
  thread().frames.push_back(frame);
  Frame& entered = thread().frames.back();
  if (policy->promotion.rule != nullptr) {
    entered.graph_task = torch::autograd::get_current_graph_task_id();
  }
  entered.before.nesting = frame.is_autocast() ? at::autocast::increment_nesting() - 1 : nesting_depth();
  if (entered.before.nesting == 0) {
    end_cast_cache(); // what could not be freed under PyTorch's lock
  } else if (!tls_region_open) {
    drop_casts_if_a_clear_was_missed();
  }
  put_flags();

  for (size_t i = 0; i < kNumDevices; ++i) {
    const RegionSpec::PerDevice& wanted = spec.devices[i];
    if (wanted.named) {
      const auto device = static_cast<Device>(i);
      keys.enable(device, wanted.enabled);
      if (wanted.dtype != frame.before.devices[i].dtype) {
        at::autocast::set_autocast_dtype(device_type_of(device), wanted.dtype);
      }
    }
  }
  put_key(keys, policy);
  keys.write();
  if (!spec.keeps_cache && spec.cache_enabled != frame.before.cache_enabled) {
    at::autocast::set_autocast_cache_enabled(spec.cache_enabled);
  }
  if (spec.cache_mode.has_value()) {
    tls_cache_mode = *spec.cache_mode;
  }
  if (writes_slots(frame)) {
    put_policy(policy, /*in_slots=*/true);
  } else {
    tls_policy = policy;
  }
}

bool exit_region(const void* owner) {
  auto& frames = thread().frames;
  if (!frames.empty() && frames.back().owner == owner) { // the usual case
    end_innermost();
    return true;
  }
  const auto mine = [owner](const Frame& frame) { return frame.owner == owner; };
  if (std::none_of(frames.begin(), frames.end(), mine)) {
    return false;
  }
  while (owner != kGraphOwner && frames.back().owner == kGraphOwner) {
    end_innermost();
  }
  const auto from_top = std::find_if(frames.rbegin(), frames.rend(), mine);
  if (from_top == frames.rbegin()) {
    end_innermost();
  } else {
    end_below(static_cast<size_t>(frames.rend() - from_top) - 1);
  }
  return true;
}

const void* innermost_promotion_region() {
  const auto& frames = thread().frames;
  const auto frame =
      std::find_if(frames.rbegin(), frames.rend(), [](const Frame& f) { return sets_promotion(f.spec.change); });
  return frame == frames.rend() ? nullptr : frame->owner;
}

size_t depth() {
  return thread().frames.size();
}

struct Suspended {
  std::vector<Frame> frames;             // outermost first
  ThreadState inside;                    // the state in the innermost of them when they were suspended
  std::shared_ptr<CastsOfRegions> casts; // null unless no autocast region was around them
};

// Regions of torch.autocast that the body opened inside ours are suspended and resumed too: the devices' state and the
// nesting depth show them.
std::shared_ptr<Suspended> suspend(size_t base) {
  auto& frames = thread().frames;
  auto result = std::make_shared<Suspended>();
  if (frames.size() <= base) {
    return result;
  }
  result->inside = ThreadState::read();
  result->frames.assign(frames.begin() + static_cast<std::ptrdiff_t>(base), frames.end());
  const ThreadState& around = result->frames.front().before;
  const auto ours = static_cast<int>(
      std::count_if(result->frames.begin(), result->frames.end(), [](auto& frame) { return frame.is_autocast(); }));
  const bool outermost = around.nesting == 0 && result->inside.nesting > 0;
  if (outermost) {
    result->casts = take_casts();
  }
  for (int nesting = result->inside.nesting; nesting > around.nesting + ours; --nesting) {
    at::autocast::decrement_nesting();
  }
  while (frames.size() > base) {
    end_innermost();
  }
  write_devices(around);
  if (outermost) {
    end_caches(); // where only regions of PyTorch were open
  }
  return result;
}

void resume(const Suspended& regions) {
  if (regions.frames.empty()) {
    return;
  }
  // At its end a region restores the state that it found. Resumed, it finds the state of now.
  const ThreadState around = ThreadState::read();
  const ThreadState& found = regions.frames.front().before;
  const ThreadState& inside = regions.inside;
  std::vector<Frame> resumed = regions.frames;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const auto first =
        std::find_if(resumed.begin(), resumed.end(), [device](const Frame& f) { return f.names(device); });
    if (first != resumed.end()) {
      first->before.devices[device] = around.devices[device];
    }
    // A device that the body did not change keeps its present state.
    if (first != resumed.end() || !(inside.devices[device] == found.devices[device])) {
      inside.devices[device].write(device_type_of(static_cast<Device>(device)));
    }
  }
  // The next `suspend` reads the state of devices that a frame does not name, too.
  for (size_t device = 0; device < kNumDevices; ++device) {
    resumed.front().before.devices[device] = around.devices[device];
  }
  if (const auto first = std::find_if(resumed.begin(), resumed.end(), sets_cache_mode); first != resumed.end()) {
    first->before.cache_mode = around.cache_mode;
    tls_cache_mode = inside.cache_mode;
  }
  resumed.front().before.key_included = around.key_included;
  resumed.front().before.key_excluded = around.key_excluded;
  resumed.front().before.cache_enabled = around.cache_enabled;
  resumed.front().before.nesting = around.nesting;
  const PolicyTable* policy = recompose(resumed, 0, around.policy, policy_around(around));
  const bool changes_policy = std::any_of(resumed.begin(), resumed.end(), writes_slots);
  if (changes_policy && !any_writes_slots()) {
    read_slots_outside();
  }
  thread().frames.insert(thread().frames.end(), resumed.begin(), resumed.end());
  put_flags();
  for (int opened = found.nesting; opened < inside.nesting; ++opened) {
    at::autocast::increment_nesting();
  }
  if (regions.casts != nullptr) {
    put_casts(*regions.casts);
  }
  inside.write_key();
  tls_stock_may_have_cast = true; // PyTorch's kernels may have been on in some of them
  at::autocast::set_autocast_cache_enabled(inside.cache_enabled);
  if (changes_policy) {
    put_policy(policy, /*in_slots=*/true);
  } else {
    tls_policy = policy;
  }
}

} // namespace torch_promote
