"""Converts the results of a step to named tensors, and computes the distance of two results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch_promote.errors import StepError

__all__ = ["distance", "distances", "named_tensors", "read_result"]


def read_result(result: Any) -> dict[str, torch.Tensor]:
    """Converts the result of a step to detached copies of named tensors.

    Args:
        result: A tensor ("loss" if it has one element, or "output"), a number ("loss"), or a mapping, dataclass or
            sequence of such, whose names are joined by dots.

    Raises:
        StepError: It contains no tensor and no number.

    Example:
        >>> read_result({"loss": 0.5, "logits": torch.zeros(2)})
        {'loss': tensor(0.5000, dtype=torch.float64), 'logits': tensor([0., 0.])}
    """
    return {name: tensor.detach().clone() for name, tensor in named_tensors(result).items()}


def named_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors in the result of a step, by name, without copying. Numbers become float64 tensors.

    Raises:
        StepError: There is none, or two have the same name.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors("", result):
        if name in found:
            raise StepError(f"step() returned two results with the name {name!r}. Give them different names.")
        found[name] = tensor
    if not found:
        raise StepError(
            f"step() returned {type(result).__name__}, in which there is no tensor or number to compare. Return the "
            f"loss, the outputs, or a dict of metrics."
        )
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        yield name or ("loss" if whole.numel() == 1 else "output"), whole
    elif isinstance(value, bool | int | float):
        yield name or "loss", torch.tensor(float(value), dtype=torch.float64)
    elif type(value).__module__ == "numpy":
        with contextlib.suppress(TypeError, ValueError):  # text, or objects
            yield from _tensors(name, torch.as_tensor(value))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(name, {one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", range(len(value)))
        yield from _tensors(name, dict(zip(fields, value, strict=True)))


def distance(candidate: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the distance of a result from the reference's, relative to the reference.

    For one number it is |a - b| / |b|, for several the relative L2 norm, both in float64. If the reference is zero, it
    is the absolute difference. It is infinite if a non-finite value is in only one of the two, or differs.

    Raises:
        StepError: The shapes differ.

    Example:
        >>> distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
    """
    if candidate.shape != reference.shape:
        raise StepError(
            f"step() returned a tensor of shape {list(candidate.shape)}, but of shape {list(reference.shape)} under "
            f"the reference. Only results of the same shape can be compared."
        )
    ours, theirs = _wide(candidate), _wide(reference)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(same.all()):
        return 0.0
    finite = theirs[theirs.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    scale = largest if 0 < largest < math.inf else 1.0  # the square of a large number is not finite
    difference = float(torch.linalg.vector_norm(ours[~same] / scale - theirs[~same] / scale))
    size = float(torch.linalg.vector_norm(finite / scale))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else difference


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in float64."""
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    dense = dense.dequantize() if dense.is_quantized else dense
    return dense.to("cpu", torch.complex128 if dense.is_complex() else torch.float64).reshape(-1)


def distances(candidate: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Returns `distance` for each name.

    Raises:
        StepError: The names or the shapes differ.
    """
    if candidate.keys() != reference.keys():
        only = sorted(candidate.keys() ^ reference.keys())
        raise StepError(f"step() returned other names than under the reference: only one side has {', '.join(only)}.")
    return {name: distance(candidate[name], reference[name]) for name in reference}
