"""Compares what two runs of a program saved, bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["difference"]


def difference(ours: Path, stock: Path, patterns: Sequence[str]) -> str | None:
    """Returns the first difference between the files of two runs; None if all files have the same bits.

    A `.pt` or `.pth.tar` file is compared value by value, another file byte by byte.

    Args:
        ours: The working directory of one run.
        stock: The working directory of the other.
        patterns: Which files to compare.
    """
    found = _files(ours, patterns)
    expected = _files(stock, patterns)
    if found != expected:
        return f"the runs saved other files: {sorted(found)} and {sorted(expected)}"
    if not found:
        return f"the runs saved no file that matches {', '.join(patterns)}"
    for name in sorted(found):
        if name.endswith((".pt", ".pth.tar")):
            # Written by a program that has just run here, so loading may run code of it.
            one, other = (torch.load(folder / name, weights_only=False, map_location="cpu") for folder in (ours, stock))
            different = _of_values(one, other, name)
        else:
            same = (ours / name).read_bytes() == (stock / name).read_bytes()
            different = None if same else f"{name} differs"
        if different is not None:
            return different
    return None


def _files(folder: Path, patterns: Sequence[str]) -> set[str]:
    return {str(file.relative_to(folder)) for pattern in patterns for file in folder.glob(pattern) if file.is_file()}


def _of_values(one: Any, other: Any, where: str) -> str | None:
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, torch.Tensor):
        return _of_tensors(one, other, where)
    if isinstance(one, Mapping):
        if list(one) != list(other):
            return f"{where} has other keys"
        parts = [(f"{where}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} values"
        parts = [(f"{where}[{at}]", *pair) for at, pair in enumerate(zip(one, other, strict=True))]
    else:
        same = struct.pack("d", one) == struct.pack("d", other) if isinstance(one, float) else one == other
        return None if same else f"{where}: {one!r} and {other!r}"
    return next((found for part in parts if (found := _of_values(part[1], part[2], part[0])) is not None), None)


def _of_tensors(one: torch.Tensor, other: torch.Tensor, where: str) -> str | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{where}: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    bits = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    if torch.equal(*bits):
        return None
    different = (bits[0].view(-1, one.element_size()) != bits[1].view(-1, one.element_size())).any(1)
    largest = (one.double() - other.double()).abs().max().item() if one.is_floating_point() else float("nan")
    return f"{where}: {int(different.sum())} of {one.numel()} elements differ, by up to {largest:.3g}"
