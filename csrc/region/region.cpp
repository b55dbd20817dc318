// file: enters, leaves and suspends regions, and mirrors them in PyTorch's own autocast state
#include "region/region.h"

#include "policy/process.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <utility>

namespace torch_promote {

// --- The policy in force

namespace {

struct Carried {
  Fingerprint fingerprint{};
  PolicyPtr policy;
};

} // namespace

const PolicyTable& policy_of_carried_state() {
  Fingerprint digits{};
  for (size_t slot = 0; slot < digits.size(); ++slot) {
    digits[slot] = at::autocast::get_autocast_dtype(kSlots[slot]);
    if (digits[0] == kNoFingerprint) {
      return stock_policy_table();
    }
  }
  // An op looks up the policy several times. The pointer also keeps the table alive until this thread runs under
  // another policy.
  Carried& found = of_this_thread<Carried>();
  if (found.policy.get() == nullptr || found.fingerprint != digits) {
    found = {digits, find_policy(digits)};
    if (found.policy.get() == &stock_policy_table()) { // nothing holds the table; it may be made again later
      found = {};
      return stock_policy_table();
    }
  }
  return *found.policy;
}

// --- The open regions of this thread

namespace {

using Slots = std::array<DeviceState, kSlots.size()>;

struct Thread {
  std::vector<Frame> frames; // outermost first
  Slots slots_outside;       // the fingerprint's slots before the first open region that writes them

