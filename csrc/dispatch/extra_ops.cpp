// file: ops beyond the table's rows that have been given a policy: their numbers, names and kernels
#include "dispatch/extra_ops.h"

#include "dispatch/boxed_wrapper.h"
#include "dispatch/registration.h"
#include "region/region.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <vector>

namespace torch_promote {

namespace {

struct ExtraOps {
  std::mutex mutex;
  std::map<std::string, OpNumber> numbers; // of rows too
  std::vector<std::string> names;          // by number less kNumRows

  ExtraOps() {
    for (size_t row = 0; row < kNumRows; ++row) {
      numbers.emplace(rows()[row].name(), static_cast<OpNumber>(row));
    }
  }
};

ExtraOps& extra_ops() {
  static auto* instance = new ExtraOps; // never destroyed: threads may outlive static destructors
  return *instance;
}

std::string join(const std::string& op, const std::string& overload) {
  return overload.empty() ? op : op + "." + overload;
}

OpNumber add_name(const std::string& name) {
  const OpNumber number = static_cast<OpNumber>(kNumRows + extra_ops().names.size());
  extra_ops().names.push_back(name);
  extra_ops().numbers.emplace(name, number);
  return number;
}

OpNumber add(const std::string& op, const std::string& overload, Writes writes) {
  const OpNumber number = static_cast<OpNumber>(kNumRows + extra_ops().names.size());
  const size_t colons = op.find("::");
  TORCH_CHECK_VALUE(colons != std::string::npos, "an op's name has a namespace, as in 'aten::mm'; got '", op, "'");
  library_on_our_key(op.substr(0, colons).c_str())
      .impl(join(op.substr(colons + 2), overload).c_str(), boxed_kernel(number, writes));
  return add_name(join(op, overload));
}

void check_free(const std::string& op, const std::string& overload) {
  const auto handle = c10::Dispatcher::singleton().findSchema({op, overload});
  TORCH_CHECK_VALUE(handle.has_value(), "the dispatcher knows no overload ", join(op, overload));
  TORCH_CHECK(
      !handle->hasKernelForDispatchKey(kAutocastKey), join(op, overload),
      " has a kernel of another library's on the dispatch key ", c10::toString(kAutocastKey),
      ", so it cannot be given a policy here.");
}

} // namespace

OpNumber register_op(const std::string& op, const std::string& overload) {
  const std::lock_guard<std::mutex> lock(extra_ops().mutex);
  const auto known = extra_ops().numbers.find(join(op, overload));
  if (known != extra_ops().numbers.end()) {
    return known->second;
  }
  check_free(op, overload);
  return add(op, overload, Writes::as_the_version_says);
}

void register_unversioned_writer(const std::string& op, const std::string& overload) {
  const std::lock_guard<std::mutex> lock(extra_ops().mutex);
  add(op, overload, Writes::unseen);
}

std::pair<OpNumber, bool> number_for_promotion(const std::string& op, const std::string& overload) {
  const std::lock_guard<std::mutex> lock(extra_ops().mutex);
  const auto known = extra_ops().numbers.find(join(op, overload));
  if (known != extra_ops().numbers.end()) {
    return {known->second, false};
  }
  check_free(op, overload);
  return {add_name(join(op, overload)), true};
}

OpNumber number_of_ops() {
  const std::lock_guard<std::mutex> lock(extra_ops().mutex);
  return static_cast<OpNumber>(kNumRows + extra_ops().names.size());
}

std::string op_name(OpNumber op) {
  if (op < kNumRows) {
    return rows()[op].name();
  }
  const std::lock_guard<std::mutex> lock(extra_ops().mutex);
  return extra_ops().names.at(op - kNumRows);
}

} // namespace torch_promote
