// file: the policy changes and policy tables that this process uses, and their fingerprints
#pragma once

#include "policy/op_table.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_promote {

// NOTE [ What the registry keeps ]
// The registry finds equal changes and tables, and keeps none of them: its maps hold weak pointers.
// - A change is held by the region objects, open regions and graphs that refer to it. A packed spec has its number.
//   Numbers are not reused: a spec whose change nothing holds any more raises.
// - A table is held by the change that made it, by the regions that are open under it, and by a thread to which PyTorch
//   carried its fingerprint.
// - A table under which a compiler has traced is held for the life of the process: compiled code is found by its
//   fingerprint, so no other table may get it.

// NOTE [ Policy fingerprint ]
// PyTorch does not know our policy tables, but three parts of it must distinguish policies:
// - Dynamo must recompile a function that it compiled under another policy. It guards on the enabled flag and the dtype
//   of each Autocast device.
// - AOTAutograd's cache on disk must not return code compiled under another policy. Its key contains the dtypes
//   of the enabled devices.
// - The autograd engine's device threads, and tasks of at::launch, must find the policy of the thread that called them.
//   at::ThreadLocalState carries the dispatch keys and the autocast dtypes to them.
// So a region whose policy is not stock's writes a hash of the table, its fingerprint, into the autocast dtypes of
// device types that this library does not serve. Under the stock policy these slots keep their values, and only
// kAutocastKey distinguishes our regions from stock's.
//
// Why not a guard of our own: a guard on a global or a thread-local covers only frames that read it, and the compiled
// frames are the user's. Installing it in every frame means replacing OutputGraph.init_ambient_guards, which is private
// and differs between releases, and it would not help the other two parts.
//
// Collisions: a backend that has tensors on one of these device types and autocasts them would read a wrong dtype
// inside regions with such a policy. A fingerprint has 25 bits. Within a process, the registry (find_or_add) salts the
// second of two tables with equal fingerprints. Two processes that share a cache on disk cannot do that, so the cache's
// key also gets a digest of the whole policy (torch_promote/integrations/compile.py, _complete_disk_cache_keys).
constexpr std::array<c10::DeviceType, std::tuple_size_v<Fingerprint>> kSlots = {
    c10::DeviceType::PrivateUse1, // kAutocastKey's device type; its dtype shows whether there is a fingerprint
    c10::DeviceType::IPU,         c10::DeviceType::MAIA, c10::DeviceType::HPU, c10::DeviceType::MTIA,
};

// The first slot's dtype without a fingerprint: PyTorch's default for PrivateUse1. No fingerprint uses it.
constexpr c10::ScalarType kNoFingerprint = c10::ScalarType::Half;

// The policies that differ from stock's, without the promotion rule.
std::vector<Override> overrides_of(const PolicyTable& table);

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

  auto operator<=>(const PolicyChange& other) const = default;
};

// A change with a number. Equal changes are one object.
class NumberedChange {
 public:
  NumberedChange(uint32_t number_, PolicyChange change_) : number(number_), change(std::move(change_)) {}

  const uint32_t number;
  const PolicyChange change;
  // The tables that it has made, keyed by the serial of the table that it started from, and the promotion rule around.
  // The registry's mutex guards it.
  mutable std::map<std::pair<uint64_t, PromotionReference>, PolicyPtr> made;
};

// Null for the empty change, whose number is 0.
using ChangePtr = std::shared_ptr<const NumberedChange>;

// Returns the object of a change.
ChangePtr intern_change(PolicyChange change);

// Returns the change with a number. Raises if nothing holds it any more.
ChangePtr find_change(uint32_t number);

// Returns the table that a change makes of `around`. Equal tables are one object.
PolicyPtr compose(const PolicyPtr& around, const ChangePtr& change);

// How many changes and tables something holds.
std::pair<size_t, size_t> policies_in_use();

// Returns the change that turns any table into this one.
ChangePtr change_to(const PolicyTable& table);

// Sets the policy that outermost regions start from, and the policies of `register_policy`, which apply in every region
// that does not override them. Open regions keep their policy. If it raises, nothing has changed.
void set_defaults(const ChangePtr& registered, const ChangePtr& policy);
PolicyPtr default_policy_table();

// Holds a table for the life of the process.
void keep_for_good(const PolicyTable& table);

// The table with this fingerprint, or stock's if there is none.
PolicyPtr find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
