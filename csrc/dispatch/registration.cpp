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
ForkSafeMutex& registration_mutex() {
  static auto* instance = new ForkSafeMutex; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Created at import: see NOTE [ Fork ].
[[maybe_unused]] const ForkSafeMutex& registration_mutex_at_import = registration_mutex();

OpNumber add_boxed(const std::string& op, const std::string& overload, Closed closed = Closed::no) {
  const size_t colons = op.find("::");
  TORCH_CHECK_VALUE(colons != std::string::npos, "an op's name needs a namespace, as in 'aten::mm'; got '", op, "'");
  const OpNumber number = count_of_op_numbers();
  library_on_autocast_key(op.substr(0, colons).c_str())
      .impl(join_overload(op.substr(colons + 2), overload).c_str(), boxed_kernel(number, closed));
  return add_op_number(join_overload(op, overload));
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
  // The dispatcher reports this file name as the owner of a kernel; torch_promote/native/loader.py looks for it.
  return *new torch::Library(torch::Library::IMPL, name_space, kAutocastKey, "torch_promote", __LINE__);
}

OpNumber register_op(const std::string& op, const std::string& overload) {
  const std::lock_guard<std::mutex> lock(registration_mutex());
  if (const auto known = find_op_number(join_overload(op, overload))) {
    return *known;
  }
  check_free(op, overload);
  return add_boxed(op, overload);
}

OpNumber number_for_promotion(
    const std::string& op, const std::string& overload, const std::function<void(OpNumber)>& register_kernel) {
  const std::lock_guard<std::mutex> lock(registration_mutex());
  if (const auto known = find_op_number(join_overload(op, overload))) {
    return *known;
  }
  check_free(op, overload);
  register_kernel(count_of_op_numbers());
  return add_op_number(join_overload(op, overload));
}

void register_closed_ops() {
  const std::lock_guard<std::mutex> lock(registration_mutex());
  for (const char* name : kClosedOps) {
    add_boxed(name, "", Closed::yes);
  }
}

} // namespace torch_promote
