// file: counts definitions of ops
#include "dispatch/op_definitions.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <memory>

namespace torch_promote {

namespace {

constinit std::atomic<uint64_t> definitions = 0;

// The dispatcher calls it under its lock.
class Counter final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& /*op*/) override {
    ++definitions;
  }
  void onOperatorDeregistered(const c10::OperatorHandle& /*op*/) override {
    ++definitions;
  }
};

// At import. Never removed: the dispatcher may be destroyed before static objects of this library.
[[maybe_unused]] const auto& counting =
    *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Counter>()));

} // namespace

uint64_t op_definitions() {
  return definitions.load();
}

} // namespace torch_promote
