// file: the sizes of what the extension keeps for the whole process, so that a test sees them grow
#include "policy/registry_sizes.h"

#include <utility>
#include <vector>

namespace torch_promote {

namespace {

using NamedSize = std::pair<const char*, size_t (*)()>;

std::vector<NamedSize>& named_sizes() {
  static auto* instance = new std::vector<NamedSize>; // never destroyed: threads may outlive static destructors
  return *instance;
}

} // namespace

bool note_registry(const char* name, size_t (*size)()) {
  named_sizes().emplace_back(name, size);
  return true;
}

std::map<std::string, size_t> registry_sizes() {
  std::map<std::string, size_t> sizes;
  for (const auto& [name, size] : named_sizes()) {
    sizes[name] = size();
  }
  return sizes;
}

} // namespace torch_promote
