// file: a promotion rule as lookup tables, with the options of its region
#include "promotion/rule.h"

#include "policy/fork_safe_mutex.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/Exception.h>

#include <deque>
#include <utility>

namespace torch_promote {

namespace {

struct Promotions {
  ForkSafeMutex mutex;
  std::deque<Promotion> all;
};

Promotions& promotions = *new Promotions; // never destroyed: threads may outlive static destructors

// Guards the tables of every rule that are computed later.
ForkSafeMutex& tables_mutex = *new ForkSafeMutex;

uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 1099511628211ULL; // FNV-1a
}

uint64_t hash_of(const std::string& name, const PromotionOptions& options, const PromotionTables& tables) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : name) {
    hash = mix(hash, static_cast<uint8_t>(c));
  }
  hash = mix(hash, options.matmul ? 1 : 0);
  hash = mix(hash, options.lint);
  hash = mix(hash, options.lint_handler);
  return mix(hash, tables.content);
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
    promotion_callbacks.put_tables(*this, dtype);
  }
  const PromotionTables* found = place.load(std::memory_order_acquire);
  TORCH_CHECK(found != nullptr, "torch_promote: the rule '", name, "' has no tables for ", dtype);
  return *found;
}

void Promotion::put_tables(c10::ScalarType default_dtype, PromotionTables tables) const {
  const std::lock_guard<std::mutex> lock(tables_mutex);
  auto& place = by_default_dtype_[static_cast<size_t>(default_dtype)];
  if (place.load() == nullptr) {
    place.store(new PromotionTables(tables), std::memory_order_release); // lives as long as the rule
  }
}

DtypeCode Promotion::of_many(uint64_t dtypes) const {
  const std::pair key(dtypes, default_dtype_now());
  {
    const std::lock_guard<std::mutex> lock(tables_mutex);
    const auto known = many_.find(key);
    if (known != many_.end()) {
      return known->second;
    }
  }
  const DtypeCode found = promotion_callbacks.common_dtype(*this, dtypes);
  const std::lock_guard<std::mutex> lock(tables_mutex);
  many_.emplace(key, found);
  return found;
}

uint32_t register_promotion(
    const std::string& name,
    const PromotionOptions& options,
    c10::ScalarType default_dtype,
    const PromotionTables& tables) {
  const std::lock_guard<std::mutex> lock(promotions.mutex);
  const auto number = static_cast<uint32_t>(promotions.all.size() + 1);
  promotions.all.emplace_back(number, name, options, default_dtype, tables);
  return number;
}

const Promotion& promotion_of(uint32_t number) {
  const std::lock_guard<std::mutex> lock(promotions.mutex);
  TORCH_CHECK_INDEX(
      number > 0 && number <= promotions.all.size(), "torch_promote: no promotion has the number ", number);
  return promotions.all[number - 1];
}

} // namespace torch_promote
