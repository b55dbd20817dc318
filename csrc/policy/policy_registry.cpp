// file: every change of policy and every policy table that regions of this process have used
#include "policy/policy_registry.h"

#include "policy/fork_safe_mutex.h"
#include "policy/op_numbers.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

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

struct Registry {
  ForkSafeMutex mutex;
  std::vector<PolicyChange> changes{{}}; // number 0 changes nothing
  std::map<PolicyChange, uint32_t> numbers{{{}, 0}};
  std::map<Fingerprint, std::unique_ptr<const PolicyTable>> tables;
  // By the table that a change starts from, the promotion rule around it, and the change.
  std::map<std::tuple<const PolicyTable*, PromotionReference, uint32_t>, const PolicyTable*> composed;
  std::atomic<const PolicyTable*> registered{&stock_policy_table()};
  std::atomic<const PolicyTable*> by_default{&stock_policy_table()};
};

Registry& registry() {
  static auto* instance = new Registry; // never destroyed: threads may outlive static destructors
  return *instance;
}

class Hash {
 public:
  void mix(PolicyByte byte) {
    hash_ = (hash_ ^ byte) * 1099511628211ULL;
  }
  void mix_number(uint64_t number) {
    for (; number != 0; number >>= 8) {
      mix(static_cast<PolicyByte>(number & 0xFF));
    }
  }
  void mix(const std::string& name) {
    for (const char c : name) {
      mix(static_cast<uint8_t>(c));
    }
  }
  uint64_t value() const {
    return hash_ ^ hash_ >> 32;
  }

 private:
  uint64_t hash_ = 14695981039346656037ULL; // FNV-1a: the same in every process, which a cache on disk needs
};

// Hashes the ops' names: their numbers depend on the version of the table and on the order in which a program names
// other ops. `salt` is 0, unless another table of this process has that fingerprint.
Fingerprint fingerprint_of(const PolicyTable& table, PolicyByte salt) {
  std::map<std::string, std::array<PolicyByte, kNumDevices>> changed;
  for (const Override& change : overrides_of(table)) {
    auto& bytes = changed[op_name(change.op)];
    for (size_t device = 0; device < kNumDevices; ++device) {
      bytes[device] = table.lookup(static_cast<Device>(device), change.op);
    }
  }
  Hash hash;
  if (salt != 0) {
    hash.mix(salt);
  }
  for (const auto& [name, bytes] : changed) {
    hash.mix(name);
    for (const PolicyByte byte : bytes) {
      hash.mix(byte);
    }
  }
  hash.mix_number(table.promotion.content);
  Fingerprint result{};
  for (size_t slot = 0; slot < result.size(); ++slot) {
    result[slot] = kDigits[(hash.value() >> (slot * kBitsPerSlot)) & ((1U << kBitsPerSlot) - 1)];
  }
  return result;
}

// Returns the known table that is equal to this one; if there is none, stores this one.
const PolicyTable* find_or_add(Registry& all, PolicyTable& table) {
  for (PolicyByte salt = 0;; ++salt) {
    table.fingerprint = fingerprint_of(table, salt);
    auto& place = all.tables[table.fingerprint];
    if (place == nullptr) {
      place = std::make_unique<const PolicyTable>(table);
    }
    if (*place == table) {
      return place.get();
    }
    TORCH_CHECK(salt < 255, "torch_promote: too many policies in one process to be told apart by torch.compile");
  }
}

} // namespace

uint32_t intern_change(PolicyChange change) {
  constexpr size_t kMost = 1U << 24; // what a packed region spec has room for
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.numbers.find(change);
  if (known != all.numbers.end()) {
    return known->second;
  }
  TORCH_CHECK(all.changes.size() < kMost, "torch_promote: more than ", kMost, " sets of overrides in one process");
  const auto number = static_cast<uint32_t>(all.changes.size());
  all.numbers.emplace(change, number);
  all.changes.push_back(std::move(change));
  return number;
}

const PolicyTable* compose(const PolicyTable* around, uint32_t change) {
  if (change == 0) {
    return around;
  }
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  TORCH_CHECK(change < all.changes.size(), "torch_promote: no set of overrides has the number ", change);
  const PolicyChange& wanted = all.changes[change];
  const PolicyTable* base = wanted.base == PolicyChange::Base::around       ? around
                            : wanted.base == PolicyChange::Base::registered ? all.registered.load()
                                                                            : &stock_policy_table();
  const std::tuple key(base, around->promotion, change);
  const auto known = all.composed.find(key);
  if (known != all.composed.end()) {
    return known->second;
  }
  PolicyTable table = *base;
  table.promotion = wanted.promotion.value_or(around->promotion);
  for (const Override& one : wanted.overrides) {
    table.put(one.device, one.op, one.policy);
  }
  const PolicyTable* result = table == stock_policy_table() ? &stock_policy_table() : find_or_add(all, table);
  all.composed.emplace(key, result);
  return result;
}

uint32_t change_to(const PolicyTable& table) {
  return intern_change({PolicyChange::Base::stock, table.promotion, overrides_of(table)});
}

bool sets_promotion(uint32_t change) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.changes.at(change).promotion.has_value();
}

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

void set_defaults(uint32_t registered, uint32_t policy) {
  const PolicyTable* with_registered = compose(&stock_policy_table(), registered); // may throw; what follows does not
  registry().registered = with_registered;
  registry().by_default = compose(with_registered, policy);
}

const PolicyTable* default_policy_table() {
  return registry().by_default.load();
}

const PolicyTable& find_policy(const Fingerprint& fingerprint) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto table = all.tables.find(fingerprint);
  return table == all.tables.end() ? stock_policy_table() : *table->second;
}

} // namespace torch_promote
