// file: the wrapper of each op outside the table, with the schema read at run time, and its registration
#include "cache/cached_cast.h"
#include "dispatch/cast_args.h"
#include "dispatch/decision.h"
#include "dispatch/kernels.h"
#include "policy/process.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace torch_promote {

namespace {

using c10::IValue;
using torch::jit::Stack;

// Whether the dispatcher ignores the tensors in an argument of this type. A custom op may take tensors in lists of
// lists, tuples, dicts and optional lists.
bool is_nested(const c10::Argument& argument, const IValue& value) {
  if (argument.real_type()->kind() == c10::TypeKind::OptionalType && value.isList()) {
    return true;
  }
  return value.isTuple() || value.isGenericDict() ||
         (value.isList() && !value.isTensorList() && !value.isOptionalTensorList());
}

template <class Test>
bool any_tensor(const IValue& value, const Test& test) {
  const auto in_here = [&test](const auto& element) { return any_tensor(IValue(element), test); };
  if (value.isTensor()) {
    return value.toTensor().defined() && test(value.toTensor());
  }
  if (value.isTuple()) {
    const auto& elements = value.toTupleRef().elements();
    return std::any_of(elements.begin(), elements.end(), in_here);
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    return std::any_of(dict.begin(), dict.end(), [&](const auto& item) { return any_tensor(item.value(), test); });
  }
  if (value.isList()) {
    const c10::ArrayRef<IValue> elements = value.toListRef();
    return std::any_of(elements.begin(), elements.end(), in_here);
  }
  return false;
}

// Returns the value with each tensor replaced by `map(tensor)`.
template <class Map>
IValue map_tensors(const IValue& value, const Map& map) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  }
  if (value.isTuple()) {
    std::vector<IValue> elements;
    for (const IValue& element : value.toTupleRef().elements()) {
      elements.push_back(map_tensors(element, map));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict mapped(dict.keyType(), dict.valueType());
    for (const auto& item : dict) {
      mapped.insert(item.key(), map_tensors(item.value(), map));
    }
    return mapped;
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList mapped(list.elementType());
    for (const IValue& element : value.toListRef()) {
      mapped.push_back(map_tensors(element, map));
    }
    return mapped;
  }
  return value;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// A wrapped Python number is a double as well, but must not be cast: the cast would round it.
bool is_floating_on(const at::Tensor& tensor, Device device) {
  return is_eligible(tensor, device) ||
         (tensor.scalar_type() == at::kDouble && tensor.device().type() == device_type_of(device) &&
          !tensor.unsafeGetTensorImpl()->is_wrapped_number());
}

// One call of an op: its schema's arguments, and their values on the stack.
class BoxedCall {
 public:
  BoxedCall(const c10::FunctionSchema& schema, Stack& stack)
      : arguments_(schema.arguments()), values_(stack.data() + (stack.size() - schema.arguments().size())) {}

  c10::DispatchKeySet nested_keys() const {
    c10::DispatchKeySet keys;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_nested(arguments_[i], values_[i])) {
        any_tensor(values_[i], [&keys](const at::Tensor& tensor) {
          keys = keys | tensor.key_set();
          return false;
        });
      }
    }
    return keys;
  }

  // The widest dtype among eligible tensors and tensor lists. As in the typed wrapper, optional ones do not count.
  at::ScalarType join(Device device) const {
    PromoteJoin join(device);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].real_type()->kind() == c10::TypeKind::OptionalType || values_[i].isOptionalTensorList()) {
        continue;
      }
      any_tensor(values_[i], [&join](const at::Tensor& tensor) {
        join.add(tensor);
        return false;
      });
    }
    return join.dtype();
  }

  bool starts_with_eligible(Device device) const {
    return !arguments_.empty() && values_[0].isTensor() && is_eligible(values_[0].toTensor(), device);
  }

  // Casts the tensors for which `needs` is true, in the order of the arguments, which becomes the order of the autograd
  // nodes. Returns false if it cast nothing.
  template <class Needs>
  bool cast(at::ScalarType dtype, const Needs& needs) {
    bool any = false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!is_written(arguments_[i]) && any_tensor(values_[i], needs)) {
        any = true;
        values_[i] = map_tensors(
            values_[i], [&](const at::Tensor& tensor) { return needs(tensor) ? cached_cast(tensor, dtype) : tensor; });
      }
    }
    return any;
  }

  // Casts the floating arguments to the dtype of the tensor that the op writes to. If the op writes to a list, lists of
  // its length go in step: each element is cast to the dtype of the written tensor at its place. Any other argument is
  // cast if all written tensors of the list have one dtype. Returns false if nothing was cast.
  bool match_written(Device device) {
    const std::vector<at::ScalarType> dtypes = written_dtypes(device);
    const bool are_one = std::all_of(dtypes.begin(), dtypes.end(), [&](auto dtype) { return dtype == dtypes[0]; });
    bool any = false;
    for (size_t i = 0; i < arguments_.size() && !dtypes.empty(); ++i) {
      bool cast = false;
      const auto match = [&](const at::Tensor& tensor, at::ScalarType dtype) {
        if (dtype == at::ScalarType::Undefined || tensor.scalar_type() == dtype || !is_floating_on(tensor, device)) {
          return tensor;
        }
        cast = true;
        return cached_cast(tensor, dtype);
      };
      IValue matched;
      if (is_written(arguments_[i])) {
        continue;
      }
      if (are_one) {
        matched = map_tensors(values_[i], [&](const at::Tensor& tensor) { return match(tensor, dtypes[0]); });
      } else if (values_[i].isTensorList() && values_[i].toListRef().size() == dtypes.size()) {
        std::vector<at::Tensor> list = values_[i].toTensorVector();
        std::transform(list.begin(), list.end(), dtypes.begin(), list.begin(), match);
        matched = std::move(list);
      }
      if (cast) {
        values_[i] = std::move(matched);
        any = true;
      }
    }
    return any;
  }

  void put_default_dtype() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto optional = arguments_[i].real_type()->cast<c10::OptionalType>();
      if (optional && optional->getElementType()->kind() == c10::TypeKind::ScalarTypeType && values_[i].isNone()) {
        values_[i] = at::kFloat;
      }
    }
  }

 private:
  // The dtypes of the tensors in the first argument that the op writes to; Undefined for those that are not floating.
  std::vector<at::ScalarType> written_dtypes(Device device) const {
    std::vector<at::ScalarType> dtypes;
    for (size_t i = 0; i < arguments_.size() && dtypes.empty(); ++i) {
      if (is_written(arguments_[i])) {
        any_tensor(values_[i], [&](const at::Tensor& tensor) {
          dtypes.push_back(is_floating_on(tensor, device) ? tensor.scalar_type() : at::ScalarType::Undefined);
          return false;
        });
      }
    }
    return dtypes;
  }

  const std::vector<c10::Argument>& arguments_;
  IValue* values_;
};

