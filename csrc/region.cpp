// file: entering and leaving regions, with PyTorch's own autocast state as the mirror
#include "region.h"

#include "cast_cache.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace torch_promote {

namespace {

// NOTE [ Policy fingerprint ]
// torch.compile guards on the enabled flag and dtype of every Autocast device, AOTAutograd's cache keys on the dtypes
// of the enabled ones, and PyTorch carries the dispatch keys and these dtypes to its autograd threads. None of them
// knows our policy table. So a region whose policy differs from stock's writes a hash of the table into the slots of
// device types that this library does not serve and that have no tensors here: a function compiled under one policy is
// then not reused under another, and an autograd thread finds the table again. Under the stock policy the slots keep
// their values, and our key alone tells our regions from stock's.
constexpr c10::DeviceType kSlots[] = {
    c10::DeviceType::PrivateUse1,
    c10::DeviceType::IPU,
    c10::DeviceType::MAIA,
    c10::DeviceType::HPU,
    c10::DeviceType::MTIA,
};
constexpr size_t kNumSlots = std::size(kSlots);
constexpr unsigned kBitsPerSlot = 5;
// Dtypes that Python can name on every supported version. Not float16: that is the default of the first slot, by which
// a thread without a policy of its own is told at once.
using c10::ScalarType;
constexpr ScalarType kDigits[1U << kBitsPerSlot] = {
    ScalarType::Byte,
    ScalarType::Char,
    ScalarType::Short,
    ScalarType::Int,
    ScalarType::Long,
    ScalarType::Float,
    ScalarType::Double,
    ScalarType::ComplexHalf,
    ScalarType::ComplexFloat,
    ScalarType::ComplexDouble,
    ScalarType::Bool,
    ScalarType::BFloat16,
    ScalarType::UInt16,
    ScalarType::UInt32,
    ScalarType::UInt64,
    ScalarType::Float8_e5m2,
    ScalarType::Float8_e4m3fn,
    ScalarType::Float8_e5m2fnuz,
    ScalarType::Float8_e4m3fnuz,
    ScalarType::Float8_e8m0fnu,
    ScalarType::Bits1x8,
    ScalarType::Bits2x4,
    ScalarType::Bits4x2,
    ScalarType::Bits8,
    ScalarType::Bits16,
    ScalarType::UInt1,
    ScalarType::UInt2,
    ScalarType::UInt3,
    ScalarType::UInt4,
    ScalarType::UInt5,
    ScalarType::UInt6,
    ScalarType::UInt7,
};

using Fingerprint = std::array<c10::ScalarType, kNumSlots>;

Fingerprint fingerprint_of(const PolicyTable& table) {
  uint64_t hash = 14695981039346656037ULL; // FNV-1a: the same in every process, which a disk cache needs
  for (size_t row = 0; row < kNumRows; ++row) {
    const auto mix = [&hash](uint8_t byte) { hash = (hash ^ byte) * 1099511628211ULL; };
    bool differs = false;
    for (size_t device = 0; device < kNumDevices; ++device) {
      differs |= table.bytes[device][row] != stock_policy_table().bytes[device][row];
    }
    if (differs) { // named, so that rows added to the table later do not move the hash of this policy
      for (const char c : rows()[row].name()) {
        mix(static_cast<uint8_t>(c));
      }
      for (size_t device = 0; device < kNumDevices; ++device) {
        mix(table.bytes[device][row]);
      }
    }
  }
  hash ^= hash >> 32;
  Fingerprint result{};
  for (size_t slot = 0; slot < kNumSlots; ++slot) {
    result[slot] = kDigits[(hash >> (slot * kBitsPerSlot)) & ((1U << kBitsPerSlot) - 1)];
  }
  return result;
}

// Every policy table that a region of this process has used, for good: a compiled function may hold a guard on it.
struct Policies {
  std::mutex mutex;
  std::vector<std::vector<Override>> overrides{{}}; // number 0: none
  std::map<Fingerprint, std::unique_ptr<const PolicyTable>> tables;
  std::map<std::pair<const PolicyTable*, uint32_t>, const PolicyTable*> composed;
};

Policies& policies() {
  static auto* instance = new Policies; // never destroyed: threads may outlive static destructors
  return *instance;
}

const PolicyTable* compose(const PolicyTable* base, uint32_t overrides) {
  Policies& all = policies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.composed.find({base, overrides});
  if (known != all.composed.end()) {
    return known->second;
  }
  TORCH_CHECK(overrides < all.overrides.size(), "torch_promote: no set of overrides has the number ", overrides);
  PolicyTable table = *base;
  for (const Override& change : all.overrides[overrides]) {
    table.bytes[static_cast<size_t>(change.device)][static_cast<size_t>(change.row)] = change.policy;
  }
  const PolicyTable* result = &stock_policy_table();
  if (!(table == *result)) {
    auto& slot = all.tables[fingerprint_of(table)];
    if (slot == nullptr) {
      slot = std::make_unique<const PolicyTable>(table);
    }
    TORCH_CHECK(
        *slot == table,
        "torch_promote: two different policies of this process have the same fingerprint, so compiled functions could "
        "not tell them apart. Change one of the overrides, and please report both.");
    result = slot.get();
  }
  all.composed.emplace(std::make_pair(base, overrides), result);
  return result;
}

// The part of the thread's state that a region changes.
struct ThreadState {
  struct Slot {
    bool enabled;
    c10::ScalarType dtype;
  };
  std::array<Slot, kNumDevices> devices;
  std::array<Slot, kNumSlots> slots;
  bool key_included;
  bool cache_enabled;
  const PolicyTable* policy;

