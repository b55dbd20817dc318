// file: registers kernels on kAutocastKey for the ops outside the table
#pragma once

#include "policy/op_table.h"

#include <torch/library.h>

#include <array>
#include <functional>
#include <string>

namespace torch_promote {

// Ops whose kernels call ops that compute, and read the results as the dtype that they passed. They have a kernel on
// kAutocastKey that tells these calls from others in inference mode; see NOTE [ Inside kernels ]. Found by running
// PyTorch's op database under every casting policy in inference mode (tests/helpers/override_sweep.py).
inline constexpr std::array kClosedOps = {"aten::linalg_matrix_exp"};

// Registers the kernels of kClosedOps.
void register_closed_ops();

// A library for implementations on kAutocastKey. It is never destroyed: TORCH_LIBRARY_IMPL would unregister each kernel
// as the process ends, which takes time and serves nobody.
torch::Library& library_on_autocast_key(const char* name_space);

// Returns the number of an overload; an overload without a number gets one, and a boxed kernel on kAutocastKey, for the
// rest of the process. `op` is qualified ("aten::add"), `overload` "" for the default overload. Raises if the
// dispatcher has no such overload, or if another library has registered a kernel for it on kAutocastKey.
OpNumber register_op(const std::string& op, const std::string& overload);

// Returns the number of an overload. For one without a number, `register_kernel` first registers a kernel on
// kAutocastKey for the number that it gets. Raises as `register_op` does.
OpNumber number_for_promotion(
    const std::string& op, const std::string& overload, const std::function<void(OpNumber)>& register_kernel);

} // namespace torch_promote
