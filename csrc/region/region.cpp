// file: enters and leaves regions, and mirrors them in PyTorch's own autocast state
#include "region/region.h"

#include "cache/thread_casts.h"
#include "policy/torch_declarations.h"
#include "region/current_policy.h"
#include "region/frames.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace torch_promote {

namespace {

// Ends a region while regions that were opened later are still open.
Frame end_below(size_t position) {
  auto& frames = open_frames();
  Frame frame = std::move(frames[position]);
  frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(position));
  put_flags();
  // The state that the ended region would have restored passes to the next region that changes the same state. If there
  // is none, it is restored now. Every region sets the key, and nearly every region sets the cache flag.
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
  return frame;
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
  open_frames().push_back(frame);
  // Later, the reference may be invalid: dropping casts may run Python, which may open regions.
  Frame& entered = open_frames().back();
  if (policy->promotion.rule != nullptr) {
    entered.graph_task = torch::autograd::get_current_graph_task_id();
  }
  const int nesting = frame.is_autocast() ? at::autocast::increment_nesting() - 1 : nesting_depth();
  entered.before.nesting = nesting;
  if (nesting == 0) {
    end_casts_of_thread(); // if the end of PyTorch's last region went unnoticed, because C++ ended it
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

std::optional<Frame> exit_region(const void* owner) {
  auto& frames = open_frames();
  if (!frames.empty() && frames.back().owner == owner) { // the usual case
    return end_innermost();
  }
  const auto mine = [owner](const Frame& frame) { return frame.owner == owner; };
  if (std::none_of(frames.begin(), frames.end(), mine)) {
    return std::nullopt;
  }
  while (owner != kGraphOwner && frames.back().owner == kGraphOwner) {
    end_innermost();
  }
  const auto from_top = std::find_if(frames.rbegin(), frames.rend(), mine);
  return from_top == frames.rbegin() ? end_innermost() : end_below(static_cast<size_t>(frames.rend() - from_top) - 1);
}

const void* innermost_promotion_region() {
  const auto& frames = open_frames();
  const auto frame = std::find_if(frames.rbegin(), frames.rend(), [](const Frame& f) {
    return f.change != nullptr && f.change->change.promotion.has_value();
  });
  return frame == frames.rend() ? nullptr : frame->owner;
}

size_t depth() {
  return open_frames().size();
}

} // namespace torch_promote
