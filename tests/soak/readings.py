"""What a soak measures of its process: memory, Python objects, and the sizes of torch_promote's registries."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from registries import registry_sizes

__all__ = ["MEMORY", "Reading", "read"]

#: The measures of memory, in the order of the tables, with their units.
MEMORY = {"resident": "bytes", "allocated": "bytes", "python blocks": "blocks", "tensors": "tensors", "ours": "objects"}

#: The value of each measure at one moment, by name. Names of registries begin with "registry ".
Reading = dict[str, int]

_PAGE = os.sysconf("SC_PAGE_SIZE")


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


def read() -> Reading:
    """Measures the process after a garbage collection."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    tensors = sum(number for kind, number in kinds.items() if issubclass(kind, torch.Tensor))
    ours = sum(number for kind, number in kinds.items() if str(kind.__module__).startswith("torch_promote"))
    del kinds
    values = {
        "resident": int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE,
        "allocated": _allocated(),
        "python blocks": sys.getallocatedblocks(),
        "tensors": tensors,
        "ours": ours,
    }
    return values | {f"registry {name}": size for name, size in registry_sizes().items()}
