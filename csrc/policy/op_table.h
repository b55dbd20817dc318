// file: op_policies.def as C++: a number and a type for each row, and the policy table that a region points to
#pragma once

#include "policy/cast_policy.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

// The name of an overload's struct in at::_ops: `op`, or `op_overload`. (__VA_OPT__ because an empty macro argument
// must leave no underscore behind.)
#define TORCH_PROMOTE_OP_STRUCT(op, ...) op##__VA_OPT__(_##__VA_ARGS__)

namespace torch_promote {

enum class Row : uint16_t {
#define ROW(op, overload, ...) TORCH_PROMOTE_OP_STRUCT(op, overload),
#include "op_policies.def"
#undef ROW
  count
};

constexpr size_t kNumRows = static_cast<size_t>(Row::count);

// Index of a device type in a policy table. The order is that of the columns.
enum class Device : uint8_t { cpu, cuda, count };

constexpr size_t kNumDevices = static_cast<size_t>(Device::count);

// Every op that may have a policy has a number: a row its place in the table, other ops (extra_ops.h) the numbers
// after.
using OpNumber = uint32_t;

constexpr OpNumber number_of(Row row) {
  return static_cast<OpNumber>(row);
}

class Promotion; // promotion_rule.h

// PyTorch's autocast state has room for one dtype each in the slots of device types that have no tensors here. See NOTE
// [ Policy fingerprint ].
using Fingerprint = std::array<c10::ScalarType, 5>;

struct PolicyTable {
  std::array<std::array<PolicyByte, kNumRows>, kNumDevices> bytes{};
  // Of ops that are no rows, by their number less kNumRows. What is beyond the end is unlisted, and so is not the last.
  std::vector<std::array<PolicyByte, kNumDevices>> extra;
  const Promotion* promotion = nullptr; // the promotion rule; null for PyTorch's own way
  Fingerprint fingerprint{};            // of the rest, from the registry

  PolicyByte lookup(Device device, Row row) const {
    return bytes[static_cast<size_t>(device)][static_cast<size_t>(row)];
  }
  PolicyByte lookup(Device device, OpNumber op) const {
    if (op < kNumRows) {
      return lookup(device, static_cast<Row>(op));
    }
    const size_t index = op - kNumRows;
    return index < extra.size() ? extra[index][static_cast<size_t>(device)] : to_byte(CastPolicy::unlisted);
  }
  void put(Device device, OpNumber op, PolicyByte policy);
  bool operator==(const PolicyTable& other) const {
    return bytes == other.bytes && extra == other.extra && promotion == other.promotion;
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
