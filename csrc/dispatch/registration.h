// file: registers kernels on kAutocastKey for the ops outside the table
#pragma once

#include "policy/op_table.h"

#include <torch/library.h>

#include <array>
#include <functional>
#include <string>

namespace torch_promote {

// Ops whose kernels call ops that compute, and read the results as the dtype that they passed. Their kernel on
// kAutocastKey marks these calls in inference mode; see NOTE [ Inside kernels ]. Found by running PyTorch's op database
// under every casting policy in inference mode.
inline constexpr std::array kClosedOps = {"aten::linalg_matrix_exp"};

// Registers the kernels of kClosedOps.
void register_closed_ops();

// A library for implementations on kAutocastKey. It is never destroyed: TORCH_LIBRARY_IMPL would unregister each kernel
// at process exit, which takes time and has no use.
torch::Library& library_on_autocast_key(const std::string& name_space);

// Returns the number of an overload. An overload without one gets a number and a boxed kernel on kAutocastKey. `op` is
// qualified ("aten::add"); `overload` is "" for the default overload. Raises if the dispatcher has no such overload, or
// if another library has registered a kernel for it on kAutocastKey.
OpNumber register_op(const std::string& op, const std::string& overload);

// The same, with a kernel that `register_kernel` registers; it gets the overload's new number.
OpNumber register_op(
    const std::string& op, const std::string& overload, const std::function<void(OpNumber)>& register_kernel);

} // namespace torch_promote
