// file: which ops met a call, as a bit each
#pragma once

#include "policy/op_table.h"

#include <array>
#include <atomic>
#include <compare>
#include <cstdint>
#include <vector>

namespace torch_promote {

// NOTE [ Unused overrides ]
// `overrides={"mm": ...}` has no effect on nn.Linear: the op is `linear`, which calls mm or addmm with autocast off. To
// warn the author, regions whose overrides name ops set a bit for each op that is called in them (note_call, from the
// wrappers). A table of ops that hide others (torch_promote/regions/unused_overrides.py) says which op ran instead of one
// that was named and never called. Regions with equal overrides share their bits.
//
// An op also counts as called if the region of the call is unknown: on the autograd engine's device threads, and while
// torch.compile traces code that runs without our wrappers afterwards.

// Whether calls in this thread are noted: an open region has overrides that name ops, or no region is open.
inline constinit thread_local bool tls_notes_calls = true;

// An op that overrides name without a pattern.
struct NamedOp {
  std::vector<OpNumber> overloads;
  std::vector<OpNumber> hidden_by; // ops that call it with autocast off

  auto operator<=>(const NamedOp& other) const = default;
};

// Two bits for each op: whether it was called, and whether a call ran under the policy that the region has for it. Ops
// beyond the end count as called.
class CalledOps {
 public:
  void add(OpNumber op, bool under_policy) {
    if (op < kMost) {
      set(called_, op);
      if (under_policy) {
        set(under_policy_, op);
      }
    }
  }
  bool called(OpNumber op) const {
    return op >= kMost || get(called_, op);
  }
  bool ran_under_policy(OpNumber op) const {
    return op < kMost && get(under_policy_, op);
  }

 private:
  static constexpr OpNumber kMost = 4096;
  using Bits = std::array<std::atomic<uint64_t>, kMost / 64>;

  static bool get(const Bits& bits, OpNumber op) {
    return (bits[op / 64].load(std::memory_order_relaxed) >> op % 64 & 1) != 0;
  }
  static void set(Bits& bits, OpNumber op) {
    if (!get(bits, op)) {
      bits[op / 64].fetch_or(uint64_t{1} << op % 64, std::memory_order_relaxed);
    }
  }

  Bits called_{};
  Bits under_policy_{};
};

} // namespace torch_promote
