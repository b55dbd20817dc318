// file: the policy changes and policy tables that this process uses, and their fingerprints
#include "policy/policy_registry.h"

#include "policy/process.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

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

// Hashes the ops' names, because their numbers depend on the version of the table and on the order in which a program
// names other ops. `salt` is 0 unless another table of this process has that fingerprint.
Fingerprint fingerprint_of(const PolicyTable& table, PolicyByte salt) {
  std::map<std::string, OpPolicies> changed;
  for (const Override& change : overrides_of(table)) {
    changed[op_name(change.op)] = table.policies_of(change.op);
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

// A map of weak pointers. It drops those that have died whenever it has doubled.
template <class Map>
class WeakMap {
 public:
  // What the key has, or null.
  template <class Key>
  auto find(const Key& key) const {
    const auto place = map_.find(key);
    return place == map_.end() ? typename Map::mapped_type().lock() : place->second.lock();
  }
  template <class Key, class Pointer>
  void put(Key&& key, const Pointer& pointer) {
    if (map_.size() >= sweep_at_) {
      std::erase_if(map_, [](const auto& entry) { return entry.second.expired(); });
      sweep_at_ = 2 * std::max<size_t>(map_.size(), 32);
    }
    map_.insert_or_assign(std::forward<Key>(key), pointer);
  }
  size_t count() const {
    return static_cast<size_t>(
        std::count_if(map_.begin(), map_.end(), [](const auto& entry) { return !entry.second.expired(); }));
  }

 private:
  Map map_;
  size_t sweep_at_ = 64;
};

struct Registry {
  ForkSafeMutex mutex;
  std::atomic<bool> default_is_stock = true;
  std::atomic<uint32_t> last_number = 0; // of a change; written under the mutex
  uint64_t last_serial = 0;              // of a table
  PolicyPtr registered = hold(stock_policy_table());
  PolicyPtr by_default = hold(stock_policy_table());
  std::vector<PolicyPtr> kept_for_good;
  WeakMap<std::map<Fingerprint, std::weak_ptr<const PolicyTable>>> tables;
  WeakMap<std::map<PolicyChange, std::weak_ptr<const NumberedChange>>> changes;
  WeakMap<std::unordered_map<uint32_t, std::weak_ptr<const NumberedChange>>> numbers;
};

Registry& registry = *new Registry; // never destroyed; see NOTE [ Fork ]

// Returns the table that is equal to this one. If there is none, adds this one. The caller holds the mutex.
PolicyPtr find_or_add(PolicyTable& table) {
  for (int salt = 0; salt < 256; ++salt) {
    table.fingerprint = fingerprint_of(table, static_cast<PolicyByte>(salt));
    PolicyPtr known = registry.tables.find(table.fingerprint);
    if (known == nullptr) {
      table.serial = ++registry.last_serial;
      table.is_kept = false;
      known = std::make_shared<const PolicyTable>(table);
      registry.tables.put(table.fingerprint, known);
    }
    if (*known == table) {
      return known;
    }
  }
  TORCH_CHECK(
      false,
      "torch_promote: 256 policies in use have the same fingerprint, so torch.compile cannot distinguish another "
      "one. They differ only in their promotion rules, which have equal names and tables: create the rule once.");
}

// The caller holds the mutex.
PolicyPtr compose_locked(const PolicyPtr& around, const ChangePtr& change, const PolicyPtr& with_registered) {
  constexpr size_t kMostMade = 64; // a region object may be entered inside ever new ones
  if (change == nullptr) {
    return around;
  }
  const PolicyChange& wanted = change->change;
  const PolicyTable& base = wanted.base == PolicyChange::Base::around       ? *around
                            : wanted.base == PolicyChange::Base::registered ? *with_registered
                                                                            : stock_policy_table();
  const std::pair key(base.serial, around->promotion);
  auto& made = change->made;
  if (const auto known = made.find(key); known != made.end()) {
    return known->second;
  }
  PolicyTable table = base;
  table.promotion = wanted.promotion.value_or(around->promotion);
  table.module_tables = wanted.module_tables.value_or(base.module_tables);
  for (const Override& one : wanted.overrides) {
    table.put(one.device, one.op, one.policy);
  }
  const std::vector<Override> beyond = overrides_of(table);
  table.casts_beyond_stock =
      std::any_of(beyond.begin(), beyond.end(), [](const Override& one) { return is_casting(one.policy); });
  PolicyPtr result = table == stock_policy_table() ? hold(stock_policy_table()) : find_or_add(table);
  if (made.size() >= kMostMade) {
    made.clear();
  }
  made.emplace(key, result);
  return result;
}

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

ChangePtr intern_change(PolicyChange change) {
  constexpr uint32_t kLastNumber = (1U << 24) - 1; // the largest that fits in a packed region spec
  if (change == PolicyChange{}) {
    return nullptr;
  }
  const Lock lock(registry.mutex);
  if (ChangePtr known = registry.changes.find(change)) {
    return known;
  }
  TORCH_CHECK(
      registry.last_number < kLastNumber, "torch_promote: this process has made ", kLastNumber,
      " different sets of overrides. Make the regions outside of the loop, or fewer different ones.");
  auto made = std::make_shared<const NumberedChange>(++registry.last_number, std::move(change));
  registry.changes.put(made->change, made);
  registry.numbers.put(made->number, made);
  return made;
}

ChangePtr find_change(uint32_t number) {
  if (number == 0) {
    return nullptr;
  }
  const Lock lock(registry.mutex);
  ChangePtr change = registry.numbers.find(number);
  TORCH_CHECK(number <= registry.last_number, "torch_promote: there is no policy change with the number ", number);
  TORCH_CHECK(
      change != nullptr, "torch_promote: nothing holds the policy change with the number ", number,
      " any more. Make the region anew: my_autocast(...) or promotion(...) with the same arguments.");
  return change;
}

PolicyPtr compose(const PolicyPtr& around, const ChangePtr& change) {
  if (change == nullptr) {
    return around;
  }
  const Lock lock(registry.mutex);
  return compose_locked(around, change, registry.registered);
}

std::pair<size_t, size_t> policies_in_use() {
  const Lock lock(registry.mutex);
  return {registry.changes.count(), registry.tables.count()};
}

ChangePtr change_to(const PolicyTable& table) {
  return intern_change({PolicyChange::Base::stock, table.promotion, table.module_tables, overrides_of(table)});
}

void set_defaults(const ChangePtr& registered, const ChangePtr& policy) {
  const Lock lock(registry.mutex);
  const PolicyPtr stock = hold(stock_policy_table());
  PolicyPtr with_registered = compose_locked(stock, registered, stock);
  PolicyPtr by_default = compose_locked(with_registered, policy, with_registered);
  // Nothing below raises.
  registry.registered = std::move(with_registered);
  registry.default_is_stock = by_default.get() == &stock_policy_table();
  registry.by_default = std::move(by_default);
}

void keep_for_good(const PolicyTable& table) {
  const Lock lock(registry.mutex);
  if (!std::atomic_ref(table.is_kept).exchange(true)) {
    registry.kept_for_good.push_back(hold(table));
  }
}

PolicyPtr default_policy_table() {
  if (registry.default_is_stock.load(std::memory_order_relaxed)) {
    return hold(stock_policy_table());
  }
  const Lock lock(registry.mutex);
  return registry.by_default;
}

PolicyPtr find_policy(const Fingerprint& fingerprint) {
  const Lock lock(registry.mutex);
  const PolicyPtr table = registry.tables.find(fingerprint);
  return table != nullptr ? table : hold(stock_policy_table());
}

} // namespace torch_promote
