"""Dataclasses as JSON-compatible values, and back.

`decode` reads the annotations of a dataclass with `typing.get_type_hints`, so the module that defines the class has to
import the annotated types at run time, not under `TYPE_CHECKING`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

import torch

from torch_promote.reference.dtypes import dtype_name

__all__ = ["decode", "decode_fields", "encode"]


def encode(value: Any) -> Any:
    """Returns a value as JSON-compatible values. Infinite numbers and NaN become strings.

    A dataclass becomes a dict of its fields, and an object that has `to_dict`, such as a `Policy`, what it returns.

    Example:
        >>> encode({"errors": (0.5, float("inf"), float("nan")), "dtype": torch.float16})
        {'errors': [0.5, 'inf', 'nan'], 'dtype': 'float16'}
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, data: Any) -> Any:
    """Returns the value of a type from the data that `encode` returned.

    Args:
        kind: A dataclass, or any type that the field of one may have: numbers, texts, dtypes, enums, classes with
            `from_dict`, and tuples, lists, mappings, unions and literals of these.
        data: The data.

    Raises:
        KeyError, TypeError, ValueError: A field is missing, or has a value of another type.

    Example:
        >>> decode(tuple[float, ...], [1, "inf"]), decode(torch.dtype | None, "float16")
        ((1.0, inf), torch.float16)
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, data)
    if origin is Literal:
        return _expect(data in arguments, kind, data)
    if origin is not None:
        return _decode_container(origin, arguments, data)
    if kind is float:
        is_number = isinstance(data, int | float) and not isinstance(data, bool)
        return float(_expect(is_number or data in ("inf", "-inf", "nan"), kind, data))
    if kind is torch.dtype:
        return _dtype_named(data)
    if issubclass(kind, enum.Enum):
        return kind(data)
    if hasattr(kind, "from_dict"):
        return kind.from_dict(data)
    if dataclasses.is_dataclass(kind):
        return decode_fields(kind, data)
    # A bool is an int to Python, but not in a file.
    return _expect(isinstance(data, kind) and isinstance(data, bool) == (kind is bool), kind, data)


def decode_fields(kind: Any, data: Mapping[str, Any]) -> Any:
    """Returns a dataclass from a dict of its fields, whether or not the class has `from_dict`."""
    hints = _hints(kind)
    return kind(**{field.name: decode(hints[field.name], data[field.name]) for field in dataclasses.fields(kind)})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode_union(kinds: tuple[Any, ...], data: Any) -> Any:
    if data is None:
        return _expect(types.NoneType in kinds, kinds, data)
    errors: list[Exception] = []
    for kind in kinds:
        if kind is not types.NoneType:
            try:
                return decode(kind, data)
            except (KeyError, TypeError, ValueError) as error:
                errors.append(error)
    raise errors[-1]


def _decode_container(origin: Any, arguments: tuple[Any, ...], data: Any) -> Any:
    if issubclass(origin, Mapping):
        _expect(isinstance(data, Mapping), origin, data)
        kind = int if origin is Counter else arguments[1]
        found = {key: decode(kind, item) for key, item in data.items()}
        return Counter(found) if origin is Counter else found
    _expect(isinstance(data, Sequence) and not isinstance(data, str), origin, data)
    if issubclass(origin, tuple) and arguments[-1] is not Ellipsis:
        return tuple(decode(kind, item) for kind, item in zip(arguments, data, strict=True))
    items = [decode(arguments[0], item) for item in data]
    return items if issubclass(origin, list) else tuple(items)


def _dtype_named(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected the name of a dtype, got {name!r}")
    return dtype


def _expect(fits: bool, kind: Any, data: Any) -> Any:
    if not fits:
        raise TypeError(f"expected {getattr(kind, '__name__', kind)}, got {data!r}")
    return data
