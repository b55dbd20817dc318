// file: ops that write weights without bumping their version
#pragma once

#include <array>

namespace torch_promote {

// The fused optimizers. Nothing of a weight shows that one of them has written it, so the cast cache is cleared when
// one runs inside a region.
constexpr std::array kUnversionedWriters = {
    "_fused_adagrad_",
    "_fused_adagrad_.tensor_lr",
    "_fused_adam_",
    "_fused_adam_.tensor_lr",
    "_fused_adamw_",
    "_fused_adamw_.tensor_lr",
    "_fused_sgd_",
    "_fused_sgd_.tensor_lr",
};

} // namespace torch_promote
