// file: the kernel that our key has for each op that is no row
#pragma once

#include "policy/op_table.h"

#include <ATen/core/boxing/BoxedKernel.h>
#include <torch/library.h>

namespace torch_promote {

// Whether what the op writes can be told by the tensors' versions. If not, the cache forgets casts of it at each call.
enum class Writes : bool { as_the_version_says, unseen };

// The kernel for the op with this number. It does what a row's wrapper does, with the schema read at run time.
c10::BoxedKernel boxed_kernel_of(OpNumber op, Writes writes);
torch::CppFunction boxed_kernel(OpNumber op, Writes writes);

} // namespace torch_promote
