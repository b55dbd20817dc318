// file: casts of weights that outlive regions
#pragma once

#include "cache/kept_cast.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torch_promote {

// NOTE [ Persistent casts ]
// They belong to the process and hang on the weight itself, as its c10::BackendMeta: a slot for what a backend stores
// with a tensor, which PyTorch's CPU and CUDA backends leave empty. They therefore die with the weight, whoever owns
// it. The first use in a region takes such a cast over into the region's set, where it is found like any other. Only
// the cache modes beyond stock's attach a BackendMeta; the default mode never touches a user's weight.
//
// A tensor that shares the weight's data and has its own version counter can change the weight without a trace. The
// usual one is `weight.data`: PyTorch copies the BackendMeta when it makes that tensor, and the copy drops the casts
// and increases the weight's alias epoch. While another tensor or a storage object shares the data, no cast is served
// or stored (has_unique_storage), and none for memory that others may write to (has_outside_writers). Reported writes
// drop the casts too; see NOTE [ Unversioned writes ]. docs/casts.md lists the writes that remain undetected.

// A number that changes when a tensor is made that shares the weight's data under its own version counter, and when a
// write is reported. 0 if another library's BackendMeta occupies the weight's slot. Within a region too, casts that
// stock would make again are valid only for the epoch in which they were made.
uint64_t alias_epoch(const at::Tensor& weight);

// Whether no other tensor shares the tensor's data.
bool has_unique_storage(const at::Tensor& tensor);

// Whether code outside of PyTorch or another process may write to the memory: PyTorch did not allocate it
// (torch.from_numpy, from_dlpack, frombuffer), processes share it (share_memory_, CUDA IPC), or it is a part of a
// storage object of that kind. Memory of a file that is mapped privately (torch.load with mmap=True, safetensors) is
// neither.
bool has_outside_writers(const at::Tensor& tensor);
// Shows what a part of a storage object looks like: PyTorch has no function that tells.
void recognize_slices(const at::Tensor& whole, const at::Tensor& slice);

// The data of a persistent cast, which the current stream may use. Undefined if there is no valid one.
at::Tensor find_persistent(const CastRequest& wanted);
// Stores a cast without a node, unless the weight's epoch has changed since the cast began, or the cast is larger than
// the weight. `signature` is that of the weight before the cast.
void store_persistent(
    const CastRequest& wanted, const SourceSignature& signature, const at::Tensor& cast, uint64_t epoch_before);

// Drops the casts of these weights, which have been written to without a change of their version.
void forget_persistent(const std::vector<at::Tensor>& written);
// Drops all persistent casts, and in the regions of all threads those of frozen weights.
void forget_beyond_stock();

// How many there are in the process, and their bytes.
std::pair<uint64_t, uint64_t> persistent_casts();

} // namespace torch_promote
