// file: memory that may be written to without an op of PyTorch's, and so without a trace
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <vector>

namespace torch_promote {

// NOTE [ Outside writers ]
// Nothing reports a write by NumPy, by another process, or by the replay of a CUDA graph. So no cast outlives its
// region if its source lies in memory
// - that PyTorch did not allocate (torch.from_numpy, from_dlpack, frombuffer),
// - that other processes share (share_memory_, CUDA IPC), or that is a part of another storage object,
// - that an optimizer stepped on while a CUDA graph was captured: each replay of the graph steps again.
// A file that is mapped privately (torch.load with mmap=True, safetensors) is none of these, in whole or in parts.
bool has_outside_writers(const c10::StorageImpl& storage);

// Shows what a part of a storage object looks like: PyTorch has no function that tells.
void recognize_slices(const at::Tensor& whole, const at::Tensor& slice);
bool recognizes_slices();

// Notes that a CUDA graph that is being captured writes to these tensors.
void note_captured_writes(const std::vector<at::Tensor>& tensors);

} // namespace torch_promote
