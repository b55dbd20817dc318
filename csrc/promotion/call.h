// file: a call of an op that promotes: its operands, their common dtype under a rule, and what the rule does with it
#pragma once

#include "policy/dispatch_state.h"
#include "policy/op_table.h"
#include "policy/process.h"
#include "promotion/rule.h"
#include "region/region.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_promote {

// The dtype that an op computes in, given the common dtype of its operands.
enum class Computes : uint8_t {
  common,    // that dtype
  floats,    // that dtype, or a floating dtype if it is integral, as in true division
  boolean,   // that dtype; the result is a bool, as in a comparison
  composite, // it calls other ops; see NOTE [ Composite calls ]
};

// NOTE [ Composite calls ]
// Composite ops, and functions that PyTorch has written in Python, call other ops on tensors of their own: the loss of
// cross_entropy is divided by a count of int64, rms_norm computes in float32. A rule is about the operands that the
// user mixes. So if the arguments of the outermost call have one dtype, the rule does not act on the calls inside.
//
// Indices have an integral dtype beside floating arguments, and so have operands, as in `kron(float, int)`. Schemas do
// not tell them apart; the calls inside do: the rule acts on those that take the caller's own integral tensor, or a
// view of it, as an operand.
//
// The kernel on kAutocastKey of a composite op enters this state (InsideOp). Functions in Python have no such kernel:
// a call that the rule would change asks which function made it (python_caller).

struct PromotingOp {
  OpNumber number;
  c10::OperatorHandle handle;
  std::string name;
  // For an op that writes to an argument: its functional overload. For an op on numbers alone: its overload on tensors.
  std::optional<c10::OperatorHandle> functional;
  uint64_t participants = 0; // a bit for each argument that takes part
  uint64_t written = 0;      // a bit for each argument that the op writes to
  Computes computes = Computes::common;
  int rounding_mode = -1; // the argument that turns `floats` into `common` if it is given
  bool each = false;      // the op iterates over its lists in parallel: each element is a separate call
  bool matmul = false;    // a matrix product, which PyTorch does not promote
  bool real = false;      // the result is real, also of complex operands
  c10::BoxedKernel boxed; // for calls that are not plain; see PlainCall

  bool takes_part(size_t argument) const {
    return (participants >> argument & 1) != 0;
  }
  bool writes(size_t argument) const {
    return (written >> argument & 1) != 0;
  }
};

// Indexed by op number; null for ops that do not promote.
constexpr size_t kMostOps = 4096;
inline std::array<std::atomic<const PromotingOp*>, kMostOps> promoting_ops{};

inline const PromotingOp* promoting_op(OpNumber number) {
  return number < kMostOps ? promoting_ops[number].load(std::memory_order_acquire) : nullptr;
}

// The op, or null if the rule does not act on it in this thread's current state.
inline const PromotingOp* acted_on(const Promotion* promotion, OpNumber number) {
  if (promotion == nullptr || tls_promotion.only == &kNoIntegers || inside_kernel()) {
    return nullptr;
  }
  const PromotingOp* op = promoting_op(number);
  if (op == nullptr || (op->matmul && !promotion->options.matmul)) {
    return nullptr;
  }
  return op->computes == Computes::composite && tls_promotion.only != nullptr ? nullptr : op;
}

// An argument, or an element of a list argument, that takes part in promotion.
struct Operand {
  const at::Tensor* tensor = nullptr; // null for a Scalar
  const c10::Scalar* scalar = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined; // for a number: the dtype of the tensor that PyTorch wraps it in
  std::optional<Number> number;                       // set for a Python number, wrapped in a tensor or not
  bool written = false;
  size_t argument = 0;
  size_t element = 0; // the index in a list argument

  bool is_zero_dim() const {
    return tensor != nullptr && !number.has_value() && tensor->dim() == 0;
  }
  // The value of a Python int, float or complex; nullopt for other operands, and for a symbolic number.
  std::optional<c10::Scalar> value() const;
};

using Operands = std::vector<Operand>;

Operand operand_of(const at::Tensor& tensor);
Operand operand_of(const c10::Scalar& scalar);

// The type of a Python number that a Scalar or a tensor of this dtype holds.
inline Number number_of_dtype(c10::ScalarType dtype) {
  if (c10::isComplexType(dtype)) {
    return Number::complex;
  }
  if (c10::isFloatingType(dtype)) {
    return Number::floating;
  }
  return dtype == c10::ScalarType::Bool ? Number::boolean : Number::integer;
}