  static Slot read(c10::DeviceType type) {
    return {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
  }
  static void write(c10::DeviceType type, const Slot& slot) {
    at::autocast::set_autocast_enabled(type, slot.enabled);
    at::autocast::set_autocast_dtype(type, slot.dtype);
  }
  static ThreadState capture() {
    ThreadState state{};
    for (size_t device = 0; device < kNumDevices; ++device) {
      state.devices[device] = read(device_type_of(static_cast<Device>(device)));
    }
    for (size_t slot = 0; slot < kNumSlots; ++slot) {
      state.slots[slot] = read(kSlots[slot]);
    }
    state.key_included = c10::impl::tls_is_dispatch_key_included(kOurKey);
    state.cache_enabled = at::autocast::is_autocast_cache_enabled();
    state.policy = tls_policy;
    return state;
  }
};

// A region in force. `named` says which devices' flags it set, and so has to put back: state of a device that it did
// not name belongs to others.
struct Frame {
  const void* owner;
  std::array<bool, kNumDevices> named;
  bool changed_policy;
  ThreadState before;
};

struct Thread {
  std::vector<Frame> frames;
};

Thread& thread() {
  static thread_local Thread instance;
  return instance;
}

void write_slots(const std::array<ThreadState::Slot, kNumSlots>& slots, size_t first) {
  for (size_t slot = first; slot < kNumSlots; ++slot) {
    ThreadState::write(kSlots[slot], slots[slot]);
  }
}

void put_policy(const PolicyTable* policy) {
  tls_policy = policy;
  const Fingerprint digits = fingerprint_of(*policy);
  for (size_t slot = 0; slot < kNumSlots; ++slot) {
    ThreadState::write(kSlots[slot], {true, digits[slot]});
  }
}

void restore(const Frame& frame) {
  const ThreadState& before = frame.before;
  for (size_t device = 0; device < kNumDevices; ++device) {
    if (frame.named[device]) {
      ThreadState::write(device_type_of(static_cast<Device>(device)), before.devices[device]);
    }
  }
  static_assert(kSlots[0] == c10::DeviceType::PrivateUse1, "our own key's flag is the first slot's");
  ThreadState::write(kSlots[0], before.slots[0]);
  if (frame.changed_policy) {
    write_slots(before.slots, 1);
  }
  c10::impl::tls_set_dispatch_key_included(kOurKey, before.key_included);
  at::autocast::set_autocast_cache_enabled(before.cache_enabled);
  tls_policy = before.policy;
}

void leave_nesting() {
  // As stock: the caches live as long as the outermost region. Ours is this thread's, stock's the process's.
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  if (thread().frames.empty()) {
    clear_cast_cache();
  }
}

void end_innermost() {
  const Frame frame = thread().frames.back();
  thread().frames.pop_back();
  restore(frame);
  leave_nesting();
}

// Ends a region while others, opened later, are still open. They stay in force; the one above it now ends where this
// one began.
void end_below(size_t position) {
  auto& frames = thread().frames;
  const Frame frame = frames[position];
  frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(position));
  Frame& above = frames[position];
  for (size_t device = 0; device < kNumDevices; ++device) {
    if (frame.named[device]) {
      above.named[device] = true;
      above.before.devices[device] = frame.before.devices[device];
    }
  }
  above.changed_policy |= frame.changed_policy;
  above.before.slots = frame.before.slots;
  above.before.key_included = frame.before.key_included;
  above.before.cache_enabled = frame.before.cache_enabled;
  above.before.policy = frame.before.policy;
  leave_nesting();
}

} // namespace

