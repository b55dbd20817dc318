// file: registers kernels on kAutocastKey for the ops outside the table
#include "dispatch/registration.h"

#include "dispatch/boxed_wrapper.h"
#include "policy/dispatch_key.h"
#include "policy/fork_safe_mutex.h"
#include "policy/op_numbers.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <mutex>

namespace torch_promote {

namespace {

// Held while an op gets its kernel and its number, so that an op with a number always has its kernel.
ForkSafeMutex& registration_mutex = *new ForkSafeMutex; // never destroyed: threads may outlive static destructors

void add_kernel(const std::string& op, const std::string& overload, OpNumber number, Closed closed) {
  const size_t colons = op.find("::");
  TORCH_CHECK_VALUE(colons != std::string::npos, "an op's name needs a namespace, as in 'aten::mm'; got '", op, "'");
  library_on_autocast_key(op.substr(0, colons))
      .impl(join_overload(op.substr(colons + 2), overload).c_str(), boxed_kernel(number, closed));
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

torch::Library& library_on_autocast_key(const std::string& name_space) {
  // The dispatcher reports this file name as the owner of a kernel; torch_promote/loader.py looks for it.
  return *new torch::Library(
      torch::Library::IMPL, name_space, kAutocastKey, "torch_promote", static_cast<uint32_t>(__LINE__));
}

OpNumber register_op(const std::string& op, const std::string& overload) {
  return register_op(op, overload, [&](OpNumber number) { add_kernel(op, overload, number, Closed::no); });
}

OpNumber register_op(
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
    add_kernel(name, "", next_op_number(), Closed::yes);
    add_op_number(name);
  }
}

} // namespace torch_promote
