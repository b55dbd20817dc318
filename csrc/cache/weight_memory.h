// file: the memory of a weight, to be recognized and read later without keeping the weight alive
#pragma once

#include "cache/cast_data.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>

#include <cstdint>

namespace torch_promote {

// Refers weakly to the storage, and not at all to the tensor: torch.utils.swap_tensors refuses tensors with weak
// references, and this outlives regions.
class WeightMemory {
 public:
  // Of a plain tensor.
  explicit WeightMemory(const at::TensorImpl& weight);

  // Whether it is the same tensor over the same memory. Its version may have changed.
  bool is_of(const at::TensorImpl& tensor) const;
  // A new tensor over the memory. Undefined if that is gone, or too small now (FSDP resizes storages).
  at::Tensor tensor() const;

  bool is_gone() const {
    return storage_.expired();
  }
  bool has_one_owner() const;
  uint32_t version() const { // of the weight, now
    return counter_.current_version();
  }
  const at::TensorImpl* address() const { // to compare with
    return address_;
  }
  const c10::StorageImpl* storage() const { // to compare with
    return storage_._unsafe_get_target();
  }

 private:
  const at::TensorImpl* address_;
  WeakStorage storage_;
  c10::VariableVersion counter_;
  const void* data_;
  c10::DispatchKeySet keys_;
  at::ScalarType dtype_;
  int64_t offset_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

} // namespace torch_promote
