// file: how a region changes the policy around it
#pragma once

#include "policy/named_ops.h"
#include "policy/op_table.h"

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace torch_promote {

struct PolicyChange {
  enum class Base : uint8_t {
    around,     // adds to the policy of the region around it
    registered, // replaces it: starts from stock's policy and the policies of `register_policy`
    stock,      // replaces it: starts from stock's policy
  };

  Base base = Base::around;
  std::optional<PromotionReference> promotion; // nullopt: keeps that of the region around it
  std::vector<Override> overrides;
  std::vector<NamedOp> named = {}; // of the overrides, to report those without effect

  auto operator<=>(const PolicyChange& other) const = default;
};

} // namespace torch_promote
