// file: puts our kernels on our key
#pragma once

#include <torch/library.h>

namespace torch_promote {

// A library for implementations on our key, never destroyed: TORCH_LIBRARY_IMPL would take every kernel off again, one
// by one, as the process ends, which nobody needs.
torch::Library& library_on_our_key(const char* name_space);

// A wrapper for every row, and a fallthrough for every other op.
void register_wrappers();

// The ops that write weights without bumping their version.
void register_unversioned_writers();

} // namespace torch_promote
