"""Tells captures of CUDA graphs apart, and ends casts when a graph is replayed.

See NOTE [ Casts and CUDA graphs ] in csrc/cache/capture.h.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_promote import _C

__all__ = ["tell_captures_apart", "watch_replays"]


def tell_captures_apart() -> None:
    """Lets the cache detect whether a stream is capturing, if only Python can tell, and count captures.

    Captures are counted from the first one in which the cache keeps a cast; until then, `torch.cuda.CUDAGraph` is not
    modified.
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


def watch_replays() -> None:
    """Makes each replay drop all casts beyond stock's, because the graph may write to any weight.

    Called before the first region that keeps casts beyond stock's.
    """
    graph: Any = torch.cuda.CUDAGraph
    replay = graph.replay

    @functools.wraps(replay)
    def replay_and_forget(self: Any) -> None:
        replay(self)
        _C.forget_beyond_stock()

    graph.replay = replay_and_forget
