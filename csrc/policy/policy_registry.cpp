// file: the policy changes and policy tables that this process has used recently
#include "policy/policy_registry.h"

#include "policy/fingerprint.h"
#include "policy/fork_safe_mutex.h"
#include "policy/gone_ops.h"
#include "policy/registry_sizes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace torch_promote {

namespace {

struct KeptChange {
  const PolicyChange* change; // the key in Registry::numbers
  uint64_t used;              // the clock when it was used last
  std::shared_ptr<const NamedOps> named;
  uint32_t holders = 0;
};

using Tables = std::map<Fingerprint, std::unique_ptr<const KeptTable>>;
// Keyed by the table that a change starts from, the surrounding promotion rule, and the change.
using Composed = std::map<std::tuple<const PolicyTable*, PromotionReference, uint32_t>, const PolicyTable*>;

struct Registry {
  ForkSafeMutex mutex;
  uint64_t clock = 0;
  uint64_t serials = 0;
  uint32_t last_number = 0;
  std::map<PolicyChange, uint32_t> numbers{{{}, 0}};
  std::unordered_map<uint32_t, KeptChange> changes; // does not contain number 0, the empty change
  size_t trim_changes_at = kMostChanges + kMostChanges / 8;
  Tables tables;
  size_t trim_tables_at = kMostTables + kMostTables / 8;
  Composed composed;
  PolicyPtr registered{&stock_policy_table()};
  PolicyPtr by_default{&stock_policy_table()};
  std::atomic<bool> default_is_stock{true};
};

Registry& registry() {
  static auto* instance = new Registry; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Created at import: see NOTE [ Fork ].
[[maybe_unused]] const Registry& registry_at_import = registry();

template <auto container>
size_t registry_size_of() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return (registry().*container).size();
}

[[maybe_unused]] const bool noted_policies = note_registry("policy changes", &registry_size_of<&Registry::changes>) &&
                                             note_registry("policy tables", &registry_size_of<&Registry::tables>) &&
                                             note_registry("compositions", &registry_size_of<&Registry::composed>);

bool is_free(const Tables::value_type& entry) {
  return entry.second->holders.load(std::memory_order_acquire) == 0;
}

// Drops the tables without holders, except for the `most` that were used last.
void trim_tables(Registry& all, size_t most) {
  std::vector<uint64_t> used;
  for (const auto& entry : all.tables) {
    if (is_free(entry)) {
      used.push_back(entry.second->used);
    }
  }
  if (used.size() <= most) {
    return;
  }
  const auto first_kept = used.end() - static_cast<std::ptrdiff_t>(most);
  std::nth_element(used.begin(), first_kept, used.end());
  const uint64_t oldest = first_kept == used.end() ? all.clock + 1 : *first_kept;
  all.composed.clear(); // it points to tables
  std::erase_if(all.tables, [oldest](const auto& entry) { return is_free(entry) && entry.second->used < oldest; });
}

void erase_change(Registry& all, std::unordered_map<uint32_t, KeptChange>::iterator place) {
  all.numbers.erase(all.numbers.find(*place->second.change));
  all.changes.erase(place);
}

template <class Test>
void erase_changes_if(Registry& all, const Test& test) {
  for (auto place = all.changes.begin(); place != all.changes.end();) {
    const auto next = std::next(place);
    if (test(*place->second.change)) {
      erase_change(all, place);
    }
    place = next;
  }
}

// Drops the changes without holders, except for the `most` that were used last.
void trim_changes(Registry& all, size_t most) {
  std::vector<std::pair<uint64_t, uint32_t>> used;
  used.reserve(all.changes.size());
  for (const auto& [number, kept] : all.changes) {
    if (kept.holders == 0) {
      used.emplace_back(kept.used, number);
    }
  }
  if (used.size() <= most) {
    return;
  }
  const auto first_kept = used.end() - static_cast<std::ptrdiff_t>(most);
  std::nth_element(used.begin(), first_kept, used.end());
  std::for_each(used.begin(), first_kept, [&all](const auto& old) { erase_change(all, all.changes.find(old.second)); });
  all.composed.clear();
}

void make_room(Registry& all) {
  if (all.tables.size() >= all.trim_tables_at) {
    trim_tables(all, kMostTables);
    all.trim_tables_at = std::max(all.tables.size(), kMostTables) + kMostTables / 8; // some may have holders
  }
}

void make_room_for_change(Registry& all) {
  if (all.changes.size() >= all.trim_changes_at) {
    trim_changes(all, kMostChanges);
    all.trim_changes_at = std::max(all.changes.size(), kMostChanges) + kMostChanges / 8; // some may have holders
  }
}

// Returns the stored table that is equal to this one. If there is none, stores this one.
const KeptTable* find_or_add(Registry& all, PolicyTable& table) {
  make_room(all);
  for (int salt = 0; salt < 256; ++salt) {
    table.fingerprint = fingerprint_of(table, static_cast<PolicyByte>(salt));
    auto place = all.tables.find(table.fingerprint);
    if (place == all.tables.end()) {
      table.serial = ++all.serials;
      place = all.tables.emplace(table.fingerprint, std::make_unique<const KeptTable>(table)).first;
    }
    if (*place->second == table) {
      return place->second.get();
    }
  }
  TORCH_CHECK( // GCOVR_EXCL_LINE: equal rules are one object
      false,
      "torch_promote: 256 policies in use have the same fingerprint, so torch.compile cannot distinguish another one. "
      "They differ only in their promotion rules, which have equal names and tables: create the rule once.");
}

bool casts_beyond_stock(const PolicyTable& table) {
  const std::vector<Override> overrides = overrides_of(table);
  return std::any_of(overrides.begin(), overrides.end(), [](const Override& one) { return is_casting(one.policy); });
}

KeptChange& find_change(Registry& all, uint32_t number) {
  const auto place = all.changes.find(number);
  TORCH_CHECK(number <= all.last_number, "torch_promote: there is no policy change with the number ", number);
  TORCH_CHECK(
      place != all.changes.end(), "torch_promote: the policy of this region was dropped, because ", kMostChanges,
      " others have been used since this one. Make the region anew: my_autocast(...) or promotion(...) with the same "
      "arguments.");
  place->second.used = ++all.clock;
  return place->second;
}

// `registered` is the table of the policies of `register_policy`. The caller holds the mutex.
PolicyPtr compose_locked(Registry& all, const PolicyTable* registered, const PolicyTable* around, uint32_t change) {
  if (change == 0) {
    return PolicyPtr(around);
  }
  const PolicyChange& wanted = *find_change(all, change).change;
  const PolicyTable* base = wanted.base == PolicyChange::Base::around       ? around
                            : wanted.base == PolicyChange::Base::registered ? registered
                                                                            : &stock_policy_table();
  const std::tuple key(base, around->promotion, change);
  auto known = all.composed.find(key);
  if (known == all.composed.end()) {
    PolicyTable table = *base;
    table.promotion = wanted.promotion.value_or(around->promotion);
    for (const Override& one : wanted.overrides) {
      table.put(one.device, one.op, one.policy);
    }
    table.casts_beyond_stock = casts_beyond_stock(table);
    table.serial = 0;
    const PolicyTable* result = &stock_policy_table();
    if (!(table == stock_policy_table())) {
      result = find_or_add(all, table);
    }
    if (all.composed.size() >= kMostCompositions) {
      all.composed.clear();
    }
    known = all.composed.emplace(key, result).first;
  }
  if (known->second->serial != 0) {
    static_cast<const KeptTable*>(known->second)->used = ++all.clock;
    if (base->notes_calls.get() || !wanted.named.empty()) {
      known->second->notes_calls.set();
    }
  }
  return PolicyPtr(known->second);
}

std::shared_ptr<const NamedOps> named_ops_of(const PolicyChange& change) {
  if (change.named.empty()) {
    return nullptr;
  }
  const auto result = std::make_shared<NamedOps>(change.named);
  for (const Override& one : change.overrides) {
    result->overridden.push_back(one.op);
  }
  std::sort(result->overridden.begin(), result->overridden.end());
  return result;
}

} // namespace

