// file: every set of overrides and every policy table that regions of this process have used
#include "policy_registry.h"

#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace torch_promote {

namespace {

using c10::ScalarType;

constexpr unsigned kBitsPerSlot = 5;
// Dtypes that Python can name on every supported version. kNoFingerprint is not among them.
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

struct Registry {
  std::mutex mutex;
  std::vector<std::vector<Override>> overrides{{}}; // number 0: none
  std::map<Fingerprint, std::unique_ptr<const PolicyTable>> tables;
  std::map<std::pair<const PolicyTable*, uint32_t>, const PolicyTable*> composed;
};

Registry& registry() {
  static auto* instance = new Registry; // never destroyed: threads may outlive static destructors
  return *instance;
}

} // namespace

uint32_t intern_overrides(std::vector<Override> overrides) {
  constexpr size_t kMost = 1U << 24; // what a packed region spec has room for
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (size_t number = 0; number < all.overrides.size(); ++number) {
    if (all.overrides[number] == overrides) {
      return static_cast<uint32_t>(number);
    }
  }
  TORCH_CHECK(all.overrides.size() < kMost, "torch_promote: more than ", kMost, " sets of overrides in one process");
  all.overrides.push_back(std::move(overrides));
  return static_cast<uint32_t>(all.overrides.size() - 1);
}

const PolicyTable* compose(const PolicyTable* base, uint32_t overrides) {
  if (overrides == 0) {
    return base;
  }
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.composed.find({base, overrides});
  if (known != all.composed.end()) {
    return known->second;
  }
  TORCH_CHECK(overrides < all.overrides.size(), "torch_promote: no set of overrides has the number ", overrides);
  PolicyTable table = *base;
  for (const Override& change : all.overrides[overrides]) {
    table.bytes[static_cast<size_t>(change.device)][static_cast<size_t>(change.row)] = change.policy;
  }
  const PolicyTable* result = &stock_policy_table();
  if (!(table == *result)) {
    auto& place = all.tables[fingerprint_of(table)];
    if (place == nullptr) {
      place = std::make_unique<const PolicyTable>(table);
    }
    TORCH_CHECK(
        *place == table,
        "torch_promote: two different policies of this process have the same fingerprint, so compiled functions could "
        "not tell them apart. Change one of the overrides, and please report both.");
    result = place.get();
  }
  all.composed.emplace(std::make_pair(base, overrides), result);
  return result;
}

Fingerprint fingerprint_of(const PolicyTable& table) {
  uint64_t hash = 14695981039346656037ULL; // FNV-1a: the same in every process, which a cache on disk needs
  const auto mix = [&hash](uint8_t byte) { hash = (hash ^ byte) * 1099511628211ULL; };
  for (size_t row = 0; row < kNumRows; ++row) {
    bool differs = false;
    for (size_t device = 0; device < kNumDevices; ++device) {
      differs |= table.bytes[device][row] != stock_policy_table().bytes[device][row];
    }
    if (differs) { // named, so that rows added to the table later do not move the hash of this policy
      for (const char c : rows()[row].name()) {
        mix(static_cast<uint8_t>(c));
      }
      for (size_t device = 0; device < kNumDevices; ++device) {
        mix(table.bytes[device][row]);
      }
    }
  }
  hash ^= hash >> 32;
  Fingerprint result{};
  for (size_t slot = 0; slot < result.size(); ++slot) {
    result[slot] = kDigits[(hash >> (slot * kBitsPerSlot)) & ((1U << kBitsPerSlot) - 1)];
  }
  return result;
}

const PolicyTable& find_policy(const Fingerprint& fingerprint) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto table = all.tables.find(fingerprint);
  return table == all.tables.end() ? stock_policy_table() : *table->second;
}

} // namespace torch_promote