// Casts the arguments. Returns whether anything was cast.
bool cast_as(const Decision& decision, BoxedCall& call) {
  const Device device = decision.device;
  if (decision.policy == to_byte(CastPolicy::match_self)) {
    return call.match_written(device);
  }
  const at::ScalarType dtype = target_dtype(decision, [&] { return call.join(device); });
  return dtype != at::ScalarType::Undefined &&
         call.cast(dtype, [dtype, device](const at::Tensor& tensor) { return needs_cast(tensor, dtype, device); });
}

class BoxedKernel final : public c10::OperatorKernel {
 public:
  // `closed`: the op's calls count as inside its kernel in inference mode too; see NOTE [ Inside kernels ].
  BoxedKernel(OpNumber op, bool closed) : op_(op), closed_(closed) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    BoxedCall call(op.schema(), *stack);
    // Autocast casts first; the promotion rule sees the results.
    const PolicyTable& table = current_policy();
    const Promotion* promotion = table.promotion.rule;
    const PromotingOp* promoting = acted_on(promotion, op_);
    const PolicyPtr held =
        promoting == nullptr ? nullptr : hold(table); // a cast may run Python, which may end the region
    std::optional<InsideOp> inside;
    const auto promote = [&] {
      const Promoted outcome =
          promoting == nullptr ? Promoted::as_it_was : promote_call(*promoting, *promotion, *stack);
      if (promoting != nullptr && outcome != Promoted::done) {
        inside.emplace(*promoting, *stack);
      }
      return outcome;
    };
    const Decision decision = decide(table, op_, keys | call.nested_keys());
    if (decision.is_none()) {
      switch (promote()) {
        case Promoted::as_it_was:
          if (closed_) { // outside of inference mode, the autograd kernel does this
            const c10::impl::ExcludeDispatchKeyGuard in_kernel(c10::DispatchKey::ADInplaceOrView);
            op.redispatchBoxed(keys_without_policy(decision, keys).remove(c10::DispatchKey::ADInplaceOrView), stack);
            return;
          }
          op.redispatchBoxed(keys_without_policy(decision, keys), stack);
          return;
        case Promoted::cast:
          op.callBoxed(stack);
          return;
        case Promoted::done:
          return;
      }
    }
    if (decision.policy == to_byte(CastPolicy::banned)) {
      raise_banned(op_, decision.device);
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(decision.keys_off());
    const Scoped no_sharing(tls_results_may_alias, true); // the op may return a view of an argument
    const bool cast = cast_as(decision, call);
    const Promoted outcome = promote();
    if (outcome == Promoted::done) {
      return;
    }
    if (cast || outcome == Promoted::cast) {
      op.callBoxed(stack);
      return;
    }
    if (decision.policy == to_byte(CastPolicy::fp32_set_opt_dtype) && call.starts_with_eligible(decision.device)) {
      call.put_default_dtype();
    }
    if (decision.other_device_waits) { // the dispatcher has to compute the keys again
      op.callBoxed(stack);
      return;
    }
    op.redispatchBoxed(keys_after_policy(decision, keys), stack);
  }

