// file: memory for the small results of casts
#pragma once

#include <c10/core/Allocator.h>

namespace torch_promote {

// NOTE [ Small blocks ]
// A cast allocates what an op, or a backward pass, frees soon afterwards, over and over in the same few sizes. glibc's
// aligned allocation, which PyTorch's CPU allocator uses, has no fast way for that: it costs more than the conversion.
// So blocks of up to 16 KiB are kept for the next cast of the thread that lets go of them, a few of each size. They are
// aligned as PyTorch's are, and its memory profiler sees them as the tensors' own.
c10::Allocator* small_blocks();

} // namespace torch_promote
