"""Distinguishes captures of CUDA graphs, and updates the casts that graphs read.

See NOTE [ Casts and CUDA graphs ] in csrc/cache/capture.h, and NOTE [ Graphs and persistent casts ] in
csrc/cache/graph_casts.h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_promote import _C

__all__ = ["tell_captures_apart", "watch_graphs"]


def tell_captures_apart(before_casts_in_advance: Callable[[], object]) -> None:
    """Lets the cache detect whether a stream is capturing, if only Python can tell, and count captures.

    Captures are counted from the first one in which the cache keeps a cast; until then, `torch.cuda.CUDAGraph` is not
    modified. Replays may write to weights; they are counted from the end of the first training region on a GPU.

    Args:
        before_casts_in_advance: Called at that end: see NOTE [ Weights cast together ] in csrc/cache/weight_batch.h.
    """
    is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

    def begin_casts_in_advance() -> None:
        _count_replays()
        before_casts_in_advance()

    _C.set_capture_functions(is_capturing, _count_captures, begin_casts_in_advance)


def _count_captures() -> None:
    graph: Any = torch.cuda.CUDAGraph
    capture_begin = graph.capture_begin

    @functools.wraps(capture_begin)
    def count_and_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _C.note_capture()
        return capture_begin(self, *args, **kwargs)

    graph.capture_begin = count_and_begin


def _count_replays() -> None:
    graph: Any = torch.cuda.CUDAGraph
    replay = graph.replay

    @functools.wraps(replay)
    def count_and_replay(self: Any) -> None:
        _C.note_replay()
        replay(self)

    graph.replay = count_and_replay


def watch_graphs() -> None:
    """Lets graphs read persistent casts, and makes each replay drop the casts of weights that its graph may write to.

    Called before the first region that keeps casts beyond stock's. A graph captured earlier may write to any weight.
    """
    graph: Any = torch.cuda.CUDAGraph
    capture_begin, capture_end, replay = graph.capture_begin, graph.capture_end, graph.replay
    reset = graph.reset

    @functools.wraps(capture_begin)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        casts = _C.begin_graph()
        try:
            result = capture_begin(self, *args, **kwargs)
        except BaseException:
            _C.end_graph(casts)
            raise
        self._torch_promote_casts = casts
        return result

    @functools.wraps(capture_end)
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        _C.end_graph(getattr(self, "_torch_promote_casts", None))  # None: the capture began before watch_graphs
        return capture_end(self, *args, **kwargs)

    @functools.wraps(reset)
    def reset_with_casts(self: Any) -> None:
        reset(self)
        self._torch_promote_casts = None

    @functools.wraps(replay)
    def replay_on_casts(self: Any) -> None:
        casts = getattr(self, "_torch_promote_casts", None)
        _C.before_replay(casts)
        replay(self)
        _C.after_replay(casts)

    graph.capture_begin, graph.capture_end, graph.replay, graph.reset = begin, end, replay_on_casts, reset_with_casts
