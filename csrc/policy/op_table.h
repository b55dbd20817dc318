// file: the cast policies, op_policies.def as C++, the numbers of ops, and the policy table that a region points to
#pragma once

#include "policy/device.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// The cast policies in the order of their bytes. torch_promote/policy/cast_policy.py documents them. `unlisted`
// means the absence of a policy: the table has no entry for this op on this device, so PyTorch's own kernel decides.
#define TORCH_PROMOTE_CAST_POLICIES(POLICY) \
  POLICY(unlisted)                          \
  POLICY(fallthrough)                       \
  POLICY(keep)                              \
  POLICY(banned)                            \
  POLICY(lower_precision_fp)                \
  POLICY(fp32)                              \
  POLICY(fp32_set_opt_dtype)                \
  POLICY(fp32_append_dtype)                 \
  POLICY(promote)                           \
  POLICY(match_self)                        \
  POLICY(float8_tensorwise)                 \
  POLICY(float8_rowwise)                    \
  POLICY(float8_rowwise_with_gw_hp)

// The name of an overload's struct in at::_ops: `op`, or `op_overload`. (__VA_OPT__ drops the underscore if the macro
// argument is empty.)
#define TORCH_PROMOTE_OP_STRUCT(op, ...) op##__VA_OPT__(_##__VA_ARGS__)

namespace torch_promote {

enum class CastPolicy : uint8_t {
#define TORCH_PROMOTE_POLICY(name) name,
  TORCH_PROMOTE_CAST_POLICIES(TORCH_PROMOTE_POLICY)
#undef TORCH_PROMOTE_POLICY
  // Bytes from here on are `run_in + ScalarType`: cast the eligible arguments to that dtype.
  run_in = 64,
};

inline constexpr std::array kCastPolicyNames = {
#define TORCH_PROMOTE_POLICY(name) #name,
    TORCH_PROMOTE_CAST_POLICIES(TORCH_PROMOTE_POLICY)
#undef TORCH_PROMOTE_POLICY
};

// A cast policy as a policy table stores it.
using PolicyByte = uint8_t;

constexpr PolicyByte to_byte(CastPolicy policy) {
  return static_cast<PolicyByte>(policy);
}

// Whether a policy can change the dtype of an argument.
constexpr bool is_casting(PolicyByte byte) {
  return byte > to_byte(CastPolicy::banned);
}

// Whether a policy multiplies in float8. Only `linear` may have one.
constexpr bool is_float8(PolicyByte byte) {
  return byte >= to_byte(CastPolicy::float8_tensorwise) && byte <= to_byte(CastPolicy::float8_rowwise_with_gw_hp);
}

constexpr bool is_run_in(PolicyByte byte) {
  return byte >= to_byte(CastPolicy::run_in);
}

constexpr c10::ScalarType run_in_dtype(PolicyByte byte) {
  return static_cast<c10::ScalarType>(byte - to_byte(CastPolicy::run_in));
}

// The op entries of the table.
enum class OpEntry : uint16_t {
#define ROW(op, overload, ...) TORCH_PROMOTE_OP_STRUCT(op, overload),
#include "op_policies.def"
#undef ROW
  count
};

constexpr size_t kNumOpEntries = static_cast<size_t>(OpEntry::count);

// The policy of one op on each device type.
using OpPolicies = std::array<PolicyByte, kNumDevices>;

// Every op that can have a policy has a number. The number of an op entry is its index in the table; the numbers of
// other ops follow.
using OpNumber = uint32_t;

constexpr OpNumber number_of(OpEntry entry) {
  return static_cast<OpNumber>(entry);
}

class Promotion; // promotion/rule.h

// A promotion rule as a policy refers to it.
struct PromotionReference {
  const Promotion* rule = nullptr; // null: PyTorch promotes
  uint64_t content = 0;            // the rule's hash, which is the same in every process

  auto operator<=>(const PromotionReference& other) const = default;
};

// FNV-1a: the same in every process, which a cache on disk needs.
class Hash {
 public:
  void mix(uint64_t value) {
    hash_ = (hash_ ^ value) * 1099511628211ULL;
  }
  void mix(const std::string& text) {
    for (const char c : text) {
      mix(static_cast<uint8_t>(c));
    }
  }
  uint64_t value() const {
    return hash_ ^ hash_ >> 32;
  }

 private:
  uint64_t hash_ = 14695981039346656037ULL;
};

// A hash of a policy, small enough for PyTorch's autocast state: one dtype for each device type that this library does
// not serve. See NOTE [ Policy fingerprint ].
using Fingerprint = std::array<c10::ScalarType, 5>;

struct PolicyTable : std::enable_shared_from_this<PolicyTable> {
  std::array<OpPolicies, kNumOpEntries> entries{};
  // The policies of ops outside the table, indexed by number - kNumOpEntries. Ops beyond the end are unlisted. The last
  // element is not unlisted, so that equal tables have equal vectors.
  std::vector<OpPolicies> extra;
  PromotionReference promotion;
  uint32_t module_tables = 0;      // the number of the policy's tables for modules; 0 for none
  Fingerprint fingerprint{};       // of all of the above; the registry computes it
  bool casts_beyond_stock = false; // whether a policy that casts differs from stock's; the registry computes it
  uint64_t serial = 0;             // identifies the table in this process; 0 for stock's
  mutable bool is_kept = false;    // for the life of the process; read and written by std::atomic_ref

  OpPolicies policies_of(OpEntry entry) const {
    return entries[static_cast<size_t>(entry)];
  }
  OpPolicies policies_of(OpNumber op) const {
    if (op < kNumOpEntries) {
      return entries[op];
    }
    const size_t index = op - kNumOpEntries;
    return index < extra.size() ? extra[index] : OpPolicies{};
  }
  PolicyByte lookup(Device device, OpNumber op) const {
    return policies_of(op)[static_cast<size_t>(device)];
  }
  void put(Device device, OpNumber op, PolicyByte policy);
  bool operator==(const PolicyTable& other) const {
    return entries == other.entries && extra == other.extra && promotion == other.promotion &&
           module_tables == other.module_tables;
  }
};

struct OpEntryInfo {
  const char* op;
  const char* overload;
  std::array<CastPolicy, kNumDevices> policies;
  const char* redispatch_overload; // "" unless the op has an fp32_append_dtype form

  std::string overload_name() const; // "mm", "softmax.int"
  std::string name() const;          // "aten::mm", "aten::softmax.int"
};

const std::array<OpEntryInfo, kNumOpEntries>& op_entries();

// The table's policies for the running PyTorch: an op that this PyTorch does not register on a device's Autocast key is
// `unlisted` for that device.
const PolicyTable& stock_policy_table();

// Defines aten::flex_attention; see NOTE [ An op for flex_attention ]. stock_policy_table calls it.
void define_flex_attention();

// One op's policy on one device type.
struct Override {
  OpNumber op;
  Device device;
  PolicyByte policy;

  auto operator<=>(const Override& other) const = default;
};

// Names are qualified and include the overload: "aten::mm", "aten::softmax.int", "mylib::op". Op entries have a number
// from the start; another op gets one with its first policy, and keeps it, even if the op is destroyed.
std::optional<OpNumber> find_op_number(const std::string& name);

// The number that the next op gets.
OpNumber next_op_number();

// Gives an op without a number the next one.
OpNumber add_op_number(const std::string& name);

std::string op_name(OpNumber op);

// "aten::softmax" and "int" as "aten::softmax.int".
inline std::string join_overload(const std::string& op, const std::string& overload) {
  return overload.empty() ? op : op + "." + overload;
}

} // namespace torch_promote
