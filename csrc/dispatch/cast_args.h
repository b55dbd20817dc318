// file: selects the arguments that autocast casts, and casts each C++ type of argument
#pragma once

#include "cache/cached_cast.h"
#include "policy/dispatch_state.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

namespace torch_promote {

// Source: aten/src/ATen/autocast_mode.h, is_autocast_eligible and is_eligible (v2.13). float8 and float4 count as
// floating; double, complex, integers and other devices' tensors are never cast.
inline bool is_eligible(const at::Tensor& tensor, Device device) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (!at::isFloatingType(dtype) || dtype == at::kDouble) {
    return false;
  }
  switch (device) {
    case Device::cpu:
      return tensor.is_cpu() || tensor.is_mkldnn();
    case Device::cuda:
      return tensor.is_cuda() || tensor.is_xla();
    default:
      return tensor.device().type() == device_type_of(device);
  }
}

// Both kinds of tensor list. As in stock, a List[Optional[Tensor]], such as index_put's indices, is not cast.
template <class T>
concept TensorListType = std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>;

// --- Does an argument need a cast? Overloads for the types that hold tensors; other types never need one.

inline bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype, Device device) {
  return tensor.scalar_type() != dtype && is_eligible(tensor, device);
}
inline bool needs_cast(const std::optional<at::Tensor>& tensor, at::ScalarType dtype, Device device) {
  return tensor.has_value() && needs_cast(*tensor, dtype, device);
}
template <TensorListType List>
bool needs_cast(const List& tensors, at::ScalarType dtype, Device device) {
  for (const at::Tensor& tensor : tensors) {
    if (needs_cast(tensor, dtype, device)) {
      return true;
    }
  }
  return false;
}
template <class Other>
constexpr bool needs_cast(const Other& /*argument*/, at::ScalarType /*dtype*/, Device /*device*/) {
  return false;
}

// --- CastArg<T>(argument, dtype, device).get() is the argument to call the op with.

// An argument that needs no cast is returned by reference: a copy would touch the reference count.

template <class T>
class CastArg {
 public:
  CastArg(const T& argument, at::ScalarType /*dtype*/, Device /*device*/) : argument_(argument) {}
  const T& get() const {
    return argument_;
  }

 private:
  const T& argument_;
};

template <>
class CastArg<at::Tensor> {
 public:
  CastArg(const at::Tensor& argument, at::ScalarType dtype, Device device)
      : argument_(argument), cast_(needs_cast(argument, dtype, device) ? cached_cast(argument, dtype) : at::Tensor()) {}
  const at::Tensor& get() const {
    return cast_.defined() ? cast_ : argument_;
  }

 private:
  const at::Tensor& argument_;
  at::Tensor cast_;
};

template <>
class CastArg<std::optional<at::Tensor>> {
 public:
  CastArg(const std::optional<at::Tensor>& argument, at::ScalarType dtype, Device device) : argument_(argument) {
    if (needs_cast(argument, dtype, device)) {
      cast_ = cached_cast(*argument, dtype);
    }
  }
  const std::optional<at::Tensor>& get() const {
    return cast_.has_value() ? cast_ : argument_;
  }

 private:
  const std::optional<at::Tensor>& argument_;
  std::optional<at::Tensor> cast_;
};

template <TensorListType List>
class CastArg<List> {
 public:
  CastArg(const List& argument, at::ScalarType dtype, Device device) {
    own_.reserve(argument.size());
    for (const at::Tensor& tensor : argument) {
      own_.push_back(needs_cast(tensor, dtype, device) ? cached_cast(tensor, dtype) : tensor);
    }
  }
  List get() const {
    return at::TensorList(own_);
  }

 private:
  std::vector<at::Tensor> own_;
};

// NOTE [ Order of the casts ]
// In stock, the casts are the arguments of one call expression. The order in which the compiler evaluates them is that
// of the autograd nodes, and therefore of the sums in the backward. GCC, which compiles PyTorch's wheels, begins with
// the last argument on x86-64 and with the first one on aarch64; Clang begins with the first one everywhere. So Clang
// alone needs to be told, by `CastArgs`, which casts the last argument first.
#if defined(__x86_64__) && defined(__clang__)
constexpr bool kTellOrder = true;
#else
constexpr bool kTellOrder = false;
#endif

template <class... Args>
class CastArgs {
 public:
  CastArgs(at::ScalarType /*dtype*/, Device /*device*/) {}

  template <class Result, class... Parameters, class... Before>
  Result pass_to(Result (*call)(Parameters...), const Before&... before) const {
    return call(before...);
  }
};

template <class First, class... Rest>
class CastArgs<First, Rest...> {
 public:
  CastArgs(at::ScalarType dtype, Device device, const First& first, const Rest&... rest)
      : rest_(dtype, device, rest...), first_(first, dtype, device) {}

  template <class Result, class... Parameters, class... Before>
  Result pass_to(Result (*call)(Parameters...), const Before&... before) const {
    return rest_.pass_to(call, before..., first_.get());
  }

 private:
  CastArgs<Rest...> rest_; // before `first_`: members are initialized in the order of their declarations
  CastArg<First> first_;
};

// --- The common dtype of `promote`.

// A single dtype is kept; a mixture of floating dtypes below double gives float32. The result does not depend on the
// order of the arguments. (Stock's `prioritize` depends on it, and raises for a dtype that is neither float32 nor the
// autocast dtype.) Undefined if no argument is eligible. As in stock, optional tensors do not count.
class PromoteJoin {
 public:
  explicit PromoteJoin(Device device) : device_(device) {}

  void add(const at::Tensor& tensor) {
    if (is_eligible(tensor, device_)) {
      const at::ScalarType dtype = tensor.scalar_type();
      join_ = join_ == at::ScalarType::Undefined || join_ == dtype ? dtype : at::kFloat;
    }
  }
  template <TensorListType List>
  void add(const List& tensors) {
    for (const at::Tensor& tensor : tensors) {
      add(tensor);
    }
  }
  template <class Other>
  void add(const Other& /*argument*/) {}

  at::ScalarType dtype() const {
    return join_;
  }

 private:
  Device device_;
  at::ScalarType join_ = at::ScalarType::Undefined;
};

// --- The dtype argument that fp32_set_opt_dtype fills in, and the argument that decides whether it does.

template <class T>
const T& with_default_dtype(const T& argument) {
  return argument;
}
inline std::optional<at::ScalarType> with_default_dtype(const std::optional<at::ScalarType>& dtype) {
  return dtype.has_value() ? dtype : at::kFloat;
}

template <class... Args>
const at::Tensor& first_tensor(const at::Tensor& first, const Args&... /*rest*/) {
  return first;
}

} // namespace torch_promote
