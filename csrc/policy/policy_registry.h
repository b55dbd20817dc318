// file: the changes of policy and the policy tables that regions of this process use or have used lately
#pragma once

#include "policy/op_table.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <compare>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_promote {

// One op's policy on one device type.
struct Override {
  OpNumber op;
  Device device;
  PolicyByte policy;

  auto operator<=>(const Override& other) const = default;
};

// What a region does to the policy in force around it.
struct PolicyChange {
  enum class Base : uint8_t {
    around,     // adds to the policy around
    registered, // replaces it: starts from stock's policy and the policies of `register_policy`
    stock,      // replaces it: starts from stock's policy
  };

  Base base = Base::around;
  std::optional<PromotionReference> promotion; // nothing: that of the policy around
  std::vector<Override> overrides;

  auto operator<=>(const PolicyChange& other) const = default;
};

// NOTE [ What the registry keeps ]
// A program may make regions with other overrides, or with another promotion rule, at every step, so the registry keeps
// a bounded number of changes and of tables, and drops those that were used longest ago.
// - A change is used by its number: in the packed spec of a region object, which may also be a constant of a compiled
//   graph, and in checkpoints. Nothing tells how many of these there are, so the registry keeps the last kMostChanges.
//   Numbers are not used again: a region whose change was dropped raises.
// - A table is used by the open regions that hold a PolicyPtr to it. Threads to which PyTorch carries a fingerprint
//   hold the table that they found last. Of tables that nobody holds, the registry keeps the last kMostTables: a task
//   may have been started in a region which has ended since.
constexpr size_t kMostChanges = 16384;
constexpr size_t kMostTables = 1024;

// A table in the registry.
struct KeptTable : PolicyTable {
  explicit KeptTable(const PolicyTable& table) : PolicyTable(table) {}
  mutable std::atomic<uint32_t> holders{0}; // from 0 to 1 only under the registry's mutex
  mutable uint64_t used = 0;                // the registry's clock when it was used last
};

// Keeps a table. Stock's table is always there, so holding it costs nothing.
class PolicyPtr {
 public:
  PolicyPtr() = default;
  // The table is stock's, or the caller holds it or the registry's mutex.
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

// Returns the number of a change. Equal changes have one number, and the change that changes nothing is number 0.
uint32_t intern_change(PolicyChange change);

// Whether the registry still has a change, which then counts as used now.
bool touch_change(uint32_t change);

// Returns a change; the one that changes nothing, if the registry has dropped it.
PolicyChange find_policy_change(uint32_t change);

// Returns the table that a change makes of `around`. Equal tables are one object.
PolicyPtr compose(const PolicyTable* around, uint32_t change);

// Whether a change sets the promotion rule, as regions of `promotion` do.
bool sets_promotion(uint32_t change);

// Drops the changes and tables with a promotion rule. Returns false, and drops none, if somebody holds one of them.
bool drop_promotion_changes(const Promotion* rule);

// Returns the number of the change that turns any table into this one.
uint32_t change_to(const PolicyTable& table);

// The policies that differ from stock's. (The promotion rule is not among them.)
std::vector<Override> overrides_of(const PolicyTable& table);

// Sets the policy that outermost regions start from, and the policies of `register_policy`, which every region has that
// does not override them. Open regions keep their policy. If it raises, nothing is changed.
void set_defaults(uint32_t registered, uint32_t policy);
PolicyPtr default_policy_table();

// How many changes and tables the registry keeps.
std::pair<size_t, size_t> registry_sizes();

// NOTE [ Policy fingerprint ]
// PyTorch does not know our policy tables, yet three parts of it have to tell policies apart:
// - Dynamo must recompile a function that it compiled under another policy. It guards on the enabled flag and the dtype
//   of each Autocast device.
// - AOTAutograd's cache on disk must not serve what was compiled under another policy. Its key holds the dtypes of the
//   enabled devices.
// - The autograd engine's device threads, and tasks of at::launch, must find the policy of the thread that called them.
//   at::ThreadLocalState carries the dispatch keys and the autocast dtypes to them.
// So a region whose policy is not stock's writes a hash of the table, its fingerprint, into the autocast dtypes of
// device types that this library does not serve. Under the stock policy these slots keep their values, and kAutocastKey
// alone tells our regions from stock's.
//
// Why not a guard of our own: a guard on a global or a thread-local covers only frames that read it, and the frames
// that are compiled are the user's. Installing it in every frame means replacing OutputGraph.init_ambient_guards, which
// is private and differs between releases; it would do nothing for the other two, which the slots serve as well.
//
// What could collide: a backend that has tensors on one of these device types and autocasts them would read a wrong
// dtype, inside regions with such a policy. A fingerprint has 25 bits. Within a process, find_or_add salts the second
// of two tables with equal ones. Two processes that share a cache on disk cannot do so; therefore the cache's key also
// gets a digest of the whole policy (torch_promote/integrations/compile.py, _complete_disk_cache_keys).
constexpr std::array<c10::DeviceType, std::tuple_size_v<Fingerprint>> kSlots = {
    c10::DeviceType::PrivateUse1, // kAutocastKey's device type; its dtype shows whether there is a fingerprint
    c10::DeviceType::IPU,         c10::DeviceType::MAIA, c10::DeviceType::HPU, c10::DeviceType::MTIA,
};

// The first slot's dtype where there is no fingerprint: PyTorch's default for PrivateUse1, and never part of one.
constexpr c10::ScalarType kNoFingerprint = c10::ScalarType::Half;

// The table with this fingerprint; stock's if none has.
PolicyPtr find_policy(const Fingerprint& fingerprint);

} // namespace torch_promote
