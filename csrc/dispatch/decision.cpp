// file: the policies of calls inside kernels, and the error for a banned op
#include "dispatch/decision.h"

#include "policy/op_table.h"

#include <c10/util/Exception.h>

#include <string>

namespace torch_promote {

void keep_casts_of_stock(std::array<PolicyByte, kNumDevices>& policies, OpNumber op) {
  for (const Device device : {Device::cpu, Device::cuda}) {
    PolicyByte& policy = policies[static_cast<size_t>(device)];
    if (is_casting(policy) && policy != stock_policy_table().lookup(device, op)) {
      policy = to_byte(CastPolicy::fallthrough);
    }
  }
}

void raise_banned(OpNumber op, Device device) {
  const std::string name = op_name(op);
  const std::string device_name = c10::DeviceTypeName(device_type_of(device), /*lower_case=*/true);
  const bool by_stock = stock_policy_table().lookup(device, op) == to_byte(CastPolicy::banned);
  std::string remedy =
      "To run it anyway, use a nested `my_autocast(enabled=False)` and inputs of the dtype you want, or give the op "
      "another policy in this region's overrides.";
  if (op == number_of(OpEntry::binary_cross_entropy)) {
    remedy =
        "A sigmoid in half precision saturates before the loss takes its logarithm. Use "
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the sigmoid's input instead. " +
        remedy;
  }
  const char* why = by_stock ? "its results are unsafe there. " : "the current policy bans it. ";
  TORCH_CHECK(false, name, " is banned under autocast on ", device_name, ": ", why, remedy);
}

} // namespace torch_promote