namespace {
constexpr unsigned kBitsPerDevice = 16;
constexpr unsigned kNamedBit = 8;
constexpr unsigned kEnabledBit = 9;
constexpr unsigned kCacheBit = 32;
constexpr unsigned kOverridesShift = 40;
} // namespace

RegionSpec RegionSpec::unpack(uint64_t packed) {
  RegionSpec spec;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const uint64_t field = packed >> (kBitsPerDevice * device);
    spec.devices[device].named = (field >> kNamedBit & 1) != 0;
    spec.devices[device].enabled = (field >> kEnabledBit & 1) != 0;
    spec.devices[device].dtype = static_cast<c10::ScalarType>(field & 0xFF);
  }
  spec.cache_enabled = (packed >> kCacheBit & 1) != 0;
  spec.overrides = static_cast<uint32_t>(packed >> kOverridesShift);
  return spec;
}

uint64_t RegionSpec::pack() const {
  uint64_t packed = static_cast<uint64_t>(overrides) << kOverridesShift;
  packed |= static_cast<uint64_t>(cache_enabled) << kCacheBit;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const PerDevice& wanted = devices[device];
    if (wanted.named) {
      const uint64_t field = static_cast<uint64_t>(wanted.dtype) | (1U << kNamedBit) |
                             (static_cast<uint64_t>(wanted.enabled) << kEnabledBit);
      packed |= field << (kBitsPerDevice * device);
    }
  }
  return packed;
}

uint32_t intern_overrides(std::vector<Override> overrides) {
  Policies& all = policies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (size_t number = 0; number < all.overrides.size(); ++number) {
    if (all.overrides[number] == overrides) {
      return static_cast<uint32_t>(number);
    }
  }
  TORCH_CHECK(all.overrides.size() < (1U << 24), "torch_promote: too many different sets of overrides in one process");
  all.overrides.push_back(std::move(overrides));
  return static_cast<uint32_t>(all.overrides.size() - 1);
}

const PolicyTable& policy_of_carried_state() {
  Fingerprint digits{};
  if (at::autocast::get_autocast_dtype(kSlots[0]) == c10::ScalarType::Half) { // its default, and not one of kDigits
    return stock_policy_table();
  }
  for (size_t slot = 0; slot < kNumSlots; ++slot) {
    digits[slot] = at::autocast::get_autocast_dtype(kSlots[slot]);
  }
  Policies& all = policies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto table = all.tables.find(digits);
  return table == all.tables.end() ? stock_policy_table() : *table->second;
}

