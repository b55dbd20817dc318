"""Starts the stand-in in this process, and has the functions with which tests measure and set its state."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cuda_stand_in import build

_library: ctypes.CDLL | None = None


def running() -> bool:
    """Whether this process has the stand-in."""
    return _library is not None


def start(devices: int = 2) -> None:
    """Starts the stand-in in this process. Does nothing if it has been started."""
    global _library
    if running():
        return
    if reason := build.why_not():
        raise RuntimeError(reason)
    if "torch" in sys.modules:
        raise RuntimeError(
            "PyTorch is already imported, and asks for devices while it is. Start the stand-in first: "
            "cuda_stand_in.start() before `import torch`, or pytest --device cuda-stand-in."
        )
    if devices not in (1, 2):
        raise ValueError(f"the stand-in has one or two devices, not {devices}.")
    _library = ctypes.CDLL(str(build.library()))
    for name in ("counts", "casts"):
        getattr(_library, f"stand_in_{name}").restype = ctypes.c_char_p
    _library.stand_in_graph_begin.argtypes = [ctypes.c_int, ctypes.c_int64]
    _library.stand_in_graph_begin.restype = ctypes.c_int64
    for name in ("end", "replay", "free"):
        getattr(_library, f"stand_in_graph_{name}").argtypes = [ctypes.c_int64]
    _library.stand_in_set_capturing.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    _library.stand_in_is_capturing.argtypes = [ctypes.c_int, ctypes.c_int64]
    _library.stand_in_set_device_count(devices)
    from cuda_stand_in import torch_cuda

    torch_cuda.provide()
    os.environ.setdefault("TORCH_PROMOTE_KNOWN_GAPS", str(Path(__file__).with_name("known_gaps.toml")))
    _start_in_spawned_processes(devices)


def _start_in_spawned_processes(devices: int) -> None:
    """Starts the stand-in in spawned processes before they unpickle their work, which imports torch."""
    from multiprocessing import spawn

    stock = spawn.get_command_line

    def get_command_line(**arguments: object) -> list[str]:
        line = stock(**arguments)
        at = line.index("-c") + 1
        folder = str(Path(__file__).parents[1])
        line[at] = (
            f"import sys; sys.path.insert(0, {folder!r}); import cuda_stand_in as s; s.start({devices}); {line[at]}"
        )
        return line

    spawn.get_command_line = get_command_line


def c() -> ctypes.CDLL:
    """The functions of the stand-in in C++."""
    if _library is None:
        raise RuntimeError("the stand-in is not running in this process. See cuda_stand_in.start.")
    return _library


# --- what is measured


def _counts() -> dict[str, int]:
    return {name: int(count) for name, count in map(str.split, c().stand_in_counts().decode().splitlines())}


def kernels() -> Counter[str]:
    """The number of runs of each kernel since `reset`, such as {"aten::mm": 3}. Views are not kernels.

    A kernel is a call of an op that computes. A call of an op of lists, such as `_foreach_add_`, is one kernel, and so
    is `_foreach_copy_` where CUDA copies all tensors at once: on one device, dense, from one dtype, with equal strides.
    Elsewhere `_foreach_copy_` counts as one `copy_` for each tensor. A GPU takes several launches for a long list:
    `_foreach_copy_` one for each 64 tensors, or 320 parts of 65,536 elements.
    """
    return Counter({name: count for name, count in _counts().items() if "::" in name})


def live_bytes(device: int = 0) -> int:
    """The bytes of all tensors on a device."""
    return _counts()[f"live_bytes{device}"]


def peak_bytes(device: int = 0) -> int:
    """The peak of live bytes on a device since `reset`."""
    return _counts()[f"peak_bytes{device}"]


def reset() -> None:
    """Sets all counts to zero and the peaks to the live bytes, and ends captures."""
    c().stand_in_reset()


@dataclass(frozen=True, slots=True)
class Cast:
    """A copy of one tensor to another dtype, on the device. Conversions inside other ops do not count."""

    source: str
    target: str
    read: int
    written: int
    address: int
    of_leaf: bool  # a leaf that requires a gradient, or a view of one
    backward: bool


@dataclass
class Counts:
    """The counts of a `counting` block.

    Attributes:
        kernels: The number of runs of each kernel.
        casts: The casts, in their order.
        peak_bytes: The peak of live bytes on device 0, above those before the block.
        events_recorded: Events that were recorded on a stream.
        events_waited_for: The number of waits of a stream for an event.
        data_ptrs_recorded: The number of times that memory was marked as used by another stream.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    casts: list[Cast] = field(default_factory=list)
    peak_bytes: int = 0
    events_recorded: int = 0
    events_waited_for: int = 0
    data_ptrs_recorded: int = 0

    @property
    def total(self) -> int:
        """The number of kernels that ran."""
        return self.kernels.total()


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts events in the block; the counts are available at its end. Blocks cannot be nested."""
    reset()
    before = _counts()
    counts = Counts()
    c().stand_in_note_casts(1)
    try:
        yield counts
        counts.casts = [_cast(*line.split()) for line in c().stand_in_casts().decode().splitlines()]
    finally:
        c().stand_in_note_casts(0)
    after = _counts()
    counts.kernels = kernels()
    counts.peak_bytes = after["peak_bytes0"] - before["live_bytes0"]
    for name in ("events_recorded", "events_waited_for", "data_ptrs_recorded"):
        setattr(counts, name, after[name])


def _cast(source: str, target: str, *numbers: str) -> Cast:
    read, written, address, of_leaf, backward = map(int, numbers)
    return Cast(source, target, read, written, address, bool(of_leaf), bool(backward))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """In the block, the current stream reports that it is capturing a CUDA graph. Kernels still run."""
    import torch

    stream = torch.cuda.current_stream()
    c().stand_in_set_capturing(stream.device_index, stream.stream_id, 1)
    try:
        yield
    finally:
        c().stand_in_set_capturing(stream.device_index, stream.stream_id, 0)
