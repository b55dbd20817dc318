// file: compares reused casts with fresh ones, while torch_promote.check_casts is on
#pragma once

#include "cast/source.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_promote {

// Functions of torch_promote/checking/check_casts.py; the module sets them before the checks are first on.
struct CastCheckCallbacks {
  // The line of Python, outside of PyTorch and this package, that this thread runs.
  std::string (*calling_line)();
  // The tensors that a wrapper (a functorch wrapper, a subclass) consists of; none if they are unknown.
  std::vector<at::Tensor> (*parts)(const at::Tensor& wrapper);
  // Raises StaleCastError. `kept` and `fresh` are plain; `first_line` is empty if it is unknown.
  void (*raise)(
      const at::Tensor& source,
      const at::Tensor& kept,
      const at::Tensor& fresh,
      const char* mode,
      const std::string& first_line);
};
inline CastCheckCallbacks cast_check_callbacks{};

// For all threads, those of the autograd engine included.
inline std::atomic<bool> checks_casts = false;
inline bool are_casts_checked() {
  return checks_casts.load(std::memory_order_relaxed);
}

// Remembers which line of Python made a cast that is kept.
void remember_line_of(const at::Tensor& cast);

// The first parts of a kept cast and of a fresh one that differ. Plain.
struct StaleCast {
  at::Tensor kept;
  at::Tensor fresh;
};

// Nothing if the bits of a kept cast are those of a fresh one. Nothing but PyTorch's own kernels notices the fresh
// cast: no mode, no profiler, no autograd. `is_still_kept`: whether the cache would return the cast again. If it would
// not, another thread has written to the source meanwhile and the cache knows, so the cast is not stale.
std::optional<StaleCast> find_stale(
    const Source& source, const at::Tensor& cast, c10::function_ref<bool()> is_still_kept);

[[noreturn]] void raise_stale_cast(const Source& source, const at::Tensor& cast, const StaleCast& stale);

struct CastCheckCounts {
  uint64_t checked = 0; // uses of kept casts that were compared
  uint64_t skipped = 0; // uses that could not be: no data (fake tensors), unknown wrappers, a CUDA graph's capture
};
CastCheckCounts cast_check_counts();

} // namespace torch_promote
