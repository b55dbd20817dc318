// file: the kernels on kAutocastKey, and their registration: typed for the op entries, boxed for other ops, and for the
// ops that promote
#pragma once

#include "policy/op_table.h"
#include "promotion/call.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/BoxedKernel.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace torch_promote {

// Registers a kernel for every op entry, and a fallthrough for every other op; see typed_wrapper.cpp.
void register_typed_wrappers();

// --- Ops outside the table; see boxed_wrapper.cpp

// The kernel of the op with this number.
c10::BoxedKernel boxed_kernel_of(OpNumber op);

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
//
// `register_kernel` registers another kernel than a boxed one; it gets the overload's new number.
OpNumber register_op(
    const std::string& op, const std::string& overload, const std::function<void(OpNumber)>& register_kernel = nullptr);

// A call of `linear` under a float8 policy, to be made with autocast off. `lower` is the autocast dtype. No value: the
// call does not fit, and runs as under lower_precision_fp. Defined in python/callbacks.cpp.
std::optional<at::Tensor> linear_in_float8(
    PolicyByte policy,
    at::ScalarType lower,
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias);

// How often an op was defined or destroyed in this process. A name or a pattern selects the same ops as long as this is
// the same.
uint64_t op_definitions();

// --- Ops that promote; see promotion_kernels.cpp

// Makes an op promote, and registers a kernel for it on kAutocastKey unless it has one. `functional` is the functional
// overload of an op that writes ("aten::add.Tensor"), or ""; PromotingOp describes the others. Raises like register_op.
void register_promoting_op(
    const std::string& op,
    const std::string& overload,
    const std::string& functional,
    uint64_t participants,
    uint8_t computes,
    int rounding_mode,
    bool each,
    bool matmul,
    bool real);

} // namespace torch_promote
