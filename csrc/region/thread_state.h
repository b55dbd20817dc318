// file: the thread state that a region changes, PyTorch's and ours
#pragma once

#include "cache/cache_mode.h"
#include "cache/thread_casts.h"
#include "policy/dispatch_key.h"
#include "policy/torch_declarations.h"
#include "region/current_policy.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>

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

} // namespace torch_promote
