// file: suspends the regions of a coroutine between its steps
#include "region/region.h"

#include "cache/thread_casts.h"
#include "policy/torch_declarations.h"
#include "region/frames.h"

#include <algorithm>
#include <utility>

namespace torch_promote {

namespace {

void write_devices(const ThreadState& state) {
  for (size_t device = 0; device < kNumDevices; ++device) {
    state.devices[device].write(device_type_of(static_cast<Device>(device)));
  }
}

struct EndsRegions {
  size_t base;

  void now() const {
    while (open_frames().size() > base) {
      end_innermost();
    }
  }
  ~EndsRegions() noexcept(false) { // see WithoutGil
    now();
  }
};

} // namespace

struct Suspended {
  std::vector<Frame> frames;             // outermost first
  ThreadState inside;                    // the thread's state in the innermost frame at suspension
  std::shared_ptr<CastSet> casts; // null unless no autocast region was around them
};

// Also suspends and resumes regions of torch.autocast that the body opened inside ours: the devices' state and the
// nesting depth reveal them.
std::shared_ptr<Suspended> suspend(size_t base) {
  auto& frames = open_frames();
  auto result = std::make_shared<Suspended>();
  if (frames.size() <= base) {
    return result;
  }
  EndsRegions ends{base}; // also if there is no memory for the rest
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
  ends.now();
  write_devices(around);
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
  for (size_t device = 0; device < kNumDevices; ++device) {
    const auto first =
        std::find_if(resumed.begin(), resumed.end(), [device](const Frame& f) { return f.names(device); });
    if (first != resumed.end()) {
      first->before.devices[device] = around.devices[device];
    }
    // A device that the body did not change keeps its current state.
    if (first != resumed.end() || !(inside.devices[device] == found.devices[device])) {
      inside.devices[device].write(device_type_of(static_cast<Device>(device)));
    }
  }
  // The next `suspend` also reads the state of devices that a frame does not name.
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
  open_frames().insert(open_frames().end(), resumed.begin(), resumed.end());
  put_flags();
  for (int opened = found.nesting; opened < inside.nesting; ++opened) {
    at::autocast::increment_nesting();
  }
  if (regions.casts != nullptr) {
    put_casts(*regions.casts);
  }
  inside.write_key();
  at::autocast::set_autocast_cache_enabled(inside.cache_enabled);
  if (changes_policy) {
    put_policy(policy, /*in_slots=*/true);
  } else {
    tls_policy = policy;
  }
}

} // namespace torch_promote
