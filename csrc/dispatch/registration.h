// file: registers kernels on kAutocastKey for the ops outside the table
#pragma once

#include "policy/op_table.h"

#include <torch/library.h>

#include <array>
#include <string>
#include <utility>

namespace torch_promote {

// Ops that write weights without bumping their version: the fused optimizers, and FSDP2's op that gathers shards into
// the unsharded weights. The cast cache cannot detect these writes, so the ops have a kernel on kAutocastKey that drops
// the cached casts of what they write.
inline constexpr std::array kUnversionedWriters = {
    "aten::_fused_adagrad_",       "aten::_fused_adagrad_.tensor_lr",
    "aten::_fused_adam_",          "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_",         "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",           "aten::_fused_sgd_.tensor_lr",
    "fsdp::split_with_sizes_copy",
};

// Registers the kernels of kUnversionedWriters. The running PyTorch need not have these ops.
void register_unversioned_writers();

// A library for implementations on kAutocastKey. It is never destroyed: TORCH_LIBRARY_IMPL would unregister each kernel
// as the process ends, which takes time and serves nobody.
torch::Library& library_on_autocast_key(const char* name_space);

// Returns the number of an overload; an overload without a number gets one, and a boxed kernel on kAutocastKey, for the
// rest of the process. `op` is qualified ("aten::add"), `overload` "" for the default overload. Raises if the
// dispatcher has no such overload, or if another library has registered a kernel for it on kAutocastKey.
OpNumber register_op(const std::string& op, const std::string& overload);

// Returns the number of an overload, and whether the number is new: then the caller registers a kernel. Raises as
// `register_op` does.
std::pair<OpNumber, bool> number_for_promotion(const std::string& op, const std::string& overload);

} // namespace torch_promote
