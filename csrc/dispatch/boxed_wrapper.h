// file: the wrapper of each op outside the table, with the schema read at run time
#pragma once

#include "policy/op_table.h"

#include <ATen/core/boxing/BoxedKernel.h>
#include <torch/library.h>

namespace torch_promote {

// Whether the op's calls count as inside its kernel in inference mode as well; see NOTE [ Inside kernels ].
enum class Closed : bool { no, yes };

// The kernel of the op with this number.
c10::BoxedKernel boxed_kernel_of(OpNumber op);
torch::CppFunction boxed_kernel(OpNumber op, Closed closed = Closed::no);

} // namespace torch_promote
