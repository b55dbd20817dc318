// file: the device types that have policies, and PyTorch's dispatch keys of each
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace torch_promote {

// Index of a device type in the policies of an op, in the order of the columns of op_policies.def.
enum class Device : uint8_t { cpu, cuda, xpu, mps, count };

constexpr size_t kNumDevices = static_cast<size_t>(Device::count);

// A device type of PyTorch, the key of its autocast, and the backend of its tensors. Key sets, because constructing one
// from a key that the compiler does not know takes longer than all of a decision.
struct DeviceKeys {
  constexpr DeviceKeys(c10::DeviceType type_, c10::DispatchKey key_, c10::BackendComponent backend_)
      : type(type_), key(key_), stock(key_), backend(backend_) {}

  c10::DeviceType type;
  c10::DispatchKey key;
  c10::DispatchKeySet stock;
  c10::DispatchKeySet backend;
};

inline constexpr std::array<DeviceKeys, kNumDevices> kDeviceKeys = {{
    {c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU, c10::BackendComponent::CPUBit},
    {c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA, c10::BackendComponent::CUDABit},
    {c10::DeviceType::XPU, c10::DispatchKey::AutocastXPU, c10::BackendComponent::XPUBit},
    {c10::DeviceType::MPS, c10::DispatchKey::AutocastMPS, c10::BackendComponent::MPSBit},
}};

// The devices in the order in which their policies apply to a call with tensors of several: that of stock's keys, from
// the highest one down.
inline constexpr std::array kDevices = {Device::cuda, Device::mps, Device::xpu, Device::cpu};

constexpr c10::DeviceType device_type_of(Device device) {
  return kDeviceKeys[static_cast<size_t>(device)].type;
}

constexpr c10::DispatchKeySet stock_key_of(Device device) {
  return kDeviceKeys[static_cast<size_t>(device)].stock;
}

inline constexpr c10::DispatchKeySet kStockKeys =
    kDeviceKeys[0].stock | kDeviceKeys[1].stock | kDeviceKeys[2].stock | kDeviceKeys[3].stock;

} // namespace torch_promote
