// file: ops that write weights without bumping their version
#include "dispatch/unversioned_writers.h"

#include "dispatch/extra_ops.h"
#include "dispatch/registration.h"

#include <string_view>

namespace torch_promote {

void register_unversioned_writers() {
  for (const std::string_view name : kUnversionedWriters) {
    const size_t dot = name.find('.');
    register_unversioned_writer(
        std::string(name.substr(0, dot)), std::string(dot == name.npos ? "" : name.substr(dot + 1)));
  }
}

} // namespace torch_promote
