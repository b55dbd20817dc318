// file: notes which ops are called in regions whose overrides name ops; see NOTE [ Unused overrides ]
#pragma once

#include "policy/policy_registry.h"
#include "region/region_spec.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_promote {

// Notes a call. `on`: the device whose policy applies, or nullopt if none does.
void note_call(const PolicyTable& table, OpNumber op, std::optional<Device> on);

// The ops that overrides of the change name and that no call has reached, each with an op that ran instead, by name.
std::vector<std::pair<std::string, std::string>> unused_overrides(
    const NumberedChange& change, const PolicyTable& policy, const RegionSpec& spec);

} // namespace torch_promote
