// file: a promotion rule as lookup tables, with the options of its region
#include "promotion/rule.h"

#include "policy/process.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/Exception.h>

#include <deque>
#include <utility>

namespace torch_promote {

namespace {

// Never destroyed; see NOTE [ Fork ]. The mutex guards the rules, and their tables that are computed later.
ForkSafeMutex& rules_mutex = *new ForkSafeMutex;
std::deque<Promotion>& rules = *new std::deque<Promotion>;

uint64_t hash_of(const std::string& name, const PromotionOptions& options, const PromotionTables& tables) {
  Hash hash;
  hash.mix(name);
  for (const uint64_t value : {uint64_t{options.matmul}, uint64_t{options.lint}, uint64_t{options.lint_handler}}) {
    hash.mix(value);
  }
  hash.mix(tables.content);
  return hash.value();
}

c10::ScalarType default_dtype_now() {
  return c10::typeMetaToScalarType(c10::get_default_dtype());
}

} // namespace

Promotion::Promotion(
    uint32_t number_,
    std::string name_,
    PromotionOptions options_,
    c10::ScalarType default_dtype,
    PromotionTables tables)
    : number(number_),
      name(std::move(name_)),
      options(options_),
      content(hash_of(name, options, tables)),
      first_(new PromotionTables(tables)) {
  by_default_dtype_[static_cast<size_t>(default_dtype)] = first_;
}

const PromotionTables& Promotion::tables() const {
  const c10::ScalarType dtype = default_dtype_now();
  const auto& place = by_default_dtype_[static_cast<size_t>(dtype)];
  if (place.load(std::memory_order_acquire) == nullptr) {
    ask_for_tables(*this, dtype);
  }
  const PromotionTables* found = place.load(std::memory_order_acquire);
  TORCH_CHECK(found != nullptr, "torch_promote: the rule '", name, "' has no tables for ", dtype);
  return *found;
}

void Promotion::put_tables(c10::ScalarType default_dtype, PromotionTables tables) const {
  const Lock lock(rules_mutex);
  auto& place = by_default_dtype_[static_cast<size_t>(default_dtype)];
  if (place.load() == nullptr) {
    place.store(new PromotionTables(tables), std::memory_order_release); // lives as long as the rule
  }
}

DtypeCode Promotion::of_many(uint64_t dtypes) const {
  const std::pair key(dtypes, default_dtype_now());
  {
    const Lock lock(rules_mutex);
    const auto known = many_.find(key);
    if (known != many_.end()) {
      return known->second;
    }
  }
  const DtypeCode found = ask_for_common_dtype(*this, dtypes);
  const Lock lock(rules_mutex);
  many_.emplace(key, found);
  return found;
}

uint32_t register_promotion(
    const std::string& name,
    const PromotionOptions& options,
    c10::ScalarType default_dtype,
    const PromotionTables& tables) {
  const Lock lock(rules_mutex);
  const auto number = static_cast<uint32_t>(rules.size() + 1);
  rules.emplace_back(number, name, options, default_dtype, tables);
  return number;
}

const Promotion& promotion_of(uint32_t number) {
  const Lock lock(rules_mutex);
  TORCH_CHECK_INDEX(number > 0 && number <= rules.size(), "torch_promote: no promotion has the number ", number);
  return rules[number - 1];
}

} // namespace torch_promote
