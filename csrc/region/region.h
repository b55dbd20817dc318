// file: the open regions of a thread, and the thread state that follows from them
#pragma once

#include "cache/thread_casts.h"
#include "policy/dispatch_state.h"
#include "policy/policy_registry.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch_promote {

// The table in force in this thread.
inline constinit thread_local const PolicyTable* tls_policy = nullptr; // held by an open region of the thread
const PolicyTable& policy_of_carried_state();

inline const PolicyTable& current_policy() {
  // If it is null while the autocast key is on, this thread opened no region, and PyTorch copied the dispatch state to
  // it (an autograd device thread, at::launch). See NOTE [ Policy fingerprint ].
  return tls_policy != nullptr ? *tls_policy : policy_of_carried_state();
}

// The integral tensors that a call was given, by their storages, so that views of them count.
using Integers = std::vector<const void*>;
inline const Integers kNoIntegers;

// A rule does not act on the ops that a promoting op calls, nor on backward formulas. Of the ops that a composite op
// calls, it acts on some; see NOTE [ Composite calls ].
struct PromotionState {
  // The rule acts only on calls that take one of these tensors: on none inside a promoting op and in our Python hooks.
  // Null: it acts on all calls.
  const Integers* only = nullptr;
  // The backward in which the innermost region was entered, -1 for none. The rule acts in that backward, because
  // checkpointing enters regions in a backward to run a forward again. It does not act in backwards that start inside
  // the region.
  int graph_task = -1;
};

inline constinit thread_local PromotionState tls_promotion;

// The autocast state of one device type, PyTorch's or what a region asks for.
struct DeviceState {
  bool enabled = false;
  c10::ScalarType dtype = c10::ScalarType::Undefined;

  static DeviceState read(c10::DeviceType type) {
    return {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
  }
  void write(c10::DeviceType type) const {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
  }
  bool operator==(const DeviceState& other) const = default;
};

// The settings of a region. Python and torch.compile hold them packed into 64 bits, as a constant;
// torch_promote/extension.py packs and unpacks the same bits:
//   bits 0..5 dtype, 6 named, 7 enabled for cpu; 8..15, 16..23, 24..31 the same for cuda, xpu, mps; 32 cache_enabled;
//   33..34 cache mode: 0 not given, else 1 + CacheMode; 35 keeps_cache; 40..63 change.
struct RegionSpec {
  std::array<DeviceState, kNumDevices> devices;
  uint8_t named = 0; // the devices that the region sets, a bit for each
  bool cache_enabled = true;
  bool keeps_cache = false;            // leaves the cache flag as it is
  std::optional<CacheMode> cache_mode; // nullopt: keeps that of the region around it
  uint32_t change = 0;                 // the policy change's number in the registry

  void put(size_t device, DeviceState wanted) {
    devices[device] = wanted;
    named |= static_cast<uint8_t>(1U << device);
  }
  bool names(size_t device) const {
    return (named >> device & 1) != 0;
  }
  // Calls a function with the index of each device that the region sets.
  template <class Function>
  void for_each_named(const Function& function) const {
    for (unsigned rest = named; rest != 0; rest &= rest - 1) {
      function(static_cast<size_t>(std::countr_zero(rest)));
    }
  }

  static RegionSpec unpack(uint64_t packed);
  uint64_t pack() const;
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
  bool any_enabled() const {
    return !keys_.excluded_.has_all(kStockKeys);
  }
  bool enabled(Device device) const {
    return !keys_.excluded_.has_all(stock_key_of(device));
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
    set(keys_.included_, c10::DispatchKeySet(kAutocastKey), included);
    set(keys_.excluded_, c10::DispatchKeySet(kAutocastKey), excluded);
  }

 private:
  explicit ThreadKeys(c10::impl::LocalDispatchKeySet keys) : keys_(keys) {}
  static void set(c10::DispatchKeySet& keys, c10::DispatchKeySet key, bool on) {
    keys = on ? keys | key : keys - key;
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

  // Whether this is an autocast region. A region that names no device (`promotion`, or only a policy) is not one:
  // PyTorch does not count it, and its end frees no casts.
  bool is_autocast() const {
    return spec.named != 0;
  }
};

// The open regions of this thread, outermost first.
std::vector<Frame>& open_frames();

// The owner of regions that a traced graph opens. If an op of the graph raises, the graph does not end them. They then
// end with the region around them.
constexpr const void* kGraphOwner = nullptr;

// Opens a region in this thread. `owner` identifies the object that opens it; it is compared, never dereferenced.
void enter_region(const void* owner, const RegionSpec& spec);

// Ends the innermost open region of `owner` in this thread. Returns false, and changes nothing, if there is none.
// Regions that were opened later stay open, and the state afterwards is what they and the regions around ask for.
bool exit_region(const void* owner);

// The owner of the innermost open region of `promotion` in this thread, or null.
const void* innermost_promotion_region();

// A step of a coroutine may end inside its regions. `suspend` removes the regions above `base` from this thread and
// restores the state around them; `resume` enters them again, on top of the thread's state at that time.
struct Suspended {
  std::vector<Frame> frames;      // outermost first
  ThreadState inside;             // the thread's state in the innermost frame at suspension
  std::shared_ptr<CastSet> casts; // null unless no autocast region was around them
};
std::shared_ptr<Suspended> suspend(size_t base);
void resume(const Suspended& regions);

} // namespace torch_promote
