// file: whether the thread runs the kernel of an op
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_promote {

// NOTE [ Inside kernels ]
// PyTorch's kernels call ops on tensors of their own, and read the results through raw pointers, as the dtype that they
// passed: `median` clones its argument and sorts the clone's floats. Another dtype there is garbage, or a write beyond
// the end of the memory. So inside a kernel, policies other than stock's cast nothing, and promotion rules do not act.
// Stock's policies act there as they do in stock. Composite ops, which call other ops and touch no data, are no kernels
// in this sense.
//
// How to tell: the autograd kernel of an op excludes ADInplaceOrView while the op's own kernel runs, with or without
// gradients. All but a dozen of the 2,176 ops with a kernel have an autograd kernel. In inference mode PyTorch skips
// autograd kernels, and nothing tells a kernel's calls from others. Therefore ops that only move data, which nearly all
// such calls inside kernels are, have no casting policy in any mode (torch_promote/policy/legality.py), and the ops
// whose kernels call ops that compute, and need their dtype, are marked by a kernel of ours (kClosedOps).
// functorch excludes the key as well while it interprets a level; there the policy applies when the call reaches the
// level below.
inline bool inside_kernel(c10::DispatchKeySet excluded) {
  return excluded.has(c10::DispatchKey::ADInplaceOrView);
}
inline bool inside_kernel() {
  return inside_kernel(c10::impl::tls_local_dispatch_key_set().excluded_);
}

} // namespace torch_promote
