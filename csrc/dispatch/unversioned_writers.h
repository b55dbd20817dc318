// file: ops that write weights without bumping their version
#pragma once

#include <array>

namespace torch_promote {

// The fused optimizers, and FSDP2's gathering of shards into the unsharded weights. Nothing of a weight shows that one
// of them has written it, so they have a kernel on our key that drops the casts of what they write.
constexpr std::array kUnversionedWriters = {
    "aten::_fused_adagrad_",       "aten::_fused_adagrad_.tensor_lr",
    "aten::_fused_adam_",          "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_",         "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",           "aten::_fused_sgd_.tensor_lr",
    "fsdp::split_with_sizes_copy",
};

} // namespace torch_promote
