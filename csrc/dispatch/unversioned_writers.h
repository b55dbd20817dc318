// file: ops that write weights without increasing their version
#pragma once

#include <array>

namespace torch_promote {

// The fused optimizers, and FSDP2's op that gathers shards into the unsharded weights. Their wrappers record the
// tensors that they write to, so that the caches drop those tensors' casts; see NOTE [ Unversioned writes ].
inline constexpr std::array kUnversionedWriters = {
    "aten::_fused_adagrad_",       "aten::_fused_adagrad_.tensor_lr",
    "aten::_fused_adam_",          "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_",         "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",           "aten::_fused_sgd_.tensor_lr",
    "fsdp::split_with_sizes_copy",
};

// Registers the wrappers on ADInplaceOrView, the key on which PyTorch increases versions. PyTorch has no kernel there
// for these ops. The wrappers run in every thread, inside and outside of regions, also under no_grad and in inference
// mode.
void register_unversioned_writers();

} // namespace torch_promote
