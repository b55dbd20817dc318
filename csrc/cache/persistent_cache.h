// file: casts of weights that outlive regions
#pragma once

#include "cache/cast_data.h"
#include "cache/weight.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_promote {

// NOTE [ Persistent casts ]
// They belong to the process, and hang on the weight itself, as its c10::BackendMeta, a place for what a backend wants
// to keep with a tensor; the CPU's and CUDA's own kernels keep nothing there. So they die when the weight does, whoever
// holds it, and no table has to be searched. For each weight they weigh at most what it weighs itself.
//
// A tensor that shares the weight's data and has a version of its own could change it unseen. The usual one is
// `weight.data`: as it is made, PyTorch copies the BackendMeta, which drops the casts and counts on the watch. While
// any other tensor or storage object shares the data, no cast is served or kept (is_alone). Optimizers whose kernels
// count no version are told of by a hook on `step`. What remains is a write through a view's `.data` that is gone again
// before the next use, and collectives that write into a weight; see docs/casts.md.

// A number that changes when a tensor is made that shares the weight's data under a version of its own. 0 if the weight
// cannot be watched. Casts that stock would make anew are good only as long as it stays.
uint64_t watch_weight(const at::TensorBase& weight);

// Whether no tensor but the weight, and the view of it that is given if `tensor` is one, shares the data.
bool is_alone(const at::Tensor& tensor, const Weight& weight);

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
