// file: the policy table in force in this thread
#include "region/current_policy.h"

#include "policy/fingerprint.h"
#include "policy/of_this_thread.h"
#include "policy/torch_declarations.h"

namespace torch_promote {

namespace {

struct Carried {
  Fingerprint fingerprint{};
  PolicyPtr policy;
};

} // namespace

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
  Carried& found = of_this_thread<Carried>();
  if (found.policy.get() == nullptr || found.fingerprint != digits) {
    found = {digits, find_policy(digits)};
    if (found.policy.get() == &stock_policy_table()) { // nothing holds the table; it may be made again later
      found = {};
      return stock_policy_table();
    }
  }
  return *found.policy;
}

} // namespace torch_promote
