// file: the policy table in force in this thread
#include "region/current_policy.h"

#include "policy/fingerprint.h"
#include "policy/torch_declarations.h"

namespace torch_promote {

const PolicyTable& policy_of_carried_state() {
  Fingerprint digits{};
  for (size_t slot = 0; slot < digits.size(); ++slot) {
    digits[slot] = at::autocast::get_autocast_dtype(kSlots[slot]);
    if (digits[0] == kNoFingerprint) {
      return stock_policy_table();
    }
  }
  // An op looks up the policy several times. The pointer also keeps the table alive until this thread runs under
  // another policy.
  static thread_local Fingerprint found_for{};
  static thread_local PolicyPtr found;
  if (found.get() == nullptr || found_for != digits) {
    found = find_policy(digits);
    found_for = digits;
    if (found.get() == &stock_policy_table()) { // the table was dropped, and may be created again later
      found = PolicyPtr();
      return stock_policy_table();
    }
  }
  return *found;
}

} // namespace torch_promote
