// file: compares reused casts with fresh ones, while torch_promote.check_casts is on
#pragma once

#include "cast/cast.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_promote {

// For all threads, those of the autograd engine included.
inline std::atomic<bool> checks_casts = false;
inline bool are_casts_checked() {
  return checks_casts.load(std::memory_order_relaxed);
}

// The uses of kept casts that were compared, and those that could not be: no data (fake tensors), unknown wrappers, a
// CUDA graph's capture.
inline std::atomic<uint64_t> casts_compared = 0;
inline std::atomic<uint64_t> casts_skipped = 0;

// Remembers which line of Python made a cast that is kept.
void remember_line_of(const at::Tensor& cast);

// Raises StaleCastError, and drops the cast, if its bits are not those of a fresh one. Nothing but PyTorch's own
// kernels notices the fresh cast: no mode, no profiler, no autograd. `is_still_kept`: whether the cache would return
// the cast again. If it would not, another thread has written to the source meanwhile and the cache knows, so it is not
// stale.
void check_reuse(const Source& source, const at::Tensor& cast, c10::function_ref<bool()> is_still_kept);

// Calls of Python, which python/callbacks.cpp defines with functions of torch_promote/checking/check_casts.py.

// The line of Python, outside of PyTorch and this package, that this thread runs.
std::string calling_line();
// The tensors that a wrapper (a functorch wrapper, a subclass) consists of; none if they are unknown.
std::vector<at::Tensor> parts_of(const at::Tensor& wrapper);
// Raises StaleCastError. `kept` and `fresh` are plain; `first_line` is empty if it is unknown.
void raise_stale_cast(
    const at::Tensor& source,
    const at::Tensor& kept,
    const at::Tensor& fresh,
    const char* mode,
    const std::string& first_line);

} // namespace torch_promote
