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
// under every casting policy in inference mode (tests/helpers/override_sweep.py).
inline constexpr std::array kClosedOps = {"aten::linalg_matrix_exp"};

// Registers the kernels of kClosedOps.
void register_closed_ops();

// NOTE [ Ops that are gone ]
// A program may define ops under new names again and again, give them policies, and destroy them. Our kernel keeps the
// dispatcher's entry for such an op, which takes several kilobytes, and each policy table has a place for each op
// number. So after some hundred new kernels, register_op looks for those whose op is gone. If no policy that something
// holds refers to the op, it destroys the kernel, and another op gets the number. An op that is defined again under the
// same name until then keeps its kernel and its policies. An op has to be found gone twice, since another thread may
// have asked for its number just before.

// A library for implementations on kAutocastKey. It is never destroyed: TORCH_LIBRARY_IMPL would unregister each kernel
// at process exit, which takes time and has no use.
torch::Library& library_on_autocast_key(const char* name_space);

// Returns the number of an overload. An overload without one gets a number and a boxed kernel on kAutocastKey. `op` is
// qualified ("aten::add"); `overload` is "" for the default overload. Raises if the dispatcher has no such overload, or
// if another library has registered a kernel for it on kAutocastKey.
OpNumber register_op(const std::string& op, const std::string& overload);

// Returns the number of an overload. If it has none, calls `register_kernel` with its new number to register a kernel
// on kAutocastKey. Raises like `register_op`.
OpNumber number_for_promotion(
    const std::string& op, const std::string& overload, const std::function<void(OpNumber)>& register_kernel);

} // namespace torch_promote
