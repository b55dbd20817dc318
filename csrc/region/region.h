// file: the thread's open regions: the policy table in force, and what the end of a region restores
#pragma once

#include "policy/dispatch_key.h"
#include "policy/policy_registry.h"
#include "region/region_spec.h"

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>

#include <cstddef>
#include <memory>

namespace torch_promote {

constexpr c10::DeviceType device_type_of(Device device) {
  return device == Device::cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

constexpr c10::DispatchKey stock_key_of(Device device) {
  return device == Device::cuda ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
}

// The table in force in this thread.
inline thread_local const PolicyTable* tls_policy = nullptr;
const PolicyTable& policy_of_carried_state();

inline const PolicyTable& current_policy() {
  // Null with our key on: this thread opened no region, and PyTorch carried the dispatch state to it (an autograd
  // device thread, at::launch). See NOTE [ Policy fingerprint ].
  return tls_policy != nullptr ? *tls_policy : policy_of_carried_state();
}

// The owner of regions that a traced graph opens. If an op of the graph raises, the graph does not end them; they end
// with the region around them at the latest.
constexpr const void* kGraphOwner = nullptr;

// Opens a region in this thread. `owner` identifies the object that opens it; it is compared, never dereferenced.
void enter_region(const void* owner, const RegionSpec& spec);

// Ends the innermost open region of `owner` in this thread. Returns false, and changes nothing, if there is none.
// Regions that were opened later stay open, and the state afterwards is what they and the regions around ask for.
bool exit_region(const void* owner);

// The owner of the innermost open region of `promotion` in this thread, null if there is none.
const void* innermost_promotion_region();

// How many regions are open in this thread.
size_t depth();

// A step of a coroutine may end inside its regions. `suspend` removes the regions above `base` from this thread and
// restores the state around them; `resume` enters them again, in whatever state the thread then has.
struct Suspended;
std::shared_ptr<Suspended> suspend(size_t base);
void resume(const Suspended& regions);

} // namespace torch_promote
