// file: every change of policy and every policy table that regions of this process have used
#pragma once

#include "policy/op_table.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace torch_promote {

// One op's policy on one device type.
struct Override {
  OpNumber op;
  Device device;
  PolicyByte policy;

  auto operator<=>(const Override& other) const = default;
};

// What a region does to the policy in force around it.
struct PolicyChange {
  enum class Base : uint8_t {
    around,     // adds to the policy around
    registered, // replaces it: starts from stock's policy and the policies of `register_policy`
    stock,      // replaces it: starts from stock's policy
  };

  Base base = Base::around;
  std::optional<PromotionReference> promotion; // nothing: that of the policy around
  std::vector<Override> overrides;

  auto operator<=>(const PolicyChange& other) const = default;
};

// Returns the number of a change. Equal changes have one number, and the change that changes nothing is number 0. The
// registry keeps every change: there are as many as the program's source spells out.
uint32_t intern_change(PolicyChange change);

// Returns the table that a change makes of `around`. Tables are never destroyed, and equal tables are one object.
const PolicyTable* compose(const PolicyTable* around, uint32_t change);

// Whether a change sets the promotion rule, as regions of `promotion` do.
bool sets_promotion(uint32_t change);

// Returns the number of the change that turns any table into this one.
uint32_t change_to(const PolicyTable& table);

// The policies that differ from stock's. (The promotion rule is not among them.)
std::vector<Override> overrides_of(const PolicyTable& table);

// Sets the policy that outermost regions start from, and the policies of `register_policy`, which every region has that
// does not override them. Open regions keep their policy.
void set_defaults(uint32_t registered, uint32_t policy);
const PolicyTable* default_policy_table();

// NOTE [ Policy fingerprint ]
// PyTorch does not know our policy tables, yet three parts of it have to tell policies apart:
// - Dynamo must recompile a function that it compiled under another policy. It guards on the enabled flag and the dtype
//   of each Autocast device.
// - AOTAutograd's cache on disk must not serve what was compiled under another policy. Its key holds the dtypes of the
//   enabled devices.
// - The autograd engine's device threads, and tasks of at::launch, must find the policy of the thread that called them.
//   at::ThreadLocalState carries the dispatch keys and the autocast dtypes to them.
// So a region whose policy is not stock's writes a hash of the table, its fingerprint, into the autocast dtypes of
// device types that this library does not serve. Under the stock policy these slots keep their values, and kAutocastKey
// alone tells our regions from stock's.
//
// Why not a guard of our own: a guard on a global or a thread-local covers only frames that read it, and the frames
// that are compiled are the user's. Installing it in every frame means replacing OutputGraph.init_ambient_guards, which
// is private and differs between releases; it would do nothing for the other two, which the slots serve as well.
//
// What could collide: a backend that has tensors on one of these device types and autocasts them would read a wrong
// dtype, inside regions with such a policy. A fingerprint has 25 bits. Within a process, find_or_add salts the second
// of two tables with equal ones. Two processes that share a cache on disk cannot do so; therefore the cache's key also
// gets a digest of the whole policy (torch_promote/integrations/compile.py, _complete_disk_cache_keys).
constexpr std::array<c10::DeviceType, std::tuple_size_v<Fingerprint>> kSlots = {
    c10::DeviceType::PrivateUse1, // kAutocastKey's device type; its dtype shows whether there is a fingerprint
    c10::DeviceType::IPU,         c10::DeviceType::MAIA, c10::DeviceType::HPU, c10::DeviceType::MTIA,
};

// The first slot's dtype where there is no fingerprint: PyTorch's default for PrivateUse1, and never part of one.
constexpr c10::ScalarType kNoFingerprint = c10::ScalarType::Half;

// The table with this fingerprint; stock's if none has.
const PolicyTable& find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
