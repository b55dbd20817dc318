// file: which CUDA graph is being captured
#pragma once

#include "cast/cast.h"

#include <cstdint>

// Declared as Python.h declares it, so that no more of that header is needed here.
struct _object;

namespace torch_promote {

// NOTE [ Casts and CUDA graphs ]
// While PyTorch captures a CUDA graph, a cast is not computed: the graph computes it at each replay. So a use outside
// of the capture must not get it, and neither must another graph, which may be replayed first. Conversely, a graph must
// not get a cast from before its capture: it would read that memory at each replay, whatever the weight is by then.
// Casts are therefore shared within one capture, and not across its borders.
//
// PyTorch tells whether a stream is capturing, and nothing about which graph. The captures are told apart by a count,
// which a hook on `torch.cuda.CUDAGraph.capture_begin` increases (torch_promote/integrations/cast_invalidation.py). The
// first capture that is met here installs the hook.

// 0 outside of a capture; a different number in each capture.
uint64_t capture_on_cuda(const Source& source);
inline uint64_t current_capture(const Source& source) {
  const bool cuda = source.impl.key_set().has_backend(c10::BackendComponent::CUDABit);
  return cuda ? capture_on_cuda(source) : 0;
}

// Notes that a capture begins.
void note_capture();

// Python functions without arguments. `is_capturing` reports whether the current stream is, for PyTorch 2.11, whose
// device guard does not; it may be None. `on_first` installs the hook. Takes over the references.
void set_capture_functions(_object* is_capturing, _object* on_first);

} // namespace torch_promote
