// file: makes the casts of weights again after an optimizer's step, in their memory
#include "cache/refresh.h"

#include "cache/persistent_cache.h"
#include "cache/weight_casts.h"
#include "cache/write_log.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy_ops.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

namespace torch_promote {

void copy_together(const std::vector<at::Tensor>& casts, const std::vector<at::Tensor>& weights) {
  const auto same_kind = [&](size_t one, size_t other) {
    return casts[one].scalar_type() == casts[other].scalar_type() && casts[one].device() == casts[other].device() &&
           weights[one].scalar_type() == weights[other].scalar_type();
  };
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::vector<bool> done(casts.size());
  for (size_t first = 0; first < casts.size(); ++first) {
    if (done[first]) {
      continue;
    }
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    for (size_t i = first; i < casts.size(); ++i) {
      if (!done[i] && same_kind(first, i)) {
        done[i] = true;
        to.push_back(casts[i]);
        from.push_back(weights[i]);
      }
    }
    at::_ops::_foreach_copy_::call(to, from, /*non_blocking=*/false);
  }
}

CastsToRefresh::CastsToRefresh(const std::vector<at::Tensor>& weights) {
  for (const at::Tensor& weight : weights) {
    const WeightCasts* const owner = casts_of(weight);
    if (owner == nullptr || !weight.is_cuda() || !has_unique_storage(weight, /*is_view=*/false)) {
      continue;
    }
    const at::TensorImpl& impl = *weight.unsafeGetTensorImpl();
    PersistentCasts taken;
    {
      const std::lock_guard<std::mutex> lock(owner->mutex());
      PersistentCasts& casts = owner->casts();
      const auto end = std::stable_partition(casts.begin(), casts.end(), [&impl](const auto& cast) {
        const SourceSignature& of = cast->data().signature();
        const bool is_of_all = of.same_storage(impl) && of.is_same_part(impl);
        return !(cast.use_count() == 1 && cast->used && is_of_all && cast->may_be_written(impl));
      });
      std::move(end, casts.end(), std::back_inserter(taken));
      casts.erase(end, casts.end());
    }
    for (const auto& cast : taken) {
      weights_.push_back(weight);
      casts_.push_back(cast->data().tensor());
    }
  }
}

void CastsToRefresh::refresh() {
  if (casts_.empty()) {
    return;
  }
  struct Began {
    SourceSignature signature;
    Epochs epochs;
  };
  std::vector<Began> began;
  for (const at::Tensor& weight : weights_) {
    began.push_back({SourceSignature(Source(weight)), {write_epoch, alias_epoch(weight)}});
  }
  copy_together(casts_, weights_);
  for (size_t i = 0; i < casts_.size(); ++i) {
    const Weight weight{Reuse::data_only, &weights_[i], /*is_view=*/false};
    store_persistent(Source(weights_[i]), weight, began[i].signature, casts_[i], began[i].epochs, /*used=*/false);
  }
}

} // namespace torch_promote
