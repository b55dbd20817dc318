// file: casts of weights that outlive regions
#pragma once

#include "cast_data.h"
#include "weight.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_promote {

// NOTE [ Persistent casts ]
// They belong to the process, and hang on the weight itself, as its c10::BackendMeta, a place for what a backend wants
// to keep with a tensor; the CPU's and CUDA's own kernels keep nothing there. So they die when the weight does, whoever
// holds it, and no table has to be searched. A tensor that shares the weight's data and has a version of its own,
// `weight.data`, could change it unseen; but as it is made, PyTorch copies the BackendMeta, which drops the casts.
// For each weight they weigh at most what it weighs itself.

// The data of a persistent cast of the tensor, if there is one that is still good.
std::optional<at::Tensor> find_persistent(const at::Tensor& tensor, const Weight& weight, at::ScalarType dtype);

// Keeps the data of a cast. `stamp` is the tensor's from before the cast.
void keep_persistent(const at::Tensor& tensor, const Weight& weight, Stamp stamp, const at::Tensor& cast);

// Drops the casts of tensors that are about to be written unseen, and of others that share their storage.
void forget_persistent(const std::vector<at::Tensor>& tensors);

void clear_persistent();

struct PersistentInfo {
  uint64_t entries = 0;
  uint64_t bytes = 0;
};
PersistentInfo persistent_info();

} // namespace torch_promote
