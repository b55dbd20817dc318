// file: the wrapper of each op outside the table, with the schema read at run time
#pragma once

#include "policy/op_table.h"

#include <ATen/core/boxing/BoxedKernel.h>
#include <torch/library.h>

namespace torch_promote {

// Whether the op bumps the version of the tensors that it writes. If not, each call drops the cached casts of these.
enum class Writes : bool { versioned, unversioned };

// The kernel of the op with this number.
c10::BoxedKernel boxed_kernel_of(OpNumber op, Writes writes);
torch::CppFunction boxed_kernel(OpNumber op, Writes writes);

} // namespace torch_promote
