// file: the policy table in force in this thread
#include "region/current_policy.h"

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
  return find_policy(digits);
}

} // namespace torch_promote
