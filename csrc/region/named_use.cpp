// file: which ops that a region's overrides name met a call in it, and which calls of other ops they had no effect on
#include "region/named_use.h"

#include "policy/op_numbers.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

namespace torch_promote {

namespace {

constexpr int kMostLooksAtOneOp = 8;

bool may_be_called_in_unknown_region(const NamedOp& named) {
  return std::any_of(named.overloads.begin(), named.overloads.end(), [](OpNumber op) {
    return op >= called_in_unknown_region.size() || called_in_unknown_region[op].load(std::memory_order_relaxed);
  });
}

bool is_composite(OpNumber op) {
  const std::string name = op_name(op);
  const size_t dot = name.find('.');
  const auto handle = c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
  return handle.has_value() && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

std::string without_overload(const std::string& name) {
  return name.substr(0, name.find('.'));
}

// The op as the overrides name it, as far as its overloads show.
std::string title_of(const NamedOp& named) {
  const std::string name = op_name(named.overloads.front());
  return named.overloads.size() == 1 ? name : without_overload(name);
}

} // namespace

OuterOp& NamedUse::outer_op(OpNumber op) {
  const auto known = std::find_if(outer.begin(), outer.end(), [op](const OuterOp& one) { return one.op == op; });
  return known != outer.end() ? *known
                              : outer.emplace_back(OuterOp{op, 0, is_composite(op) ? kMostLooksAtOneOp : 0, {}});
}

std::vector<Unused> unused_in(const NamedUse& use) {
  std::vector<Unused> unused;
  for (size_t place = 0; place < use.named->ops.size(); ++place) {
    const NamedOp& named = use.named->ops[place];
    if (use.named->is_called(place) || may_be_called_in_unknown_region(named)) {
      continue;
    }
    for (const OuterOp& outer : use.outer) {
      const auto inside =
          std::find_if(outer.inside.begin(), outer.inside.end(), [place](auto& one) { return one.first == place; });
      if (inside != outer.inside.end()) {
        unused.emplace_back(
            title_of(named), without_overload(op_name(outer.op)), outer.runs,
            without_overload(op_name(inside->second)));
      }
    }
  }
  return unused;
}

} // namespace torch_promote