uint32_t intern_change(PolicyChange change) {
  constexpr uint32_t kLastNumber = (1U << 24) - 1; // the largest that fits in a packed region spec
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.numbers.find(change);
  if (known != all.numbers.end()) {
    if (known->second != 0) {
      all.changes.at(known->second).used = ++all.clock;
    }
    return known->second;
  }
  TORCH_CHECK(
      all.last_number < kLastNumber, "torch_promote: this process has made ", kLastNumber,
      " different sets of overrides. Make the regions outside of the loop, or fewer different ones.");
  make_room_for_change(all);
  const uint32_t number = ++all.last_number;
  std::map<PolicyChange, uint32_t> made;
  made.emplace(std::move(change), number);
  auto node = made.extract(made.begin());
  all.changes.emplace(number, KeptChange{&node.key(), ++all.clock, named_ops_of(node.key())});
  all.numbers.insert(std::move(node)); // cannot fail, so both have it or neither
  return number;
}

HeldChange::HeldChange(uint32_t change) : change_(change) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (change != 0) {
    ++find_change(all, change).holders;
  }
}

HeldChange::~HeldChange() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto held = all.changes.find(change_);
  if (held != all.changes.end()) { // not for 0
    --held->second.holders;
  }
}

bool touch_change(uint32_t change) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.changes.find(change);
  if (known != all.changes.end()) {
    known->second.used = ++all.clock;
  }
  return change == 0 || known != all.changes.end();
}

