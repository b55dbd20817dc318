// file: the op entries' names and default policies, and the numbers of all ops that may have a policy
#include "policy/op_table.h"

#include "policy/process.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_map>
#include <vector>

namespace torch_promote {

std::string OpEntryInfo::overload_name() const {
  return *overload == '\0' ? op : std::string(op) + "." + overload;
}

std::string OpEntryInfo::name() const {
  return "aten::" + overload_name();
}

void PolicyTable::put(Device device, OpNumber op, PolicyByte policy) {
  if (op < kNumOpEntries) {
    entries[op][static_cast<size_t>(device)] = policy;
    return;
  }
  const size_t index = op - kNumOpEntries;
  if (index >= extra.size()) {
    extra.resize(index + 1);
  }
  extra[index][static_cast<size_t>(device)] = policy;
}

const std::array<OpEntryInfo, kNumOpEntries>& op_entries() {
  static const std::array<OpEntryInfo, kNumOpEntries> entries = {{
#define ROW(op, overload, cpu, cuda, xpu, mps, ...) \
  OpEntryInfo{#op, #overload, {CastPolicy::cpu, CastPolicy::cuda, CastPolicy::xpu, CastPolicy::mps}, #__VA_ARGS__},
#include "op_policies.def"
#undef ROW
  }};
  return entries;
}

const PolicyTable& stock_policy_table() {
  static const PolicyTable table = [] {
    define_flex_attention();
    PolicyTable result;
    for (size_t entry = 0; entry < kNumOpEntries; ++entry) {
      const OpEntryInfo& info = op_entries()[entry];
      const std::string name = std::string("aten::") + info.op;
      const auto op = c10::Dispatcher::singleton().findOp({name, info.overload});
      for (const Device device : kDevices) {
        const CastPolicy policy = info.policies[static_cast<size_t>(device)];
        const bool listed = policy != CastPolicy::fallthrough && op.has_value() &&
                            op->hasKernelForDispatchKey(kDeviceKeys[static_cast<size_t>(device)].key);
        result.put(device, static_cast<OpNumber>(entry), to_byte(listed ? policy : CastPolicy::unlisted));
      }
    }
    return result;
  }();
  return table;
}

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

OpNumbers& op_numbers = *new OpNumbers; // never destroyed; see NOTE [ Fork ]

} // namespace

std::optional<OpNumber> find_op_number(const std::string& name) {
  const Lock lock(op_numbers.mutex);
  const auto found = op_numbers.by_name.find(name);
  return found == op_numbers.by_name.end() ? std::nullopt : std::optional(found->second);
}

OpNumber add_op_number(const std::string& name) {
  const Lock lock(op_numbers.mutex);
  return op_numbers.add(name);
}

OpNumber next_op_number() {
  const Lock lock(op_numbers.mutex);
  return static_cast<OpNumber>(op_numbers.names.size());
}

std::string op_name(OpNumber op) {
  const Lock lock(op_numbers.mutex);
  return op_numbers.names.at(op);
}

} // namespace torch_promote