// The tensors and numbers that a composite call was given.
class CompositeArguments {
 public:
  void add(const at::Tensor& tensor);
  void add(Number number) {
    number_ = std::max(number_, number);
  }
  // Whether they have one dtype, except for integral tensors beside floating ones, which may be indices.
  bool have_one_dtype() const;
  bool are_floating() const {
    return floating_ != kNoDtype;
  }
  bool are_integral() const {
    return !are_floating() && integral_ != kNoDtype;
  }
  // These integral tensors.
  const Integers& integers() const;

 private:
  DtypeCode floating_ = kNoDtype;
  DtypeCode integral_ = kNoDtype;
  bool one_floating_ = true;
  bool one_integral_ = true;
  Number number_ = Number::boolean;
  Integers integers_;
};

// A quick check whether the rule leaves a call unchanged because all tensors already have the dtype in which the op
// computes. If the check fails, promote_call decides.
class PlainCall {
 public:
  PlainCall(const PromotingOp& op, const Promotion& promotion) : op_(op), promotion_(promotion) {}

  template <class... Args>
  bool is_plain(const Args&... args) {
    size_t argument = 0;
    (look(argument++, args), ...);
    if (!plain_ || dtype_ == kNoDtype) {
      return plain_ && numbers_ == 0;
    }
    const PromotionTables& tables = promotion_.any_tables();
    if (op_.computes == Computes::floats && tables.floating(dtype_) != dtype_) {
      return false;
    }
    if (numbers_ >> (static_cast<unsigned>(number_of_dtype(static_cast<c10::ScalarType>(dtype_))) + 1) != 0) {
      return false; // a number of a higher kind promotes, or is cast
    }
    for (size_t number = 0; number < kNumbers; ++number) {
      if ((numbers_ >> number & 1) != 0 && tables.number(static_cast<Number>(number), dtype_) != dtype_) {
        return false;
      }
    }
    return numbers_ == 0 || !promotion_.options.reports_numbers();
  }

 private:
  template <class T>
  void look(size_t argument, const T& value) {
    if (op_.takes_part(argument)) {
      add(value);
    } else if (op_.writes(argument)) {
      add_out(value);
    }
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    const DtypeCode dtype = to_code(tensor.scalar_type());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      add_number(tensor.scalar_type());
    } else if (dtype_ == kNoDtype) {
      dtype_ = dtype;
    } else {
      plain_ &= dtype == dtype_;
    }
  }
  void add(const c10::Scalar& scalar) {
    add_number(scalar.type());
  }
  template <class T>
  void add(const std::optional<T>& value) {
    if (value.has_value()) {
      add(*value);
    }
  }
  template <class Other>
  void add(const Other& value) {
    if constexpr (requires { value.begin(); }) {
      for (const auto& element : value) {
        add(element);
      }
    } else {
      plain_ = false; // an argument of another type takes no part
    }
  }

  void add_number(c10::ScalarType dtype) {
    numbers_ |= 1U << static_cast<unsigned>(number_of_dtype(dtype));
  }

  void add_out(const at::Tensor& tensor) {
    const DtypeCode dtype = to_code(tensor.scalar_type());
    plain_ &= dtype == (op_.computes == Computes::boolean ? to_code(c10::ScalarType::Bool) : dtype_);
  }
  template <class Other>
  void add_out(const Other& /*value*/) {
    plain_ = false;
  }

  const PromotingOp& op_;
  const Promotion& promotion_;
  bool plain_ = true;
  DtypeCode dtype_ = kNoDtype;
  unsigned numbers_ = 0; // a bit for each type
};

enum class Promoted : uint8_t {
  as_it_was, // the rule leaves the call unchanged
  cast,      // operands on the stack were cast; the caller calls the op
  done,      // the op has run, and its results are on the stack
};

// Whether a rule acts on this thread's current calls, or on some of them; see PromotionState.
bool promotion_acts_here();

// Whether the rule acts on a call with these operands: not if PyTorch mixes them, and not the user.
bool acts_on_operands(const Operands& operands);

// What the function of PyTorch in Python that makes the current call was given; nullopt if the user's code makes it.
// python/callbacks.cpp defines it.
std::optional<CompositeArguments> python_caller();

// While it lives, the rule acts on what it acts on inside an op with these arguments.
class InsideOp {
 public:
  InsideOp(const PromotingOp& op, const torch::jit::Stack& stack);

 private:
  Integers integers_;
  std::optional<Scoped<const Integers*>> scoped_;
};

// Casts the operands on the stack to the rule's dtype, or runs the call. Raises if the rule forbids it.
Promoted promote_call(const PromotingOp& op, const Promotion& promotion, torch::jit::Stack& stack);

} // namespace torch_promote