  ~Thread() {
    tls_policy = nullptr; // which an open region of the thread held
  }
};

Thread& thread() {
  return of_this_thread<Thread>();
}

} // namespace

std::vector<Frame>& open_frames() {
  return thread().frames;
}

namespace {

// Whether a region writes the slots of the fingerprint: it changes the policy, or it is the outermost region and the
// default policy is not stock's. Call `read_slots_outside` before the first such region is entered.
bool writes_slots(const Frame& frame) {
  return frame.change != nullptr || (frame.before.policy == nullptr && frame.around.get() != &stock_policy_table());
}

bool any_writes_slots() {
  return std::any_of(open_frames().begin(), open_frames().end(), writes_slots);
}

bool sets_cache_mode(const Frame& frame) {
  return frame.spec.cache_mode.has_value();
}

void read_slots_outside() {
  for (size_t slot = 0; slot < kSlots.size(); ++slot) {
    thread().slots_outside[slot] = DeviceState::read(kSlots[slot]);
  }
}

// Sets this thread's current policy. `in_slots`: an open region writes the slots, so they are ours.
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
  // The first slot belongs to our own key. Regions set its enabled flag, so only its dtype is written here.
  at::autocast::set_autocast_dtype(kSlots[0], slots[0].dtype);
  for (size_t slot = 1; slot < slots.size(); ++slot) {
    slots[slot].write(kSlots[slot]);
  }
}

// Our key is on if autocast is on for a device, and under overrides, which also apply to regions of torch.autocast
// inside a disabled region of ours. Otherwise it must be off: torch.is_autocast_enabled() counts it among the autocast
// devices.
void put_key(ThreadKeys& keys, const PolicyTable* policy) {
  const bool on = keys.any_enabled() || policy != &stock_policy_table();
  keys.put_ours(on, !on);
}

// The policy that a region entered now would change: that of the region around it, which PyTorch may have copied here
// from another thread, or the default policy.
PolicyPtr policy_around(const ThreadState& state) {
  if (state.policy != nullptr) {
    return hold(*state.policy);
  }
  return state.key_included ? hold(policy_of_carried_state()) : default_policy_table();
}

// Decrements PyTorch's count of regions, and frees the caches if the region was the outermost.
void leave_nesting(const Frame& frame) {
  if (!frame.is_autocast()) {
    return;
  }
  if (at::autocast::decrement_nesting() == 0) {
    end_caches();
  } else if (!tls_region_open) {
    end_casts_beyond_stock();
  }
}

// To be called after each change of the open regions.
void put_flags(const std::vector<Frame>& frames) {
  tls_region_open = std::any_of(frames.begin(), frames.end(), [](const Frame& frame) { return frame.is_autocast(); });
  tls_promotion.graph_task = frames.empty() ? -1 : frames.back().graph_task;
}

void restore(const Frame& frame) {
  ThreadKeys keys = ThreadKeys::read();
  frame.spec.for_each_named([&](size_t i) {
    const auto device = static_cast<Device>(i);
    keys.enable(device, frame.before.devices[i].enabled);
    at::autocast::set_autocast_dtype(device_type_of(device), frame.before.devices[i].dtype);
  });
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

// Ends the innermost region of the thread.
void end_innermost() {
  auto& frames = open_frames();
  const Frame frame = std::move(frames.back());
  frames.pop_back();
  put_flags(frames);
  restore(frame);
  leave_nesting(frame);
}

// Recomputes the policies of the frames from `first` on, and returns the innermost one. `before` is the policy that the
// first of them restores (null for none), and `around` the policy that its change is applied to.
const PolicyTable* recompose(std::vector<Frame>& frames, size_t first, const PolicyTable* before, PolicyPtr around) {
  for (size_t i = first; i < frames.size(); ++i) {
    frames[i].before.policy = before;
    frames[i].policy = compose(around, frames[i].change);
    frames[i].around = std::move(around);
    around = frames[i].policy;
    before = around.get();
  }
  return before;
}

// Ends a region while regions that were opened later are still open.
void end_below(size_t position) {
  auto& frames = open_frames();
  const Frame frame = std::move(frames[position]);
  frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(position));
  put_flags(frames);
  // The state that the ended region would have restored passes to the next region that changes the same state. If there
  // is none, it is restored now. Every region sets the key, and nearly every region sets the cache flag.
  const auto first_above = frames.begin() + static_cast<std::ptrdiff_t>(position);
  frame.spec.for_each_named([&](size_t device) {
    const auto above = std::find_if(first_above, frames.end(), [&](auto& f) { return f.spec.names(device); });
    if (above != frames.end()) {
      above->before.devices[device] = frame.before.devices[device];
    } else {
      frame.before.devices[device].write(device_type_of(static_cast<Device>(device)));
    }
  });
  if (sets_cache_mode(frame)) {
    const auto above = std::find_if(first_above, frames.end(), sets_cache_mode);
    (above != frames.end() ? above->before.cache_mode : tls_cache_mode) = frame.before.cache_mode;
  }
  ThreadState& above = first_above->before;
  above.key_included = frame.before.key_included;
  above.key_excluded = frame.before.key_excluded;
  above.cache_enabled = frame.before.cache_enabled;
  if (!frame.spec.keeps_cache && std::all_of(first_above, frames.end(), [](auto& f) { return f.spec.keeps_cache; })) {
    at::autocast::set_autocast_cache_enabled(frame.before.cache_enabled);
  }
  if (frame.is_autocast()) {
    std::for_each(first_above, frames.end(), [](Frame& f) { --f.before.nesting; });
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

void enter_region(const void* owner, const RegionSpec& unpacked) {
  ThreadKeys keys = ThreadKeys::read();
  Frame frame{owner, unpacked, ThreadState::read(keys), {}, {}};
  // Not `unpacked`: the casts that are dropped below may run Python, in this thread or in another one, and the next
  // region that Python enters is unpacked to the same place.
  const RegionSpec& spec = frame.spec;
  frame.around = policy_around(frame.before);
  frame.change = find_change(spec.change);
  frame.policy = compose(frame.around, frame.change);
  // What is above may throw; nothing below does.
  const PolicyTable* policy = frame.policy.get();
  if (writes_slots(frame) && !any_writes_slots()) {
    read_slots_outside();
  }
  auto& frames = open_frames();
  frames.push_back(frame);
  // Later, the reference may be invalid: dropping casts may run Python, which may open regions.
  Frame& entered = frames.back();
  if (policy->promotion.rule != nullptr) {
    entered.graph_task = torch::autograd::get_current_graph_task_id();
  }
  const int nesting = frame.is_autocast() ? at::autocast::increment_nesting() - 1 : nesting_depth();
  entered.before.nesting = nesting;
  if (nesting == 0) {
    end_casts_of_thread(); // if the end of PyTorch's last region went unnoticed, because C++ ended it
  }
  put_flags(frames);

  spec.for_each_named([&](size_t i) {
    const DeviceState& wanted = spec.devices[i];
    const auto device = static_cast<Device>(i);
    keys.enable(device, wanted.enabled);
    if (wanted.dtype != frame.before.devices[i].dtype) {
      at::autocast::set_autocast_dtype(device_type_of(device), wanted.dtype);
    }
  });
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
  auto& frames = open_frames();
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
  if (frames.back().owner == owner) {
    end_innermost();
  } else {
    end_below(static_cast<size_t>(frames.rend() - std::find_if(frames.rbegin(), frames.rend(), mine)) - 1);
  }
  return true;
}

const void* innermost_promotion_region() {
  const auto& frames = open_frames();
  const auto frame = std::find_if(frames.rbegin(), frames.rend(), [](const Frame& f) {
    return f.change != nullptr && f.change->change.promotion.has_value();
  });
  return frame == frames.rend() ? nullptr : frame->owner;
}

// Also suspends and resumes regions of torch.autocast that the body opened inside ours: the devices' state and the
// nesting depth reveal them.
std::shared_ptr<Suspended> suspend(size_t base) {
  auto& frames = open_frames();
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
  for (size_t device = 0; device < kNumDevices; ++device) {
    around.devices[device].write(device_type_of(static_cast<Device>(device)));
  }
  if (outermost) {
    end_caches(); // only regions of PyTorch were open
  }
  return result;
}

void resume(const Suspended& regions) {
  if (regions.frames.empty()) {
    return;
  }
  // A region restores at its end the state that it found on entry. A resumed region has to restore the present state.
  const ThreadState around = ThreadState::read();
  const ThreadState& found = regions.frames.front().before;
  const ThreadState& inside = regions.inside;
  std::vector<Frame> resumed = regions.frames;
  resumed.front().before = around;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const auto first =
        std::find_if(resumed.begin(), resumed.end(), [device](const Frame& f) { return f.spec.names(device); });
    if (first != resumed.end()) {
      first->before.devices[device] = around.devices[device];
    }
    // A device that the body did not change keeps its current state.
    if (first != resumed.end() || !(inside.devices[device] == found.devices[device])) {
      inside.devices[device].write(device_type_of(static_cast<Device>(device)));
    }
  }
  if (const auto first = std::find_if(resumed.begin(), resumed.end(), sets_cache_mode); first != resumed.end()) {
    first->before.cache_mode = around.cache_mode;
    tls_cache_mode = inside.cache_mode;
  }
  const PolicyTable* policy = recompose(resumed, 0, around.policy, policy_around(around));
  const bool changes_policy = std::any_of(resumed.begin(), resumed.end(), writes_slots);
  if (changes_policy && !any_writes_slots()) {
    read_slots_outside();
  }
  open_frames().insert(open_frames().end(), resumed.begin(), resumed.end());
  put_flags(open_frames());
  for (int opened = found.nesting; opened < inside.nesting; ++opened) {
    at::autocast::increment_nesting();
  }
  if (regions.casts != nullptr) {
    put_casts(*regions.casts);
  }
  ThreadKeys keys = ThreadKeys::read();
  keys.put_ours(inside.key_included, inside.key_excluded);
  keys.write();
  at::autocast::set_autocast_cache_enabled(inside.cache_enabled);
  if (changes_policy) {
    put_policy(policy, /*in_slots=*/true);
  } else {
    tls_policy = policy;
  }
}

// --- The packed form of a region's settings

namespace {

constexpr unsigned kBitsPerDevice = 8;
constexpr uint64_t kDtypeMask = 0x3F;
constexpr unsigned kNamedBit = 6;
constexpr unsigned kEnabledBit = 7;
constexpr unsigned kCacheBit = 32;
constexpr unsigned kCacheModeShift = 33;
constexpr unsigned kKeepsCacheBit = 35;
constexpr unsigned kChangeShift = 40;

static_assert(static_cast<uint64_t>(c10::ScalarType::NumOptions) <= kDtypeMask);
static_assert(kBitsPerDevice * kNumDevices <= kCacheBit);

} // namespace

RegionSpec RegionSpec::unpack(uint64_t packed) {
  RegionSpec spec;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const uint64_t field = packed >> (kBitsPerDevice * device);
    if ((field >> kNamedBit & 1) != 0) {
      spec.put(device, {(field >> kEnabledBit & 1) != 0, static_cast<c10::ScalarType>(field & kDtypeMask)});
    }
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
  for_each_named([&](size_t device) {
    const DeviceState& wanted = devices[device];
    const uint64_t field = static_cast<uint64_t>(wanted.dtype) | (1U << kNamedBit) |
                           (static_cast<uint64_t>(wanted.enabled) << kEnabledBit);
    packed |= field << (kBitsPerDevice * device);
  });
  return packed;
}

} // namespace torch_promote
