// file: looks a cast up in this thread's caches and the persistent cache, or makes and keeps it
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace torch_promote {

// `tensor.to(dtype)`, or an earlier cast if this thread's cache mode allows it. The caller has checked that the tensor
// is eligible and has another dtype.
at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype);

// While one lives, the thread casts for an op that may return a view of its argument. The op's caller may write into
// that view, so the caches share no data beyond what stock shares.
inline constinit thread_local bool tls_results_may_alias = false;
class ResultsMayAlias {
 public:
  ResultsMayAlias() : before_(std::exchange(tls_results_may_alias, true)) {}
  ~ResultsMayAlias() {
    tls_results_may_alias = before_;
  }
  ResultsMayAlias(const ResultsMayAlias&) = delete;
  ResultsMayAlias& operator=(const ResultsMayAlias&) = delete;

 private:
  bool before_;
};

// Drops the casts, persistent ones and those of all threads, of tensors that share a storage with one of these, which
// have just been written to without a change of their version. See NOTE [ Unversioned writes ].
void forget_casts(const std::vector<at::Tensor>& tensors);

// Whether a thread holds or makes casts, or a weight may have persistent ones. To be called after a write.
bool any_casts();

} // namespace torch_promote
