// file: observes which ops a composite op calls with autocast off
#pragma once

#include "dispatch/decision.h"
#include "policy/policy_registry.h"
#include "region/named_use.h"

#include <ATen/record_function.h>

#include <optional>

namespace torch_promote {

// Counts a call of an op that runs under a policy of its own, for the regions whose overrides name an op that has met
// no call; see NOTE [ Unused overrides ]. For the first calls, it has PyTorch's RecordFunction report the ops that the
// op calls. In that case it is on, and the wrapper makes the call while the object lives.
class LookInside {
 public:
  LookInside(const PolicyTable& table, OpNumber op, const Decision& decision);
  LookInside(const LookInside&) = delete;
  LookInside& operator=(const LookInside&) = delete;
  LookInside(LookInside&&) = delete;
  LookInside& operator=(LookInside&&) = delete;
  ~LookInside();

  bool is_on() const {
    return callback_.has_value();
  }

 private:
  static std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call);
  void see(OpNumber called) const;

  const PolicyTable& table_;
  PolicyPtr held_; // the op may end the region that holds the table
  const OpNumber op_;
  const Decision& decision_;
  std::optional<at::CallbackHandle> callback_;
};

} // namespace torch_promote
