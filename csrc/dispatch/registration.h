// file: registers kernels on kAutocastKey for the ops outside the table
#pragma once

#include "policy/op_table.h"

#include <torch/library.h>

#include <string>
#include <utility>

namespace torch_promote {

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
