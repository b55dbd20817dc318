// file: the dispatch key of this library's kernels, and the keys of stock autocast
#pragma once

#include "policy/op_table.h"

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

namespace torch_promote {

constexpr c10::DispatchKey kAutocastKey = c10::DispatchKey::AutocastPrivateUse1;

constexpr c10::DeviceType device_type_of(Device device) {
  return device == Device::cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

constexpr c10::DispatchKey stock_key_of(Device device) {
  return device == Device::cuda ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
}

} // namespace torch_promote
