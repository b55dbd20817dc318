// file: the policy changes and policy tables that this process uses
#pragma once

#include "policy/called_ops.h"
#include "policy/op_table.h"

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch_promote {

// NOTE [ What the registry keeps ]
// The registry finds equal changes and tables, and keeps none of them: its maps hold weak pointers.
// - A change is held by the region objects, open regions and graphs that refer to it. A packed spec contains its number.
//   Numbers are not reused: a spec whose change nothing holds any more raises.
// - A table is held by the change that made it, by the regions that are open under it, and by a thread to which PyTorch
//   carried its fingerprint.

// A table that is held. Stock's table lives as long as the process, and its pointer owns nothing.
using PolicyPtr = std::shared_ptr<const PolicyTable>;

inline PolicyPtr hold(const PolicyTable& table) {
  PolicyPtr held = table.weak_from_this().lock();
  return held != nullptr ? held : PolicyPtr(PolicyPtr(), &table);
}

// How a region changes the policy around it.
struct PolicyChange {
  enum class Base : uint8_t {
    around,     // adds to the policy of the region around it
    registered, // replaces it: starts from stock's policy and the policies of `register_policy`
    stock,      // replaces it: starts from stock's policy
  };

  Base base = Base::around;
  std::optional<PromotionReference> promotion = std::nullopt; // nullopt: keeps that of the region around it
  std::optional<uint32_t> module_tables = std::nullopt;       // nullopt: those of the base
  std::vector<Override> overrides = {};
  std::vector<NamedOp> named = {}; // see NOTE [ Unused overrides ]

  auto operator<=>(const PolicyChange& other) const = default;
};

// A change with a number. Equal changes are one object.
class NumberedChange {
 public:
  NumberedChange(uint32_t number_, PolicyChange change_)
      : number(number_), change(std::move(change_)), called(change.named.empty() ? nullptr : new CalledOps) {}

  const uint32_t number;
  const PolicyChange change;
  const std::unique_ptr<CalledOps> called; // null unless `named` has elements

 private:
  friend class Registry;
  // The tables that it has made, keyed by the serial of the table that it started from, and the promotion rule around.
  // The registry's mutex guards it.
  mutable std::map<std::pair<uint64_t, PromotionReference>, PolicyPtr> made_;
};

// Null for the empty change, whose number is 0.
using ChangePtr = std::shared_ptr<const NumberedChange>;

// Returns the object of a change.
ChangePtr intern_change(PolicyChange change);

// Returns the change with a number. Raises if nothing holds it any more.
ChangePtr find_change(uint32_t number);

// Returns the table that a change makes of `around`. Equal tables are one object.
PolicyPtr compose(const PolicyPtr& around, const ChangePtr& change);

// Returns the change that turns any table into this one.
ChangePtr change_to(const PolicyTable& table);

// Sets the policy that outermost regions start from, and the policies of `register_policy`, which apply in every region
// that does not override them. Open regions keep their policy. If it raises, nothing has changed.
void set_defaults(const ChangePtr& registered, const ChangePtr& policy);
PolicyPtr default_policy_table();

// The table with this fingerprint, or stock's if there is none.
PolicyPtr find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
