// file: the stack of open regions of a thread, and the thread state that follows from it
#include "region/frames.h"

#include "cache/thread_casts.h"
#include "policy/fingerprint.h"
#include "policy/of_this_thread.h"
#include "policy/torch_declarations.h"
#include "region/current_policy.h"
#include "region/promotion_state.h"

#include <array>
#include <utility>

namespace torch_promote {

namespace {

using Slots = std::array<DeviceState, kSlots.size()>;

struct Thread {
  std::vector<Frame> frames; // outermost first
  Slots slots_outside;       // the fingerprint's slots before the first open region that writes them

  Thread() = default;
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  ~Thread() {
    tls_policy = nullptr; // which an open region of the thread held
  }
};

Thread& thread() {
  return of_this_thread<Thread>();
}

// The first slot belongs to our own key. Regions set its enabled flag, so only its dtype is written here.
void write_slots(const Slots& slots) {
  at::autocast::set_autocast_dtype(kSlots[0], slots[0].dtype);
  for (size_t slot = 1; slot < slots.size(); ++slot) {
    slots[slot].write(kSlots[slot]);
  }
}

} // namespace

std::vector<Frame>& open_frames() {
  return thread().frames;
}

bool writes_slots(const Frame& frame) {
  return frame.change != nullptr || (frame.before.policy == nullptr && frame.around.get() != &stock_policy_table());
}

bool sets_cache_mode(const Frame& frame) {
  return frame.spec.cache_mode.has_value();
}

bool any_writes_slots() {
  const auto& frames = open_frames();
  return std::any_of(frames.begin(), frames.end(), writes_slots);
}

void read_slots_outside() {
  for (size_t slot = 0; slot < kSlots.size(); ++slot) {
    thread().slots_outside[slot] = DeviceState::read(kSlots[slot]);
  }
}

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

void put_key(ThreadKeys& keys, const PolicyTable* policy) {
  const bool on = keys.enabled(Device::cpu) || keys.enabled(Device::cuda) || policy != &stock_policy_table();
  keys.put_ours(on, !on);
}

PolicyPtr policy_around(const ThreadState& state) {
  if (state.policy != nullptr) {
    return hold(*state.policy);
  }
  return state.key_included ? hold(policy_of_carried_state()) : default_policy_table();
}

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

void put_flags() {
  const auto& frames = open_frames();
  tls_region_open = false;
  tls_notes_calls = frames.empty();
  for (const Frame& frame : frames) {
    tls_region_open |= frame.is_autocast();
    tls_notes_calls |= frame.change != nullptr && frame.change->called != nullptr;
  }
  tls_promotion.graph_task = frames.empty() ? -1 : frames.back().graph_task;
}

namespace {

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

} // namespace

Frame end_innermost() {
  Frame frame = std::move(open_frames().back());
  open_frames().pop_back();
  put_flags();
  restore(frame);
  leave_nesting(frame);
  return frame;
}

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

} // namespace torch_promote
