// file: the wrapper of each op entry: finds the device and its policy, casts, calls the op
#pragma once

namespace torch_promote {

// Registers a wrapper for every op entry, and a fallthrough for every other op.
void register_typed_wrappers();

} // namespace torch_promote
