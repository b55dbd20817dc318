"""What a soak measures of its process: memory, Python objects, and the sizes of torch_promote's registries."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter
from pathlib import Path

import torch
from registries import registry_sizes

from torch_promote.regions.unused_overrides import Line

__all__ = ["MEMORY", "Reading", "read"]

#: The measures of memory, in the order of the tables, with their units.
MEMORY = {"resident": "bytes", "allocated": "bytes", "python blocks": "blocks", "tensors": "tensors", "ours": "objects"}

#: The value of each measure at one moment, by name. Names of registries begin with "registry ".
Reading = dict[str, int]

_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and newer."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2.split())


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallInfo


def _allocated() -> int:
    """Returns the bytes that malloc has handed out: tensors and C++ objects, and Python's objects of over 512 bytes."""
    if _mallinfo2 is None:
        return 0  # another C library: the soak then reports no growth of it
    info = _mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def _resident() -> int:
    """Returns the resident bytes that belong to no file: the code of libraries becomes resident at its first use."""
    [line] = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def read() -> Reading:
    """Measures the process after a garbage collection."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    tensors = sum(number for kind, number in kinds.items() if issubclass(kind, torch.Tensor))
    # Not lines of programs: a registry keeps between 3,584 and 4,096.
    counted = ((kind, number) for kind, number in kinds.items() if kind is not Line)
    ours = sum(number for kind, number in counted if str(kind.__module__).startswith("torch_promote"))
    del kinds
    values = {
        "resident": _resident(),
        "allocated": _allocated(),
        "python blocks": sys.getallocatedblocks(),
        "tensors": tensors,
        "ours": ours,
    }
    return values | {f"registry {name}": size for name, size in registry_sizes().items()}
