// file: every set of overrides and every policy table that regions of this process have used
#pragma once

#include "op_table.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <cstdint>
#include <vector>

namespace torch_promote {

// One change that a region makes to the policy in force around it.
struct Override {
  Row row;
  Device device;
  PolicyByte policy;

  bool operator==(const Override& other) const {
    return row == other.row && device == other.device && policy == other.policy;
  }
};

// The number of a set of overrides; the same set gets the same number, and no overrides are number 0. Never forgotten:
// there are as many as the program spells.
uint32_t intern_overrides(std::vector<Override> overrides);

// The table that `overrides` make of `base`. Tables live for good, and equal tables are one object: stock's if it is
// equal to that.
const PolicyTable* compose(const PolicyTable* base, uint32_t overrides);

// NOTE [ Policy fingerprint ]
// torch.compile guards on the enabled flag and dtype of every Autocast device, AOTAutograd's cache keys on the dtypes
// of the enabled ones, and PyTorch carries the dispatch keys and these dtypes to its autograd threads. None of them
// knows our policy table. So a region whose policy differs from stock's writes a hash of the table into the slots of
// device types that this library does not serve and that have no tensors here: a function compiled under one policy is
// then not reused under another, and an autograd thread finds the table again. Under the stock policy the slots keep
// their values, and our key alone tells our regions from stock's.
constexpr std::array<c10::DeviceType, 5> kSlots = {
    c10::DeviceType::PrivateUse1, // our own key's device type comes first: its dtype tells whether there is a
                                  // fingerprint
    c10::DeviceType::IPU,
    c10::DeviceType::MAIA,
    c10::DeviceType::HPU,
    c10::DeviceType::MTIA,
};
using Fingerprint = std::array<c10::ScalarType, kSlots.size()>;

// The first slot's dtype where there is no fingerprint: PyTorch's default for PrivateUse1, and never part of one.
constexpr c10::ScalarType kNoFingerprint = c10::ScalarType::Half;

Fingerprint fingerprint_of(const PolicyTable& table);

// The table with this fingerprint; stock's if none has.
const PolicyTable& find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
