// file: the number of each op that may have a policy, and its name
#include "policy/op_numbers.h"

#include "policy/fork_safe_mutex.h"
#include "policy/registry_sizes.h"

#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch_promote {

namespace {

struct OpNumbers {
  ForkSafeMutex mutex;
  std::unordered_map<std::string, OpNumber> by_name;
  std::vector<std::string> names; // by number

  OpNumbers() {
    for (const OpEntryInfo& entry : op_entries()) {
      add(entry.name());
    }
  }
  OpNumber add(const std::string& name) {
    names.push_back(name);
    return by_name.emplace(name, static_cast<OpNumber>(names.size() - 1)).first->second;
  }
};

OpNumbers& op_numbers = *new OpNumbers; // never destroyed: threads may outlive static destructors

[[maybe_unused]] const bool noted_op_numbers = note_registry("op numbers", [] {
  const std::lock_guard<std::mutex> lock(op_numbers.mutex);
  return op_numbers.names.size();
});

} // namespace

std::optional<OpNumber> find_op_number(const std::string& name) {
  const std::lock_guard<std::mutex> lock(op_numbers.mutex);
  const auto found = op_numbers.by_name.find(name);
  return found == op_numbers.by_name.end() ? std::nullopt : std::optional(found->second);
}

OpNumber add_op_number(const std::string& name) {
  const std::lock_guard<std::mutex> lock(op_numbers.mutex);
  return op_numbers.add(name);
}

OpNumber next_op_number() {
  const std::lock_guard<std::mutex> lock(op_numbers.mutex);
  return static_cast<OpNumber>(op_numbers.names.size());
}

bool is_op_number(OpNumber op) {
  const std::lock_guard<std::mutex> lock(op_numbers.mutex);
  return op < op_numbers.names.size();
}

std::string op_name(OpNumber op) {
  const std::lock_guard<std::mutex> lock(op_numbers.mutex);
  return op_numbers.names.at(op);
}

} // namespace torch_promote
