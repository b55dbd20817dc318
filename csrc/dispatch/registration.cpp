// file: registers a wrapper for every row, and a fallthrough for every other op, on our key
#include "dispatch/registration.h"

#include "dispatch/extra_ops.h"
#include "dispatch/typed_wrapper.h"

#include <torch/library.h>

// The per-op headers of the rows that this PyTorch has; written by setup.py.
#include "aten_headers.h"

namespace at::_ops {
// An op that this PyTorch lacks has no header, and stays an incomplete type.
#define ROW(op, overload, ...) struct TORCH_PROMOTE_OP_STRUCT(op, overload);
#include "op_policies.def"
#undef ROW
} // namespace at::_ops

namespace torch_promote {

void raise_banned(OpNumber op, Device device) {
  const std::string name = op_name(op);
  const std::string device_name = c10::DeviceTypeName(device_type_of(device), /*lower_case=*/true);
  const bool by_stock = stock_policy_table().lookup(device, op) == to_byte(CastPolicy::banned);
  std::string remedy =
      "Run it in a nested `my_autocast(enabled=False)` on inputs of the dtype that you want, or give "
      "the op another policy in this region's overrides.";
  if (op == number_of(Row::binary_cross_entropy)) {
    remedy =
        "A sigmoid in half precision saturates before its logarithm is taken, so use "
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss) on what goes into the sigmoid. Otherwise: " +
        remedy;
  }
  const char* why = by_stock ? "its results are unsafe there. " : "the policy in force here says so. ";
  TORCH_CHECK(false, name, " is banned under autocast on ", device_name, ": ", why, remedy);
}

torch::Library& library_on_our_key(const char* name_space) {
  return *new torch::Library(torch::Library::IMPL, name_space, kAutocastKey, __FILE__, __LINE__);
}

namespace {

template <class T, class = void>
struct IsComplete : std::false_type {};
template <class T>
struct IsComplete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

template <Row row, class Op, class WithDtype = void>
void register_row(torch::Library& library) {
  if constexpr (IsComplete<Op>::value) {
    const RowInfo& info = rows()[static_cast<size_t>(row)];
    std::string name = info.op;
    if (*info.overload != '\0') {
      name.append(".").append(info.overload);
    }
    library.impl(name.c_str(), TORCH_FN((Wrapper<row, Op, WithDtype, typename Op::schema>::call)));
  }
}

} // namespace

void register_wrappers() {
  library_on_our_key("_").fallback(torch::CppFunction::makeFallthrough());
  torch::Library& aten = library_on_our_key("aten");
#define ROW(op, overload, cpu, cuda, ...)                                                                              \
  register_row<                                                                                                        \
      Row::TORCH_PROMOTE_OP_STRUCT(op, overload), at::_ops::TORCH_PROMOTE_OP_STRUCT(op, overload) __VA_OPT__(, )       \
                                                      __VA_OPT__(at::_ops::TORCH_PROMOTE_OP_STRUCT(op, __VA_ARGS__))>( \
      aten);
#include "op_policies.def"
#undef ROW
}

} // namespace torch_promote
