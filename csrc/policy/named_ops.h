// file: the ops that the overrides of a region name, to tell their author of those that had no effect
#pragma once

#include "policy/op_table.h"

#include <algorithm>
#include <atomic>
#include <compare>
#include <cstddef>
#include <utility>
#include <vector>

namespace torch_promote {

// An op that overrides name, without a pattern.
struct NamedOp {
  std::vector<OpNumber> overloads; // those that got the policy
  std::vector<OpNumber> fused;     // overloads of other ops that compute the same and more: `addmm`, for `mm`
  PolicyByte policy = to_byte(CastPolicy::unlisted);

  auto operator<=>(const NamedOp& other) const = default;
};

// What the registry keeps of a change that names ops, and what the regions of that change have noted so far. Regions of
// several lines of a program share it if their overrides are equal: a number for each line would have torch.compile
// compile again for each of them.
struct NamedOps {
  // How many calls of composite ops LookInside observes for all these regions. Each takes 9,300 instructions more.
  static constexpr int kMostLooks = 4096;

  explicit NamedOps(std::vector<NamedOp> of_change)
      : ops(std::move(of_change)), called(ops.size()), uncalled(static_cast<int>(ops.size())) {}

  const std::vector<NamedOp> ops;
  std::vector<OpNumber> overridden;              // all ops with an override, those of patterns too; sorted
  mutable std::vector<std::atomic<bool>> called; // for each of `ops`: whether it met a call in one of the regions
  mutable std::atomic<int> uncalled;             // how many have met none
  mutable std::atomic<int> looks{kMostLooks};

  bool overrides(OpNumber op) const {
    return std::binary_search(overridden.begin(), overridden.end(), op);
  }
  bool any_uncalled() const {
    return uncalled.load(std::memory_order_relaxed) != 0;
  }
  bool is_called(size_t place) const {
    return called[place].load(std::memory_order_relaxed);
  }
  void forget() const { // for tests
    for (auto& one : called) {
      one = false;
    }
    uncalled = static_cast<int>(ops.size());
    looks = kMostLooks;
  }
  void note(OpNumber op) const {
    for (size_t place = 0; place < ops.size(); ++place) {
      const auto& overloads = ops[place].overloads;
      if (!is_called(place) && std::find(overloads.begin(), overloads.end(), op) != overloads.end() &&
          !called[place].exchange(true, std::memory_order_relaxed)) {
        uncalled.fetch_sub(1, std::memory_order_relaxed);
      }
    }
  }
};

} // namespace torch_promote
