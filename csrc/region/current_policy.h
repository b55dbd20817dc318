// file: the policy table in force in this thread, and whether its promotion rule acts
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

// A rule does not act on the ops that a promoting op calls, nor on backward formulas.
struct PromotionState {
  bool inside = false; // the thread runs a promoting op, or one of our Python hooks
  // The backward in which the innermost region was entered, -1 for none. The rule acts in that backward, because
  // checkpointing enters regions in a backward to run a forward again. It does not act in backwards that start inside
  // the region.
  int graph_task = -1;
};

inline constinit thread_local PromotionState tls_promotion;

} // namespace torch_promote
