// file: ops that write weights without bumping their version
#include "unversioned_writers.h"

#include "cast_cache.h"
#include "region.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace torch_promote {

namespace {

void clear_cache_and_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  clear_cast_cache();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kOurKey), stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : kUnversionedWriters) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&clear_cache_and_call>());
  }
}

} // namespace torch_promote
