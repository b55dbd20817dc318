// file: the wrapper of each op outside the table, with the schema read at run time
#pragma once

#include "policy/op_table.h"

#include <ATen/core/boxing/BoxedKernel.h>
#include <torch/library.h>

namespace torch_promote {

// Whether the op bumps the version of the tensors that it writes. If not, each call drops the cached casts of these.
enum class Writes : bool { versioned, unversioned };

// Whether the ops that the op calls count as inside its kernel in inference mode too; see NOTE [ Inside kernels ].
enum class Closed : bool { no, yes };

// The kernel of the op with this number.
c10::BoxedKernel boxed_kernel_of(OpNumber op, Writes writes);
torch::CppFunction boxed_kernel(OpNumber op, Writes writes, Closed closed);

} // namespace torch_promote
