// file: the sizes of what the extension keeps for the whole process, so that a test sees them grow
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace torch_promote {

// Called at import, once for each container that lives as long as the process. `size` locks what guards it.
bool note_registry(const char* name, size_t (*size)());

// The number of elements of each, by name.
std::map<std::string, size_t> registry_sizes();

} // namespace torch_promote
