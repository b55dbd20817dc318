// file: observes which ops a composite op calls with autocast off
#include "dispatch/look_inside.h"

#include "policy/op_numbers.h"
#include "region/frames.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>

namespace torch_promote {

namespace {

// The one that observes in this thread.
constinit thread_local const LookInside* tls_look = nullptr;

// What a region has noted, if it is of interest which ops a call of an op calls: overrides of the region name an op
// that has met no call, and neither they nor those of regions inside it set the policy of the call. Otherwise null.
NamedUse* interested(const Frame& frame, const PolicyTable& table, OpNumber op, Device device) {
  NamedUse* use = frame.named.get();
  const bool is = use != nullptr && use->named->any_uncalled() && !use->named->overrides(op) &&
                  frame.policy->lookup(device, op) == table.lookup(device, op);
  return is ? use : nullptr;
}

// Whether an override asks for something else than the policy under which the call runs. One that asks for the same had
// its effect.
bool asks_for_more(const NamedOp& named, const Decision& decision) {
  Decision wanted = decision;
  wanted.policy = named.policy;
  const auto dtype_of = [](const Decision& one) { return target_dtype(one, [] { return at::ScalarType::Undefined; }); };
  const at::ScalarType dtype = dtype_of(wanted);
  return wanted.policy != decision.policy && (dtype == at::ScalarType::Undefined || dtype != dtype_of(decision));
}

} // namespace

LookInside::LookInside(const PolicyTable& table, OpNumber op, const Decision& decision)
    : table_(table), op_(op), decision_(decision) {
  if (tls_look != nullptr || c10::impl::TorchDispatchModeTLS::any_modes_set()) { // a compiler's, for example
    return;
  }
  bool looks = false;
  for (const Frame& frame : open_frames()) {
    NamedUse* use = interested(frame, table, op, decision.device);
    if (use == nullptr) {
      continue;
    }
    OuterOp& outer = use->outer_op(op);
    ++outer.runs;
    if (outer.looks != 0 && use->named->looks.load(std::memory_order_relaxed) > 0) {
      --outer.looks;
      use->named->looks.fetch_sub(1, std::memory_order_relaxed);
      looks = true;
    }
  }
  if (looks) {
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_call).scopes({at::RecordScope::FUNCTION}));
    held_ = PolicyPtr(&table_);
    tls_look = this;
  }
}

LookInside::~LookInside() {
  if (callback_.has_value()) {
    tls_look = nullptr;
    at::removeCallback(*callback_);
  }
}

std::unique_ptr<at::ObserverContext> LookInside::on_call(const at::RecordFunction& call) {
  if (tls_look != nullptr && !inside_kernel()) {
    const auto name = call.operator_name();
    const auto number =
        name.has_value() ? find_op_number(join_overload(name->name, name->overload_name)) : std::nullopt;
    if (number.has_value()) {
      tls_look->see(*number);
    }
  }
  return nullptr;
}

void LookInside::see(OpNumber called) const {
  const auto contains = [called](const std::vector<OpNumber>& ops) {
    return std::find(ops.begin(), ops.end(), called) != ops.end();
  };
  for (const Frame& frame : open_frames()) {
    NamedUse* use = interested(frame, table_, op_, decision_.device);
    if (use == nullptr) {
      continue;
    }
    auto& inside = use->outer_op(op_).inside;
    for (size_t place = 0; place < use->named->ops.size(); ++place) {
      const NamedOp& named = use->named->ops[place];
      const bool in_force = table_.lookup(decision_.device, named.overloads.front()) == named.policy;
      const bool is_known =
          std::any_of(inside.begin(), inside.end(), [place](auto& one) { return one.first == place; });
      if (!use->named->is_called(place) && in_force && !is_known &&
          (contains(named.overloads) || contains(named.fused)) && asks_for_more(named, decision_)) {
        inside.emplace_back(place, called);
      }
    }
  }
}

} // namespace torch_promote
