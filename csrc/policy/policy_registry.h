// file: every change of policy and every policy table that regions of this process have used
#pragma once

#include "policy/op_table.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <compare>
#include <cstdint>
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
    registered, // replaces it: starts from stock's and what `register_policy` has added
    stock,      // replaces it: starts from stock's alone
  };
  static constexpr uint32_t kPromotionAround = UINT32_MAX;

  Base base = Base::around;
  uint32_t promotion = kPromotionAround; // the number of the promotion rule to use, 0 for none
  std::vector<Override> overrides;

  auto operator<=>(const PolicyChange& other) const = default;
};

// The number of a change; the same change gets the same number, and none at all is number 0. Never forgotten: there are
// as many as the program spells.
uint32_t intern_change(PolicyChange change);

// The table that a change makes of `around`. Tables live for good, and equal tables are one object: stock's if it is
// equal to that.
const PolicyTable* compose(const PolicyTable* around, uint32_t change);

// Whether a change is that of a region of `promotion`.
bool sets_promotion(uint32_t change);

// The number of the change that makes this table of any.
uint32_t change_to(const PolicyTable& table);

// What differs from stock, but for the promotion rule.
std::vector<Override> overrides_of(const PolicyTable& table);

// The policy that outermost regions start from, and what the ops of `register_policy` have in every region that does
// not say otherwise. Regions that are open keep theirs.
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
// device types that this library does not serve. Under the stock policy these slots keep their values, and our dispatch
// key alone tells our regions from stock's.
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
    c10::DeviceType::PrivateUse1, // our own key's device type comes first: its dtype tells whether there is a
                                  // fingerprint
    c10::DeviceType::IPU,
    c10::DeviceType::MAIA,
    c10::DeviceType::HPU,
    c10::DeviceType::MTIA,
};

// The first slot's dtype where there is no fingerprint: PyTorch's default for PrivateUse1, and never part of one.
constexpr c10::ScalarType kNoFingerprint = c10::ScalarType::Half;

// The table with this fingerprint; stock's if none has.
const PolicyTable& find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
