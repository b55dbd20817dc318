// file: the policy table in force in this thread
#pragma once

#include "policy/policy_registry.h"

namespace torch_promote {

// The table in force in this thread.
inline constinit thread_local const PolicyTable* tls_policy = nullptr; // held by an open region of the thread
const PolicyTable& policy_of_carried_state();

inline const PolicyTable& current_policy() {
  // If it is null while the autocast key is on, this thread opened no region, and PyTorch copied the dispatch state to
  // it (an autograd device thread, at::launch). See NOTE [ Policy fingerprint ].
  return tls_policy != nullptr ? *tls_policy : policy_of_carried_state();
}

} // namespace torch_promote
