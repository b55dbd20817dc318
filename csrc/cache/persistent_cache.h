// file: casts of weights that outlive regions
#pragma once

#include "cache/cast_data.h"
#include "cache/weight.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_promote {

// NOTE [ Persistent casts ]
// They belong to the process and hang on the weight itself, as its c10::BackendMeta: a slot for what a backend stores
// with a tensor, which PyTorch's CPU and CUDA backends leave empty. They therefore die with the weight, whoever owns
// it, and no table has to be searched. The casts of one weight take at most as many bytes as the weight. Only the cache
// modes beyond stock's attach a BackendMeta; the default mode never touches a user's weight.
//
// A tensor that shares the weight's data and has its own version counter can change the weight without a trace. The
// usual one is `weight.data`: PyTorch copies the BackendMeta when it makes that tensor, and the copy drops the casts
// and increases the weight's alias epoch. While another tensor or a storage object shares the data, no cast is served
// or stored (has_unique_storage). Some such tensors are made without that copy, in `set_` for example: note_alias.
// Writes of fused optimizers are noted; see NOTE [ Unversioned writes ]. A write through the `.data` of a view that is
// gone before the next use remains undetected; see docs/casts.md.

// A number that changes when a tensor is made that shares the weight's data under its own version counter. 0 if another
// library's BackendMeta occupies the weight's slot. Within a region too, casts that stock would make again are valid
// only for the epoch in which they were made.
uint64_t alias_epoch(const at::TensorBase& weight);

// Somebody is about to share the tensor's data: drops the casts beyond stock's, of a view those of its base.
void note_alias(const at::Tensor& tensor);

// Expires with the weight's data, and not before: alias_epoch has returned a number.
WeakMeta weak_meta_of(const at::TensorBase& weight);

// Whether a storage has this many owners, not counting its Python object.
bool is_owned_by(const c10::Storage& storage, size_t owners);
// Whether the weight, and `tensor` if that is a view of it, are the only tensors over the data.
bool has_unique_storage(const at::Tensor& tensor, bool is_view);

// The data of a persistent cast of the tensor, if there is a valid one. Notes a use without a node, unless `span` is 0;
// see FirstUse.
std::optional<at::Tensor> find_persistent(
    const Source& source, const Weight& weight, at::ScalarType dtype, uint64_t span = 0);
// The number of the node that such a use has left to a later one.
std::optional<uint64_t> number_from_first_use(const at::TensorBase& weight, at::ScalarType dtype, uint64_t span);

// What was known when a cast began: see NOTE [ Unversioned writes ], and `alias_epoch`.
struct Epochs {
  uint64_t writes;
  uint64_t aliases;
};

// Stores the data of a cast, unless its source has been written to since it began. `signature` is that of the tensor
// before the cast.
void store_persistent(
    const Source& source,
    const Weight& weight,
    const SourceSignature& signature,
    const at::Tensor& cast,
    Epochs began);

// Drops the casts of all weights that share a storage with one of these tensors, which have been written to without a
// change of their version.
void forget_persistent(const std::vector<at::Tensor>& tensors);

void clear_persistent();

// After a write that may have been to any weight: drops all persistent casts, and in the regions of all threads those
// that stock would make again.
void forget_beyond_stock();

// Whether there may be persistent casts.
bool any_persistent();

struct PersistentInfo {
  uint64_t entries = 0;
  uint64_t bytes = 0;
};
PersistentInfo persistent_info();

} // namespace torch_promote
