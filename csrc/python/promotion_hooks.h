// file: the callbacks of promotion/rule.h, which call hooks in Python
#pragma once

#include <pybind11/pybind11.h>

namespace torch_promote {

// Sets the object with the hooks (torch_promote/regions/promotion_tables.py) for the rest of the process.
void set_promotion_hooks(pybind11::object hooks);

} // namespace torch_promote
