// file: the part of a thread's state that a region changes, PyTorch's and ours
#pragma once

#include "region.h"

#include <ATen/autocast_mode.h>
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

// The part of the thread's state that every region changes.
struct ThreadState {
  std::array<DeviceState, kNumDevices> devices;
  bool key_included;
  bool key_excluded;
  bool cache_enabled;
  CacheMode cache_mode;
  int nesting; // how many regions are open in this thread, stock's and ours
  const PolicyTable* policy;

  static ThreadState read() {
    ThreadState state{};
    for (size_t device = 0; device < kNumDevices; ++device) {
      state.devices[device] = DeviceState::read(device_type_of(static_cast<Device>(device)));
    }
    state.key_included = c10::impl::tls_is_dispatch_key_included(kOurKey);
    state.key_excluded = c10::impl::tls_is_dispatch_key_excluded(kOurKey);
    state.cache_enabled = at::autocast::is_autocast_cache_enabled();
    state.cache_mode = tls_cache_mode;
    state.nesting = at::autocast::increment_nesting() - 1; // there is no getter
    at::autocast::decrement_nesting();
    state.policy = tls_policy;
    return state;
  }
  void write_key() const {
    c10::impl::tls_set_dispatch_key_included(kOurKey, key_included);
    c10::impl::tls_set_dispatch_key_excluded(kOurKey, key_excluded);
  }
};

} // namespace torch_promote
