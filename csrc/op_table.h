// file: op_policies.def as C++: a number and a type for each row, and the policy table that a region points to
#pragma once

#include "cast_policy.h"

#include <array>
#include <cstddef>
#include <string>

// The name of an overload's struct in at::_ops: `op`, or `op_overload`. (__VA_OPT__ because an empty macro argument
// must leave no underscore behind.)
#define TORCH_PROMOTE_OP_STRUCT(op, ...) op##__VA_OPT__(_##__VA_ARGS__)

namespace torch_promote {

enum class Row : uint16_t {
#define ROW(op, overload, ...) TORCH_PROMOTE_OP_STRUCT(op, overload),
#include "../torch_promote/op_policies.def"
#undef ROW
  count
};

constexpr size_t kNumRows = static_cast<size_t>(Row::count);

// Index of a device type in a policy table. The order is that of the columns.
enum class Device : uint8_t { cpu, cuda, count };

constexpr size_t kNumDevices = static_cast<size_t>(Device::count);

struct PolicyTable {
  std::array<std::array<PolicyByte, kNumRows>, kNumDevices> bytes{};

  PolicyByte lookup(Device device, Row row) const {
    return bytes[static_cast<size_t>(device)][static_cast<size_t>(row)];
  }
  bool operator==(const PolicyTable& other) const {
    return bytes == other.bytes;
  }
};

struct RowInfo {
  const char* op;
  const char* overload;
  std::array<CastPolicy, kNumDevices> policies;
  const char* redispatch_overload; // "" unless the row has an fp32_append_dtype form

  std::string name() const; // "aten::mm", "aten::softmax.int"
};

const std::array<RowInfo, kNumRows>& rows();

// The rows as they count in the running PyTorch: a row counts for a device only where PyTorch itself registers the op
// on that device's Autocast key, otherwise it is `unlisted` there.
const PolicyTable& stock_policy_table();

} // namespace torch_promote
