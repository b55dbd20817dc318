// file: looks a cast up in this thread's caches and the persistent cache, or makes and keeps it
#include "cache/thread_cache.h"

#include "cache/cache_mode.h"
#include "cache/capture.h"
#include "cache/check.h"
#include "cache/entry.h"
#include "cache/held_casts.h"
#include "cache/outside_writers.h"
#include "cache/persistent_cache.h"
#include "cache/stock_cache.h"
#include "cache/thread_casts.h"
#include "cache/weight.h"
#include "cache/write_log.h"
#include "cast/cast.h"
#include "policy/torch_declarations.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

namespace torch_promote {

namespace {

// PyTorch cleared its cache in this thread, under its lock. What is left is dropped before its next use.
void drop_what_frees_without_python() {
  if (tls_has_casts) {
    caches().drop_if(
        [](const CastEntry& entry) { return entry.data().is_plain() && entry.data().memory().frees_without_python(); });
  }
  free_casts_of_all_threads();
}

// For each use of this thread's casts; returns the time at which a cast now begins.
CastTime catch_up(ThreadCaches& here) {
  tls_has_casts = true; // so that the end of the region ends this too
  return {here.catch_up(), stock_clears, hand_clears};
}

// Before a cast is kept.
void hold_casts(ThreadCaches& here) {
  tls_has_casts = true;
  here.holder.begin(&drop_what_frees_without_python);
  here.holds.put(true); // again: the cast may have run code that ended the region
}

// The autograd engine carries the autocast key to threads of its own. There a region of PyTorch may be open, in which a
// checkpoint runs its function again, or none: then casts kept there would never be dropped.
bool is_in_region() {
  return tls_region_open || nesting_depth() > 0;
}

// Beyond stock's condition: jit.trace is not recording. It would record a cast from the cache as a constant.
bool may_reuse_casts(const Source& source) {
  return at::autocast::is_autocast_cache_enabled() && !source.thread_keys.has(c10::DispatchKey::Tracer);
}

// A cast that later uses may get. It may run Python (a dispatch mode, a subclass) that itself casts, enters and leaves
// regions, so the caller must not hold references into a cache.
at::Tensor cast_to_keep(const Source& source, c10::ScalarType dtype, Reuse reuse) {
  if (reuse == Reuse::shared_grad_fn && !source.plain) {
    // Kept whole. Like stock, record it in the graph, so that a use after no_grad is differentiable.
    const at::AutoGradMode grad(true);
    return cast(source.tensor, dtype);
  }
  if (source.in_inference_mode) {
    // Uses outside of inference mode could not get an inference tensor.
    const c10::InferenceMode normal_mode(false);
    const at::AutoGradMode grad(false);
    return cast(source.tensor, dtype);
  }
  return cast(source, dtype);
}

// A cast whose node gets a number that an earlier use has taken.
at::Tensor cast_with_number(const Source& source, c10::ScalarType dtype, uint64_t number) {
  const at::AutoGradMode no_grad(false);
  at::Tensor result = cast(source.tensor, dtype);
  attach_node(result, source.tensor, number);
  return result;
}

// False for the answer of a mode that replaced the tensor by one of its own kind (such as a fake one), and for a cast
// that is kept whole but was made below autograd: later uses would silently have no gradient.
bool may_be_kept(const Source& source, const at::Tensor& cast) {
  return source.plain == is_plain(*cast.unsafeGetTensorImpl()) && (source.plain || cast.requires_grad()) &&
         is_in_region();
}

// For each cast that is kept.
void made(ThreadCaches& here, const at::Tensor& cast) {
  ++here.misses;
  note_kept_cast();
  if (are_casts_checked()) {
    remember_line_of(cast);
  }
}

// What each use of a kept cast returns: the cast, which a check compares with a fresh one. `is_still_kept` looks the
// cast up again.
template <class IsStillKept>
at::Tensor reused(ThreadCaches& here, const Source& source, at::Tensor cast, const IsStillKept& is_still_kept) {
  ++here.hits;
  if (are_casts_checked()) {
    if (const std::optional<StaleCast> stale = find_stale(source, cast, is_still_kept)) {
      forget_casts({source.tensor});
      raise_stale_cast(source, cast, *stale);
    }
  }
  return cast;
}

// The data of a cast from before the region, for a use that needs no node.
std::optional<at::Tensor> find_kept(
    const Source& source, const Weight& weight, c10::ScalarType dtype, uint64_t span = 0) {
  return current_capture(source) == 0 ? find_persistent(source, weight, dtype, span) : std::nullopt;
}

// Whether this would be found again; another thread may have stored a newer one.
bool is_persistent(const Source& source, const Weight& weight, const at::Tensor& cast) {
  const std::optional<at::Tensor> found = find_kept(source, weight, cast.scalar_type());
  return found.has_value() && found->is_alias_of(cast);
}

at::Tensor cast_of_weight(const Source& source, const Weight& weight, c10::ScalarType dtype, bool persistent) {
  const bool data_only = weight.reuse == Reuse::data_only;
  ThreadCaches& here = caches();
  const CastTime began = catch_up(here);
  // If the data is all that the use needs, the region's cache need not be filled.
  if (persistent && !(data_only ? source.needs_node : source.wants_grad)) {
    if (std::optional<at::Tensor> data = find_kept(source, weight, dtype, data_only ? 0 : here.span)) {
      here.holder.begin(&drop_what_frees_without_python); // the number is valid until then
      return reused(here, source, *data, [&] { return is_persistent(source, weight, *data); });
    }
  }
  // Within a region stock goes on using a trainable weight's cast whatever is written behind PyTorch's back; so do we.
  const uint64_t epoch = data_only ? alias_epoch(*weight.owner) : 0;
  if (data_only && epoch == 0) {
    return cast(source, dtype); // GCOVR_EXCL_LINE: needs a library with a BackendMeta of its own
  }
  const WeightKey key(source, weight, dtype);
  const auto use = [&](const std::shared_ptr<CastEntry>& entry) {
    at::Tensor cast = entry->use(source);
    return !cast.defined() ? cast : reused(here, source, std::move(cast), [&] {
      catch_up(here);
      return here.weights.find(source, key, data_only ? alias_epoch(*weight.owner) : 0) == entry;
    });
  };
  const auto keep = [&](const std::shared_ptr<CastEntry>& entry) {
    if (!was_written(source.tensor, began.writes)) {
      hold_casts(here);
      here.weights.insert(key, entry, began);
    }
  };
  std::shared_ptr<CastEntry> on_another_stream;
  if (const std::shared_ptr<CastEntry> entry = here.weights.find(source, key, epoch, &on_another_stream)) {
    if (at::Tensor cast = use(entry); cast.defined()) {
      return cast;
    }
  }
  const bool joins = on_another_stream != nullptr && !data_only && source.plain && !source.in_inference_mode;
  if (const std::shared_ptr<CastEntry> entry = data_only ? nullptr : borrow_cast(source, key)) {
    keep(entry);
    if (at::Tensor cast = use(entry); cast.defined()) {
      return cast;
    }
  }
  const std::optional<uint64_t> number = tls_cache_mode == CacheMode::persistent && !data_only
                                             ? number_from_first_use(*weight.owner, dtype, here.span)
                                             : std::nullopt;
  const auto entry = CastEntry::make(*weight.owner, source, weight.reuse, epoch);
  if (persistent && key.capture == 0) {
    if (std::optional<at::Tensor> data = find_persistent(source, weight, dtype)) {
      entry->fill(source, *data, number);
      if (joins) {
        entry->join_graph_of(*on_another_stream);
      }
      keep(entry);
      return reused(here, source, entry->use(source), [&] { return is_persistent(source, weight, *data); });
    }
  }
  const uint64_t aliases = persistent ? alias_epoch(*weight.owner) : 0;
  // Asked again: a tensor over the data that was made in between increased the epoch before it was read.
  const bool may_persist = persistent && key.capture == 0 && has_unique_storage(source.tensor, weight.is_view);
  at::Tensor result;
  if (joins) {
    const at::AutoGradMode no_grad(false);
    result = cast(source.tensor, dtype);
  } else {
    result = number.has_value() && source.needs_node ? cast_with_number(source, dtype, *number)
                                                     : cast_to_keep(source, dtype, weight.reuse);
  }
  if (!may_be_kept(source, result)) {
    return joins ? cast(source, dtype) : result;
  }
  made(here, result);
  entry->fill(source, result, number);
  if (joins) {
    entry->join_graph_of(*on_another_stream);
  }
  if (may_persist) {
    CastData& data = entry->data();
    store_persistent(source, weight, data.signature(), data.held(source.impl), {began.writes, aliases});
  }
  keep(entry);
  if (joins) {
    at::Tensor joined = entry->use(source);
    return joined.defined() ? joined : cast(source, dtype);
  }
  return result;
}

at::Tensor cast_of_activation(const Source& source, c10::ScalarType dtype) {
  ThreadCaches& here = caches();
  const CastTime began = catch_up(here);
  const bool is_larger = c10::elementSize(dtype) > source.tensor.dtype().itemsize();
  const uint64_t capture = current_capture(source);
  if (const std::shared_ptr<CastEntry> entry = here.activations.find(source, dtype, capture)) {
    if (at::Tensor cast = entry->use(source); cast.defined()) {
      return reused(here, source, std::move(cast), [&] {
        catch_up(here);
        return here.activations.find(source, dtype, capture) == entry;
      });
    }
  }
  auto entry = CastEntry::make(source.tensor, source, Reuse::data_only);
  at::Tensor result = cast_to_keep(source, dtype, Reuse::data_only);
  if (!may_be_kept(source, result)) {
    return result;
  }
  if (!was_written(source.tensor, began.writes)) {
    made(here, result);
    entry->fill(source, result);
    if (is_larger) {
      if (!entry->data().is_shaped_as_source()) {
        return result;
      }
      entry->data().let_go();
    }
    hold_casts(here);
    here.activations.insert(std::move(entry), capture, began);
  }
  return result;
}

// In a backward, finds the casts of the thread that called it, as stock does. Keeps none.
at::Tensor cast_outside_regions(const Source& source, c10::ScalarType dtype) {
  if (borrows_casts() && is_stock_weight(source)) {
    const WeightKey key(source, {Reuse::shared_grad_fn, &source.tensor, /*is_view=*/false}, dtype);
    if (const std::shared_ptr<CastEntry> entry = borrow_cast(source, key)) {
      if (at::Tensor cast = entry->use(source); cast.defined()) {
        return reused(caches(), source, std::move(cast), [&] { return borrow_cast(source, key) != nullptr; });
      }
    }
  }
  return cast(source, dtype);
}

// The owner of memory that PyTorch did not allocate may write to it at any time.
bool is_allocated_by_pytorch(const Source& source) {
  return source.impl.unsafe_storage().allocator() != nullptr;
}

bool may_outlive_region(const Source& source) {
  return !has_outside_writers(*source.impl.unsafe_storage().unsafeGetStorageImpl());
}

// The modes that the user asks for by name also reuse casts that stock makes again.
at::Tensor cast_beyond_stock(const Source& source, c10::ScalarType dtype) {
  if (tls_results_may_alias || !may_share_data(source)) {
    return cast(source, dtype);
  }
  if (const std::optional<Weight> weight = weight_beyond_stock(source)) {
    // Views come several at a time, and cannot be told from unrelated tensors over the weight's data. Within a region
    // they rely on the version and the alias epoch alone.
    const bool unique = has_unique_storage(source.tensor, weight->is_view);
    if (unique || weight->is_view) {
      return cast_of_weight(
          source, *weight, dtype, unique && tls_cache_mode == CacheMode::persistent && may_outlive_region(source));
    }
  } else if (tls_cache_mode == CacheMode::all && !source.tensor.is_inference() && is_allocated_by_pytorch(source)) {
    return cast_of_activation(source, dtype);
  }
  return cast(source, dtype);
}

} // namespace

at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype) {
  const Source source(tensor);
  if (source.has_tangent || !may_reuse_casts(source)) {
    return cast(source, dtype);
  }
  if (!is_in_region()) {
    return cast_outside_regions(source, dtype);
  }
  drop_outdated_casts();
  if (is_stock_weight(source)) {
    const bool persistent = tls_cache_mode == CacheMode::persistent && !tls_results_may_alias &&
                            may_share_data(source) && has_unique_storage(tensor, /*is_view=*/false) &&
                            may_outlive_region(source);
    return cast_of_weight(source, {Reuse::shared_grad_fn, &tensor, /*is_view=*/false}, dtype, persistent);
  }
  return tls_cache_mode == CacheMode::weights ? cast(source, dtype) : cast_beyond_stock(source, dtype);
}

void forget_casts(const std::vector<at::Tensor>& tensors) {
  if (!any_casts()) {
    return;
  }
  note_writes(tensors); // first: see forget_persistent
  forget_persistent(tensors);
  if (tls_has_casts) {
    catch_up(caches());
  }
}

bool any_casts() {
  // The caller's write comes first. A cast that is announced later then reads what has been written.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return any_thread_holds_casts() || any_persistent();
}

} // namespace torch_promote
