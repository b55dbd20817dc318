"""Records as JSON-compatible values, and back. Infinite numbers and NaN become strings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from torch_promote.policy.policy import Policy
from torch_promote.reference.dtypes import dtype_name

__all__ = ["from_plain", "number", "numbers", "to_plain"]

Record = TypeVar("Record")


def to_plain(value: Any) -> Any:
    """Returns a record and its contents as JSON-compatible values.

    Example:
        >>> to_plain({"errors": (0.5, float("inf"), float("nan")), "dtype": torch.float16})
        {'errors': [0.5, 'inf', 'nan'], 'dtype': 'float16'}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Policy):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    return value


def number(value: Any) -> float:
    """Returns a number that `to_plain` may have converted to a string.

    Raises:
        TypeError: The value is something else.

    Example:
        >>> number("-inf"), number(2)
        (-inf, 2.0)
    """
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("inf", "-inf", "nan")):
        raise TypeError(f"expected a number, got {value!r}")
    return float(value)


def numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a mapping; see `number`."""
    return {key: number(value) for key, value in data.items()}


def from_plain(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Returns the record from the data of `to_plain`. Its fields are numbers, texts, and tuples and mappings of them.

    Args:
        kind: The record's class, a dataclass.
        data: The data that `to_plain` returned.

    Raises:
        KeyError, TypeError: A field is missing, or not a number.
    """
    fields = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = data[field.name]
        if value is not None:
            value = _reader(str(field.type))(value)
        fields[field.name] = value
    return kind(**fields)


def _reader(annotation: str) -> Any:
    if annotation.startswith("float"):
        return number
    if annotation.startswith("Mapping[str, float]"):
        return numbers
    return tuple if annotation.startswith("tuple[str") else lambda value: value
