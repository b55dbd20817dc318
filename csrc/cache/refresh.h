// file: makes the casts of weights again after an optimizer's step, in their memory
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_promote {

// Copies each weight to its cast, with one `_foreach_copy_` for each device and pair of dtypes.
void copy_together(const std::vector<at::Tensor>& casts, const std::vector<at::Tensor>& weights);

// NOTE [ Casts after a step ]
// An optimizer's step outdates the persistent casts of its weights. On a GPU, those that a region has used since the
// step before are made again at once, in the same memory and by one `_foreach_copy_`, because they will be needed
// again. A cast that somebody else still has (a graph that waits for its backward, another stream) is made at its next
// use.
class CastsToRefresh {
 public:
  // Takes them out, before the step is noted.
  explicit CastsToRefresh(const std::vector<at::Tensor>& weights);
  // Afterwards.
  void refresh();

 private:
  std::vector<at::Tensor> weights_;
  std::vector<at::Tensor> casts_;
};

} // namespace torch_promote
