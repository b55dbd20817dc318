// file: the callbacks of cache/check.h, which call hooks in Python
#pragma once

#include <pybind11/pybind11.h>

namespace torch_promote {

// `hooks` is the module torch_promote.checking.check_casts. It is never released.
void set_cast_check_hooks(pybind11::object hooks);

} // namespace torch_promote
