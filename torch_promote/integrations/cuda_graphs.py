"""Tells the captures of CUDA graphs apart, for NOTE [ Casts and CUDA graphs ] in csrc/cache/capture.h."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_promote import _C

__all__ = ["tell_captures_apart"]


def tell_captures_apart() -> None:
    """Has the cache ask whether a stream is capturing, where only Python can tell, and count captures.

    Captures are counted from the first one in which the cache keeps a cast: before that, `torch.cuda.CUDAGraph` stays
    as it is.
    """
    _C.set_capture_functions(getattr(torch._C, "_cuda_isCurrentStreamCapturing", None), _count_captures)


def _count_captures() -> None:
    graph: Any = torch.cuda.CUDAGraph
    capture_begin = graph.capture_begin

    @functools.wraps(capture_begin)
    def count_and_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _C.note_capture()
        return capture_begin(self, *args, **kwargs)

    graph.capture_begin = count_and_begin
