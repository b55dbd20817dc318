// file: the dispatch key that this library's kernels are registered on
#pragma once

#include <c10/core/DispatchKey.h>

namespace torch_promote {

constexpr c10::DispatchKey kAutocastKey = c10::DispatchKey::AutocastPrivateUse1;

} // namespace torch_promote
