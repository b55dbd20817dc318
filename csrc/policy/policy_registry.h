// file: the policy changes and policy tables that this process has used recently
#pragma once

#include "policy/op_table.h"
#include "policy/policy_change.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch_promote {

// NOTE [ What the registry keeps ]
// A program may create regions with new overrides or promotion rules at every step, so the registry keeps a bounded
// number of changes and of tables, and drops the least recently used ones.
// - A change is referenced by its number, in the packed spec of a region. Objects that enter regions later hold a
//   HeldChange, which keeps the change; so does Python for the graphs of torch.compile. Of the changes that nothing
//   holds, the registry keeps the last kMostChanges. Numbers are not reused: a region whose change was dropped raises.
// - A table is referenced by the open regions that hold a PolicyPtr to it. A thread to which PyTorch carries a
//   fingerprint holds the table that it found last. Of the tables without holders, the registry keeps the last
//   kMostTables: a task may have been started in a region that has ended since.
// It drops an eighth of these numbers at once, which amortizes the cost of finding the oldest. What changes make of
// tables is looked up in a third container, which is emptied then, and when it is full.
constexpr size_t kMostChanges = 16384;
constexpr size_t kMostTables = 1024;
constexpr size_t kMostCompositions = 16384;

// A table in the registry.
struct KeptTable : PolicyTable {
  explicit KeptTable(const PolicyTable& table) : PolicyTable(table) {}
  mutable std::atomic<uint32_t> holders{0}; // goes from 0 to 1 only under the registry's mutex
  mutable uint64_t used = 0;                // the registry's clock at the last use
};

// A reference to a table that keeps it alive. Stock's table is never dropped and is not counted.
class PolicyPtr {
 public:
  PolicyPtr() = default;
  // The table must be stock's, or the caller must hold it or the registry's mutex.
  explicit PolicyPtr(const PolicyTable* table) : table_(table) {
    if (is_counted()) {
      holders().fetch_add(1, std::memory_order_relaxed);
    }
  }
  PolicyPtr(const PolicyPtr& other) : PolicyPtr(other.table_) {}
  PolicyPtr(PolicyPtr&& other) noexcept : table_(std::exchange(other.table_, nullptr)) {}
  PolicyPtr& operator=(PolicyPtr other) noexcept {
    std::swap(table_, other.table_);
    return *this;
  }
  ~PolicyPtr() {
    if (is_counted()) {
      holders().fetch_sub(1, std::memory_order_release);
    }
  }
  const PolicyTable* get() const {
    return table_;
  }
  const PolicyTable& operator*() const {
    return *table_;
  }
  const PolicyTable* operator->() const {
    return table_;
  }

 private:
  bool is_counted() const {
    return table_ != nullptr && table_->serial != 0;
  }
  std::atomic<uint32_t>& holders() const {
    return static_cast<const KeptTable*>(table_)->holders;
  }

  const PolicyTable* table_ = nullptr;
};

// Returns the number of a change. Equal changes have the same number, and the empty change has number 0.
uint32_t intern_change(PolicyChange change);

// Keeps a change as long as this lives.
class HeldChange {
 public:
  // Raises if the registry has dropped the change.
  explicit HeldChange(uint32_t change);
  HeldChange(const HeldChange&) = delete;
  HeldChange& operator=(const HeldChange&) = delete;
  ~HeldChange();

 private:
  uint32_t change_;
};

// Marks a change as used now. Returns false if the registry has dropped it.
bool touch_change(uint32_t change);

// Returns a change, or the empty change if the registry has dropped it.
PolicyChange find_policy_change(uint32_t change);

// For tests: all ops that changes name count as not called.
void forget_named_calls();

// Returns the table that a change makes of `around`. Equal tables are one object. `named`, if it is given, gets the ops
// that the change names; null for none.
PolicyPtr compose(const PolicyTable* around, uint32_t change, std::shared_ptr<const NamedOps>* named = nullptr);

// Whether a change sets the promotion rule, as `promotion` does.
bool sets_promotion(uint32_t change);

// Drops the changes and tables that contain this promotion rule. Returns false, and drops nothing, if one has a holder.
bool drop_promotion_changes(const Promotion* rule);

// Of ops that do not exist any more, those that no policy refers to which something holds. Drops the other changes and
// tables that refer to these.
std::vector<OpNumber> drop_policies_of(const std::vector<OpNumber>& gone);

// Returns the number of the change that turns any table into this one.
uint32_t change_to(const PolicyTable& table);

// Sets the policy that outermost regions start from, and the policies of `register_policy`, which apply in every region
// that does not override them. Open regions keep their policy. If it raises, nothing has changed.
void set_defaults(uint32_t registered, uint32_t policy);
PolicyPtr default_policy_table();

// The table with this fingerprint, or stock's if there is none.
PolicyPtr find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
