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

// Collectives, which do not bump versions either. An autocast region is a rare place for one.
inline constexpr std::array kCollectives = {
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::allgather_",
    "c10d::allgather_coalesced_",
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_",
    "c10d::allreduce_coalesced_",
    "c10d::alltoall_",
    "c10d::alltoall_base_",
    "c10d::broadcast_",
    "c10d::gather_",
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::reduce_",
    "c10d::reduce_scatter_",
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::scatter_",
    "_c10d_functional::all_reduce_",
    "_c10d_functional::all_reduce_coalesced_",
    "_c10d_functional::broadcast_",
};

// From now on, calls of these ops drop the cached casts of what they write wherever they are called: outside of
// regions, where autocast is off, in inference mode and in every thread. PyTorch has no kernels for them on the key
// where an op bumps versions, ADInplaceOrView, and ours go there. The cache modes that keep casts longer than stock
// need them; a program that does not use these keeps PyTorch's dispatcher as it is.
void watch_unversioned_writers();

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