void enter(const void* owner, const RegionSpec& spec) {
  Frame frame{owner, {}, spec.overrides != 0, ThreadState::capture()};
  // Composing may throw; everything after it does not.
  const PolicyTable* base = tls_policy != nullptr ? tls_policy : &policy_of_carried_state();
  const PolicyTable* policy = spec.overrides == 0 ? base : compose(base, spec.overrides);
  for (size_t device = 0; device < kNumDevices; ++device) {
    frame.named[device] = spec.devices[device].named;
  }
  thread().frames.push_back(frame);

  bool any_enabled = false;
  for (size_t device = 0; device < kNumDevices; ++device) {
    const RegionSpec::PerDevice& wanted = spec.devices[device];
    if (wanted.named) {
      ThreadState::write(device_type_of(static_cast<Device>(device)), {wanted.enabled, wanted.dtype});
      any_enabled |= wanted.enabled;
    }
  }
  // A region that only switches off leaves the key alone: an outer region of another device may need it.
  if (any_enabled) {
    c10::impl::tls_set_dispatch_key_included(kOurKey, true);
    c10::impl::tls_set_dispatch_key_excluded(kOurKey, false);
  }
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(spec.cache_enabled);
  if (frame.changed_policy) {
    put_policy(policy);
  } else {
    tls_policy = policy;
  }
}

bool exit(const void* owner) {
  auto& frames = thread().frames;
  const auto from_top = std::find_if(frames.rbegin(), frames.rend(), [&](const Frame& f) { return f.owner == owner; });
  if (from_top == frames.rend()) {
    return false;
  }
  while (owner != kGraphOwner && frames.back().owner == kGraphOwner) {
    end_innermost();
  }
  if (frames.back().owner == owner) {
    end_innermost();
  } else {
    end_below(static_cast<size_t>(frames.rend() - from_top) - 1);
  }
  return true;
}

size_t depth() {
  return thread().frames.size();
}

struct Suspended {
  std::vector<Frame> frames; // outermost first
  ThreadState inside;        // what the innermost of them saw when it was taken off
};

std::shared_ptr<Suspended> suspend(size_t base) {
  auto& frames = thread().frames;
  auto result = std::make_shared<Suspended>();
  result->inside = ThreadState::capture();
  result->frames.assign(frames.begin() + static_cast<std::ptrdiff_t>(base), frames.end());
  while (frames.size() > base) {
    end_innermost();
  }
  return result;
}

void resume(Suspended& regions) {
  const ThreadState around = ThreadState::capture();
  std::array<bool, kNumDevices> named{};
  bool changed_policy = false;
  for (size_t i = 0; i < regions.frames.size(); ++i) {
    // What a region puts back at its end is what it found; found anew, that is the state there is now.
    Frame frame = regions.frames[i];
    for (size_t device = 0; device < kNumDevices; ++device) {
      if (frame.named[device] && !named[device]) {
        frame.before.devices[device] = around.devices[device];
        named[device] = true;
      }
    }
    if (frame.changed_policy && !changed_policy) {
      frame.before.slots = around.slots;
      frame.before.policy = around.policy;
      changed_policy = true;
    }
    if (i == 0) {
      frame.before.slots[0] = around.slots[0];
      frame.before.policy = around.policy;
      frame.before.key_included = around.key_included;
      frame.before.cache_enabled = around.cache_enabled;
    }
    thread().frames.push_back(frame);
    at::autocast::increment_nesting();
  }
  const ThreadState& inside = regions.inside;
  for (size_t device = 0; device < kNumDevices; ++device) {
    if (named[device]) {
      ThreadState::write(device_type_of(static_cast<Device>(device)), inside.devices[device]);
    }
  }
  ThreadState::write(kSlots[0], inside.slots[0]);
  if (changed_policy) {
    write_slots(inside.slots, 1);
  }
  c10::impl::tls_set_dispatch_key_included(kOurKey, inside.key_included);
  at::autocast::set_autocast_cache_enabled(inside.cache_enabled);
  tls_policy = inside.policy;
}

} // namespace torch_promote
