// file: which ops that a region's overrides name met a call in it, and which calls of other ops they had no effect on
#pragma once

#include "policy/named_ops.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_promote {

// NOTE [ Unused overrides ]
// `overrides={"mm": ...}` has no effect on nn.Linear: the op is `linear`, whose wrapper calls mm or addmm with autocast
// off. To tell the author, regions whose overrides name ops note
// - which of these ops their calls reach (note_call, from the wrappers), and
// - as long as one has met no call: which composite ops ran under a policy of their own, and which ops these called
//   (LookInside, in dispatch/look_inside.h). So nothing has to know what an op is made of.
// When a region ends, Python is told of the named ops that such an op called and that have met no call in any region
// with these overrides so far (torch_promote/regions/unused_overrides.py). Once all have met a call, such a region
// notes nothing. Without such overrides nothing of this runs: a wrapper tests `notes_calls` of a policy table that is
// not stock's.
//
// An op also counts as called, for the rest of the process, if the region of a call is unknown: on the autograd
// engine's device threads, and while torch.compile traces code that runs without our wrappers afterwards.

// A composite op that ran in a region under a policy of its own.
struct OuterOp {
  OpNumber op;
  uint64_t runs = 0;
  int looks = 0;                                   // how many more calls LookInside may observe
  std::vector<std::pair<size_t, OpNumber>> inside; // named ops, by their place, and the op that it called
};

// What an open region has noted.
struct NamedUse {
  std::shared_ptr<const NamedOps> named;
  std::vector<OuterOp> outer;

  OuterOp& outer_op(OpNumber op);
};

// The ops that were called in an unknown region. Ops beyond the end count as called.
inline std::array<std::atomic<bool>, 4096> called_in_unknown_region{};

// Whether calls in this thread are to be noted if the policy table notes calls: a region is open whose overrides name
// an op that has met no call, or none is open, and PyTorch carried the policy to this thread.
inline constinit thread_local bool tls_notes_calls = true;

// A named op, the op that ran instead, how often it ran, and the op that it called, by name.
using Unused = std::tuple<std::string, std::string, uint64_t, std::string>;

// The named ops that have met no call, and that another op called in this region.
std::vector<Unused> unused_in(const NamedUse& use);

} // namespace torch_promote
