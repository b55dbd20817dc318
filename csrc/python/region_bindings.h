// file: regions as Python calls them: plain C functions, without the cost of a generic argument caster
#pragma once

#include "region/region.h"

#include <Python.h>

#include <array>
#include <optional>

namespace torch_promote {

// Whether an event loop runs in this thread; nothing, with Python's error set, if that cannot be told.
std::optional<bool> loop_runs();

// What a packed spec in Python means; nothing if it is none.
std::optional<RegionSpec> parse_spec(PyObject* text);
PyObject* spell_spec(uint64_t packed);

// device_type, dtype, enabled, cache_enabled
using PlainArguments = std::array<PyObject*, 4>;

// The spec of the plainest region, `my_autocast("cpu")` with at most a dtype that the CPU supports; nothing for others.
std::optional<uint64_t> pack_plain(const PlainArguments& arguments);

// As `enter`; false, with Python's error set, if it threw.
bool enter_or_raise(const void* owner, const RegionSpec& spec);

// As `exit`; nothing, with Python's error set, if it threw.
std::optional<bool> exit_or_raise(const void* owner);

// Adds the functions to the module. False, with Python's error set, if it cannot.
bool add_region_functions(PyObject* module);

} // namespace torch_promote
