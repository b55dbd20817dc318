// file: the ops that promote their operands: their kernels on our key
#include "promotion/ops.h"

#include "dispatch/boxed_wrapper.h"
#include "dispatch/extra_ops.h"
#include "promotion/kernels.h"
#include "region/region.h"

#include <c10/util/Exception.h>

#include <memory>

namespace torch_promote {

namespace {

std::optional<c10::OperatorHandle> find(const std::string& name) {
  const size_t dot = name.find('.');
  return c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
}

uint64_t written_arguments(const c10::FunctionSchema& schema) {
  uint64_t written = 0;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      written |= uint64_t{1} << i;
    }
  }
  return written;
}

} // namespace

void register_promoting_op(const PromotingOpRequest& request) {
  const std::string name = request.overload.empty() ? request.op : request.op + "." + request.overload;
  const auto handle = find(name);
  TORCH_CHECK_VALUE(handle.has_value(), "the dispatcher knows no overload ", name);
  TORCH_CHECK_VALUE(handle->schema().arguments().size() < 64, name, " has too many arguments");
  const auto [number, is_new] = number_for_promotion(request.op, request.overload);
  TORCH_CHECK(number < kMostOps, "torch_promote: more than ", kMostOps, " ops with a number");
  if (promoting_op(number) != nullptr) {
    return;
  }
  const auto* op = new PromotingOp{
      // for good, as the kernels
      number,
      *handle,
      name,
      request.functional.empty() ? std::nullopt : find(request.functional),
      request.participants,
      written_arguments(handle->schema()),
      request.computes,
      request.rounding_mode,
      request.each,
      request.matmul,
      request.refuses,
      boxed_kernel_of(number, Writes::as_the_version_says),
  };
  if (is_new) {
    register_kernel(*op);
  }
  promoting_ops[number].store(op, std::memory_order_release);
}

} // namespace torch_promote
