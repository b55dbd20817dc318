// file: registers kernels on kAutocastKey for the ops outside the table
#include "dispatch/registration.h"

#include "dispatch/boxed_wrapper.h"
#include "policy/dispatch_key.h"
#include "policy/fork_safe_mutex.h"
#include "policy/op_numbers.h"
#include "policy/policy_registry.h"
#include "region/named_use.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_promote {

namespace {

// Held while an op gets its kernel and its number, so that an op with a number always has its kernel.
ForkSafeMutex& registration_mutex = *new ForkSafeMutex; // never destroyed: threads may outlive static destructors

// A kernel of register_op.
struct BoxedOp {
  c10::OperatorName name;
  std::unique_ptr<torch::Library> library; // has the kernel
  bool was_gone = false;                   // when register_op last looked
};

// Guarded by registration_mutex.
std::unordered_map<OpNumber, BoxedOp>& boxed_ops() {
  static auto* instance = new std::unordered_map<OpNumber, BoxedOp>; // never destroyed: see library_on_autocast_key
  return *instance;
}

// How many kernels there are when register_op next looks for those whose op is gone.
constexpr size_t kFewestNewKernels = 256;
size_t look_for_gone_at = kFewestNewKernels;

// See NOTE [ Ops that are gone ].
void drop_gone_ops() {
  std::vector<OpNumber> gone;
  for (auto& [number, op] : boxed_ops()) {
    const bool is_gone = !c10::Dispatcher::singleton().findSchema(op.name).has_value();
    if (is_gone && op.was_gone) {
      gone.push_back(number);
    }
    op.was_gone = is_gone;
  }
  for (const OpNumber number : gone.empty() ? gone : drop_policies_of(gone)) {
    boxed_ops().erase(number); // with its kernel
    if (number < called_in_unknown_region.size()) {
      called_in_unknown_region[number] = false;
    }
    free_op_number(number);
  }
  look_for_gone_at = boxed_ops().size() + std::max(boxed_ops().size() / 4, kFewestNewKernels);
}

std::unique_ptr<torch::Library> library_of(const std::string& name_space) {
  // The dispatcher reports this file name as the owner of a kernel; torch_promote/native/loader.py looks for it.
  return std::make_unique<torch::Library>(
      torch::Library::IMPL, name_space, kAutocastKey, "torch_promote", static_cast<uint32_t>(__LINE__));
}

std::unique_ptr<torch::Library> add_kernel(
    const std::string& op, const std::string& overload, OpNumber number, Closed closed) {
  const size_t colons = op.find("::");
  TORCH_CHECK_VALUE(colons != std::string::npos, "an op's name needs a namespace, as in 'aten::mm'; got '", op, "'");
  auto library = library_of(op.substr(0, colons));
  library->impl(join_overload(op.substr(colons + 2), overload).c_str(), boxed_kernel(number, closed));
  return library;
}

void check_free(const std::string& op, const std::string& overload) {
  const auto handle = c10::Dispatcher::singleton().findSchema({op, overload});
  TORCH_CHECK_VALUE(handle.has_value(), "the dispatcher has no overload ", join_overload(op, overload));
  TORCH_CHECK(
      !handle->hasKernelForDispatchKey(kAutocastKey), join_overload(op, overload),
      " already has a kernel from another library on the dispatch key ", c10::toString(kAutocastKey),
      ", so torch_promote cannot give it a policy.");
}

} // namespace

torch::Library& library_on_autocast_key(const char* name_space) {
  return *library_of(name_space).release();
}

OpNumber register_op(const std::string& op, const std::string& overload) {
  const std::lock_guard<std::mutex> lock(registration_mutex);
  if (const auto known = find_op_number(join_overload(op, overload))) {
    if (const auto boxed = boxed_ops().find(*known); boxed != boxed_ops().end()) {
      boxed->second.was_gone = false;
    }
    return *known;
  }
  check_free(op, overload);
  if (boxed_ops().size() >= look_for_gone_at) {
    drop_gone_ops();
  }
  const OpNumber number = next_op_number();
  boxed_ops().emplace(number, BoxedOp{{op, overload}, add_kernel(op, overload, number, Closed::no)});
  return add_op_number(join_overload(op, overload));
}

OpNumber number_for_promotion(
    const std::string& op, const std::string& overload, const std::function<void(OpNumber)>& register_kernel) {
  const std::lock_guard<std::mutex> lock(registration_mutex);
  if (const auto known = find_op_number(join_overload(op, overload))) {
    return *known;
  }
  check_free(op, overload);
  register_kernel(next_op_number());
  return add_op_number(join_overload(op, overload));
}

void register_closed_ops() {
  const std::lock_guard<std::mutex> lock(registration_mutex);
  for (const char* name : kClosedOps) {
    (void)add_kernel(name, "", next_op_number(), Closed::yes).release();
    add_op_number(name);
  }
}

} // namespace torch_promote
