// file: compares reused casts with fresh ones, while torch_promote.check_casts is on
#include "cache/check.h"

#include "cache/capture.h"
#include "cache/thread_casts.h"

#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/equal_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_promote {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// --- Lines of first casts, beside the caches: entries need no member for them.

struct FirstCast {
  // Weakly, so that the address that the table has for a key stays taken.
  std::optional<WeakStorage> storage;
  std::optional<WeakTensor> tensor;
  std::string line;

  bool is_gone() const {
    return storage.has_value() ? storage->expired() : tensor->expired();
  }
};

struct FirstCasts {
  ForkSafeMutex mutex;
  std::unordered_map<const void*, FirstCast> by_address;
  size_t next_sweep = 64;
};

FirstCasts& first_casts = *new FirstCasts; // never destroyed; see NOTE [ Fork ]

// Uses of a plain cast share its storage; a cast that is not plain is one tensor for all uses.
const void* address_of(const at::Tensor& cast) {
  const at::TensorImpl& impl = *cast.unsafeGetTensorImpl();
  return is_plain(impl) ? static_cast<const void*>(impl.unsafe_storage().unsafeGetStorageImpl()) : &impl;
}

std::string line_of_first_cast(const at::Tensor& cast) {
  const Lock lock(first_casts.mutex);
  const auto found = first_casts.by_address.find(address_of(cast));
  return found == first_casts.by_address.end() ? std::string() : found->second.line;
}

// --- Comparing

// In its scope ops on plain tensors run PyTorch's kernels alone: no autograd, autocast, functorch, dispatch mode, or
// tracer, and no profiler sees them (but for the memory that they allocate).
class Unobserved {
 public:
  Unobserved()
      : keys_(
            DispatchKeySet(DispatchKey::BackendSelect),
            c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset),
        profilers_(/*is_enabled=*/false) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  at::RecordFunctionGuard profilers_;
};

// The tensor, or one over the memory of a subclass that has memory of its own. Undefined for wrappers and fake tensors.
at::Tensor in_plain_memory(const at::Tensor& tensor) {
  at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (is_plain(impl)) {
    return tensor;
  }
  constexpr DispatchKeySet kSubclass({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});
  if (!has_only_plain_keys(impl.key_set() - kSubclass) || !impl.has_storage() || impl.has_symbolic_sizes_strides() ||
      !(impl.is_cpu() || impl.is_cuda())) {
    return {};
  }
  const c10::Storage& storage = impl.unsafe_storage();
  if (storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr) {
    return {};
  }
  const DispatchKey key = impl.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  at::Tensor result =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), impl.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(impl.sizes(), impl.strides(), impl.storage_offset());
  return result;
}

// The plain tensors that a tensor consists of; empty if they are unknown.
std::vector<at::Tensor> plain_parts(const at::Tensor& tensor) {
  if (at::Tensor whole = in_plain_memory(tensor); whole.defined()) {
    return {std::move(whole)};
  }
  std::vector<at::Tensor> result;
  for (const at::Tensor& part : parts_of(tensor)) {
    result.push_back(in_plain_memory(part));
    if (!result.back().defined()) {
      return {};
    }
  }
  return result;
}

at::ScalarType bits_dtype(size_t itemsize) {
  return itemsize == 1 ? at::kByte : itemsize == 2 ? at::kShort : itemsize == 4 ? at::kInt : at::kLong;
}

// Not the values: a NaN differs from itself, and 0 equals -0.
bool have_same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType bits = bits_dtype(a.dtype().itemsize());
  return at::_ops::equal::call(at::_ops::view_dtype::call(a, bits), at::_ops::view_dtype::call(b, bits));
}

enum class Outcome : uint8_t { same, differs, unknown };
struct Comparison {
  Outcome outcome;
  at::Tensor kept; // the first parts that differ; plain
  at::Tensor fresh;
};

Comparison compare(const Source& source, const at::Tensor& cast) {
  if (current_capture(source) != 0) { // nothing is computed
    return {Outcome::unknown, {}, {}};
  }
  const std::vector<at::Tensor> sources = plain_parts(source.tensor);
  const std::vector<at::Tensor> kept = plain_parts(cast);
  if (sources.empty() || sources.size() != kept.size()) {
    return {Outcome::unknown, {}, {}};
  }
  const Unobserved unobserved;
  for (size_t i = 0; i < kept.size(); ++i) {
    at::Tensor fresh = at::_ops::_to_copy::call(sources[i], kept[i].scalar_type(), {}, {}, {}, false, {});
    if (!have_same_bits(kept[i], fresh)) {
      return {Outcome::differs, kept[i], std::move(fresh)};
    }
  }
  return {Outcome::same, {}, {}};
}

} // namespace

void remember_line_of(const at::Tensor& cast) {
  FirstCast first;
  first.line = calling_line();
  const at::TensorImpl& impl = *cast.unsafeGetTensorImpl();
  if (is_plain(impl)) {
    first.storage.emplace(impl.unsafe_storage().getWeakStorageImpl());
  } else {
    first.tensor.emplace(cast.getIntrusivePtr());
  }
  std::vector<FirstCast> gone; // destroyed without the lock: the last weak reference to a wrapper may run Python
  FirstCasts& all = first_casts;
  const Lock lock(all.mutex);
  gone.push_back(std::exchange(all.by_address[address_of(cast)], std::move(first)));
  if (all.by_address.size() >= all.next_sweep) {
    std::erase_if(all.by_address, [&gone](auto& item) {
      const bool is_gone = item.second.is_gone();
      if (is_gone) {
        gone.push_back(std::move(item.second));
      }
      return is_gone;
    });
    all.next_sweep = 2 * all.by_address.size() + 64;
  }
}

void check_reuse(const Source& source, const at::Tensor& cast, c10::function_ref<bool()> is_still_kept) {
  const Outcome outcome = compare(source, cast).outcome;
  ++(outcome == Outcome::unknown ? casts_skipped : casts_compared);
  if (outcome != Outcome::differs) {
    return;
  }
  // A thread that writes in place changes the data before the version. Give it time to finish.
  constexpr int kTries = 20;
  for (int i = 0; i < kTries && is_still_kept(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Comparison found = compare(source, cast); // again: it may have restored the data
  if (found.outcome != Outcome::differs || !is_still_kept()) {
    return;
  }
  forget_casts({source.tensor});
  const char* const mode = kCacheModeNames[static_cast<size_t>(tls_cache_mode)];
  const std::string line = line_of_first_cast(cast);
  const Unobserved unobserved;
  raise_stale_cast(source.tensor, found.kept, found.fresh, mode, line);
}

} // namespace torch_promote
