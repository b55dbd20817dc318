// file: the fingerprint of a policy table
#include "policy/fingerprint.h"

#include "policy/op_table.h"

#include <array>
#include <map>
#include <string>

namespace torch_promote {

namespace {

using c10::ScalarType;

constexpr unsigned kBitsPerSlot = 5;
// Dtypes that Python has a name for on every supported version, without kNoFingerprint.
// clang-format off
constexpr ScalarType kDigits[1U << kBitsPerSlot] = {
    ScalarType::Byte,          ScalarType::Char,            ScalarType::Short,           ScalarType::Int,
    ScalarType::Long,          ScalarType::Float,           ScalarType::Double,          ScalarType::ComplexHalf,
    ScalarType::ComplexFloat,  ScalarType::ComplexDouble,   ScalarType::Bool,            ScalarType::BFloat16,
    ScalarType::UInt16,        ScalarType::UInt32,          ScalarType::UInt64,          ScalarType::Float8_e5m2,
    ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2fnuz, ScalarType::Float8_e4m3fnuz, ScalarType::Float8_e8m0fnu,
    ScalarType::Bits1x8,       ScalarType::Bits2x4,         ScalarType::Bits4x2,         ScalarType::Bits8,
    ScalarType::Bits16,        ScalarType::UInt1,           ScalarType::UInt2,           ScalarType::UInt3,
    ScalarType::UInt4,         ScalarType::UInt5,           ScalarType::UInt6,           ScalarType::UInt7,
};
// clang-format on

} // namespace

std::vector<Override> overrides_of(const PolicyTable& table) {
  std::vector<Override> result;
  for (OpNumber op = 0; op < kNumOpEntries + table.extra.size(); ++op) {
    for (size_t index = 0; index < kNumDevices; ++index) {
      const Device device = static_cast<Device>(index);
      const PolicyByte policy = table.lookup(device, op);
      if (policy != stock_policy_table().lookup(device, op)) {
        result.push_back({op, device, policy});
      }
    }
  }
  return result;
}

Fingerprint fingerprint_of(const PolicyTable& table, PolicyByte salt) {
  std::map<std::string, std::array<PolicyByte, kNumDevices>> changed;
  for (const Override& change : overrides_of(table)) {
    auto& bytes = changed[op_name(change.op)];
    for (size_t device = 0; device < kNumDevices; ++device) {
      bytes[device] = table.lookup(static_cast<Device>(device), change.op);
    }
  }
  Hash hash;
  hash.mix(salt);
  for (const auto& [name, bytes] : changed) {
    hash.mix(name);
    for (const PolicyByte byte : bytes) {
      hash.mix(byte);
    }
  }
  hash.mix(table.promotion.content);
  hash.mix(table.module_tables);
  Fingerprint result{};
  for (size_t slot = 0; slot < result.size(); ++slot) {
    result[slot] = kDigits[(hash.value() >> (slot * kBitsPerSlot)) & ((1U << kBitsPerSlot) - 1)];
  }
  return result;
}

} // namespace torch_promote