 private:
  OpNumber op_;
  bool closed_;
};

} // namespace

void raise_banned(OpNumber op, Device device) {
  const std::string name = op_name(op);
  const std::string device_name = c10::DeviceTypeName(device_type_of(device), /*lower_case=*/true);
  const bool by_stock = stock_policy_table().lookup(device, op) == to_byte(CastPolicy::banned);
  std::string remedy =
      "To run it anyway, use a nested `my_autocast(enabled=False)` and inputs of the dtype you want, or give the op "
      "another policy in this region's overrides.";
  if (op == number_of(OpEntry::binary_cross_entropy)) {
    remedy =
        "A sigmoid in half precision saturates before the loss takes its logarithm. Use "
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the sigmoid's input instead. " +
        remedy;
  }
  const char* why = by_stock ? "its results are unsafe there. " : "the current policy bans it. ";
  TORCH_CHECK(false, name, " is banned under autocast on ", device_name, ": ", why, remedy);
}

c10::BoxedKernel boxed_kernel_of(OpNumber op) {
  return c10::BoxedKernel::makeFromFunctor(std::make_unique<BoxedKernel>(op, /*closed=*/false));
}

namespace {

// Held while an op gets its kernel and its number, so that an op with a number always has its kernel.
ForkSafeMutex& registration_mutex = *new ForkSafeMutex; // never destroyed; see NOTE [ Fork ]

void add_kernel(const std::string& op, const std::string& overload, OpNumber number, bool closed) {
  const size_t colons = op.find("::");
  TORCH_CHECK_VALUE(colons != std::string::npos, "an op's name needs a namespace, as in 'aten::mm'; got '", op, "'");
  library_on_autocast_key(op.substr(0, colons))
      .impl(
          join_overload(op.substr(colons + 2), overload).c_str(),
          torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel>(number, closed)));
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

OpNumber register_op(
    const std::string& op, const std::string& overload, const std::function<void(OpNumber)>& register_kernel) {
  const Lock lock(registration_mutex);
  if (const auto known = find_op_number(join_overload(op, overload))) {
    return *known;
  }
  check_free(op, overload);
  if (register_kernel != nullptr) {
    register_kernel(next_op_number());
  } else {
    add_kernel(op, overload, next_op_number(), /*closed=*/false);
  }
  return add_op_number(join_overload(op, overload));
}

void register_closed_ops() {
  const Lock lock(registration_mutex);
  for (const char* name : kClosedOps) {
    add_kernel(name, "", next_op_number(), /*closed=*/true);
    add_op_number(name);
  }
}

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
