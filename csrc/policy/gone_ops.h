// file: which of some ops policies refer to
#pragma once

#include "policy/op_table.h"
#include "policy/policy_change.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace torch_promote {

// Ops that do not exist any more, and whether a policy that something holds refers to them.
class GoneOps {
 public:
  explicit GoneOps(const std::vector<OpNumber>& ops) {
    for (const OpNumber op : ops) {
      is_held_.emplace(op, false);
    }
  }
  void hold_those_in(const PolicyChange& change) {
    in(change, [](bool& is_held) { is_held = true; });
  }
  void hold_those_in(const PolicyTable& table) {
    in(table, [](bool& is_held) { is_held = true; });
  }
  // Whether a policy refers to one of those that nothing holds.
  template <class Policy>
  bool are_free_in(const Policy& policy) {
    bool found = false;
    in(policy, [&found](bool is_held) { found |= !is_held; });
    return found;
  }
  std::vector<OpNumber> free() const {
    std::vector<OpNumber> result;
    for (const auto& [op, is_held] : is_held_) {
      if (!is_held) {
        result.push_back(op);
      }
    }
    return result;
  }

 private:
  template <class Act>
  void in(const PolicyChange& change, const Act& act) {
    const auto look_up = [&](OpNumber op) {
      if (const auto place = is_held_.find(op); place != is_held_.end()) {
        act(place->second);
      }
    };
    for (const Override& one : change.overrides) {
      look_up(one.op);
    }
    for (const NamedOp& one : change.named) {
      std::for_each(one.overloads.begin(), one.overloads.end(), look_up);
      std::for_each(one.fused.begin(), one.fused.end(), look_up);
    }
  }
  template <class Act>
  void in(const PolicyTable& table, const Act& act) {
    constexpr PolicyByte kUnlisted = to_byte(CastPolicy::unlisted);
    for (auto& [op, is_held] : is_held_) {
      if (table.lookup(Device::cpu, op) != kUnlisted || table.lookup(Device::cuda, op) != kUnlisted) {
        act(is_held);
      }
    }
  }

  std::unordered_map<OpNumber, bool> is_held_;
};

} // namespace torch_promote