PolicyChange find_policy_change(uint32_t change) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.changes.find(change);
  return known == all.changes.end() ? PolicyChange{} : *known->second.change;
}

PolicyPtr compose(const PolicyTable* around, uint32_t change, std::shared_ptr<const NamedOps>* named) {
  if (change == 0) {
    return PolicyPtr(around);
  }
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  PolicyPtr composed = compose_locked(all, all.registered.get(), around, change);
  if (named != nullptr) {
    *named = all.changes.at(change).named;
  }
  return composed;
}

void forget_named_calls() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [number, kept] : all.changes) {
    if (kept.named != nullptr) {
      kept.named->forget();
    }
  }
}

uint32_t change_to(const PolicyTable& table) {
  return intern_change({PolicyChange::Base::stock, table.promotion, overrides_of(table)});
}

bool sets_promotion(uint32_t change) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.changes.find(change);
  return known != all.changes.end() && known->second.change->promotion.has_value();
}

bool drop_promotion_changes(const Promotion* rule) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto has_rule = [rule](const auto& entry) { return entry.second->promotion.rule == rule; };
  const auto sets_rule = [rule](const PolicyChange& change) {
    return change.promotion.has_value() && change.promotion->rule == rule;
  };
  const auto holds_rule = [&](const auto& entry) {
    return entry.second.holders != 0 && sets_rule(*entry.second.change);
  };
  if (std::any_of(all.tables.begin(), all.tables.end(), [&](auto& one) { return has_rule(one) && !is_free(one); }) ||
      std::any_of(all.changes.begin(), all.changes.end(), holds_rule)) {
    return false;
  }
  all.composed.clear();
  std::erase_if(all.tables, has_rule);
  erase_changes_if(all, sets_rule);
  return true;
}

std::vector<OpNumber> drop_policies_of(const std::vector<OpNumber>& gone) {
  GoneOps ops(gone);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [number, kept] : all.changes) {
    if (kept.holders != 0) {
      ops.hold_those_in(*kept.change);
    }
  }
  for (const auto& entry : all.tables) {
    if (!is_free(entry)) {
      ops.hold_those_in(*entry.second);
    }
  }
  erase_changes_if(all, [&ops](const PolicyChange& change) { return ops.are_free_in(change); });
  all.composed.clear();
  std::erase_if(all.tables, [&ops](const auto& entry) { return ops.are_free_in<PolicyTable>(*entry.second); });
  return ops.free();
}

void set_defaults(uint32_t registered, uint32_t policy) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  PolicyPtr with_registered = compose_locked(all, nullptr, &stock_policy_table(), registered);
  PolicyPtr by_default = compose_locked(all, with_registered.get(), with_registered.get(), policy);
  // Nothing below raises.
  all.registered = std::move(with_registered);
  all.default_is_stock = by_default.get() == &stock_policy_table();
  all.by_default = std::move(by_default);
}

PolicyPtr default_policy_table() {
  Registry& all = registry();
  if (all.default_is_stock.load(std::memory_order_relaxed)) {
    return PolicyPtr(&stock_policy_table());
  }
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.by_default;
}

PolicyPtr find_policy(const Fingerprint& fingerprint) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto table = all.tables.find(fingerprint);
  if (table == all.tables.end()) {
    return PolicyPtr(&stock_policy_table());
  }
  table->second->used = ++all.clock;
  return PolicyPtr(table->second.get());
}

} // namespace torch_promote
