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
// torch.compile guards on the enabled flag and dtype of every Autocast device, AOTAutograd's cache keys on the dtypes
// of the enabled ones, and PyTorch carries the dispatch keys and these dtypes to its autograd threads. None of them
// knows our policy table. So a region whose policy differs from stock's writes a hash of the table into the slots of
// device types that this library does not serve and that have no tensors here: a function compiled under one policy is
// then not reused under another, and an autograd thread finds the table again. Under the stock policy the slots keep
// their values, and only kAutocastKey distinguishes our regions from stock's.
constexpr std::array<c10::DeviceType, std::tuple_size_v<Fingerprint>> kSlots = {
    c10::DeviceType::PrivateUse1, // kAutocastKey's device type; its dtype shows whether there is a fingerprint
    c10::DeviceType::IPU,         c10::DeviceType::MAIA, c10::DeviceType::HPU, c10::DeviceType::MTIA,
};

// The first slot's dtype where there is no fingerprint: PyTorch's default for PrivateUse1, and never part of one.
constexpr c10::ScalarType kNoFingerprint = c10::ScalarType::Half;

// The table with this fingerprint; stock's if none has.
const PolicyTable& find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
