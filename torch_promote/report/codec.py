"""Dataclasses as JSON-compatible values, and back.

An error of `decode` has the place of the wrong value as its notes, the innermost first: see `place_of`.

`decode` reads the annotations of a dataclass with `typing.get_type_hints`, so the module that defines the class has to
import the annotated types at run time, not under `TYPE_CHECKING`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import reprlib
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, Union

import torch

from torch_promote.reference.dtypes import dtype_name

Decoder: TypeAlias = Callable[[Any], Any]

#: What `decode`, and the `from_dict` of a class, raise for data of another type.
WRONG_DATA = (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError)


def encode(value: Any) -> Any:
    """Returns a value as JSON-compatible values; infinite numbers and NaN become strings, and dataclasses dicts."""
    if value is None or type(value) in (str, int, bool):
        return value
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
    """Returns the value of a type from the data that `encode` returned. Raises one of WRONG_DATA for other data."""
    # The type is a dataclass, or any that the field of one may have: numbers, texts, dtypes, enums, classes with
    # `from_dict`, and tuples, lists, mappings, unions and literals of these.
    return _decoder(kind)(data)


def decode_fields(kind: Any, data: Mapping[str, Any]) -> Any:
    """Returns a dataclass from a dict of its fields, whether or not the class has `from_dict`."""
    return kind(**_read_fields(_fields(kind), data))


def decode_record(kinds: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """Returns the fields of a dict that have a type here."""
    return _read_fields([(name, _decoder(kind)) for name, kind in kinds.items()], data)


def place_of(error: BaseException) -> str:
    """Returns the place of the data that an error of `decode` is about, such as "sites[1]"."""
    return "".join(reversed(getattr(error, "__notes__", ()))).removeprefix(".")


def refuse_constant(constant: str) -> None:
    """Refuses NaN and infinities, which Python's reader of JSON accepts. `encode` writes them as strings."""
    raise ValueError(f"JSON has no {constant}")


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Decoder]]:
    hints = typing.get_type_hints(kind)
    return [(field.name, _decoder(hints[field.name])) for field in dataclasses.fields(kind)]


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """Returns the function that reads values of a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda data: data
    if origin in (Union, types.UnionType):
        return functools.partial(_read_union, types.NoneType in arguments, list(map(_decoder, arguments)))
    if origin is Literal:
        return lambda data: _expect(data in arguments, kind, data)
    if origin is Counter:
        return lambda data: Counter(_read_mapping(_decoder(int), data))
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_read_mapping, _decoder(arguments[1]))
    if origin is not None and issubclass(origin, tuple) and arguments[-1] is not Ellipsis:
        return functools.partial(_read_sequence, tuple, list(map(_decoder, arguments)), True)
    if origin is not None:
        sequence = list if issubclass(origin, list) else tuple
        return functools.partial(_read_sequence, sequence, itertools.repeat(_decoder(arguments[0])), False)
    if kind is float:
        return _read_float
    if kind is torch.dtype:
        return _read_dtype
    if issubclass(kind, enum.Enum):
        return lambda data: kind(data)
    if hasattr(kind, "from_dict"):
        return lambda data: data if type(data) is kind else kind.from_dict(data)
    if dataclasses.is_dataclass(kind):
        return lambda data: data if type(data) is kind else decode_fields(kind, data)
    if kind is int:
        return lambda data: _expect(_is_int(data), kind, data)
    return lambda data: _expect(isinstance(data, kind), kind, data)


def _is_int(data: Any) -> bool:
    """Whether data is an int of 64 bits. A bool is an int to Python, but not in a file."""
    return isinstance(data, int) and not isinstance(data, bool) and -(2**63) <= data < 2**63


def _read_fields(fields: Iterable[tuple[str, Decoder]], data: Any) -> dict[str, Any]:
    _expect(isinstance(data, Mapping), dict, data)
    found, name = {}, ""
    try:
        for name, decoder in fields:
            found[name] = decoder(data[name])
    except WRONG_DATA as error:
        error.add_note(f".{name}")
        raise
    return found


def _read_union(has_none: bool, decoders: list[Decoder], data: Any) -> Any:
    if data is None and has_none:
        return None
    errors: list[Exception] = []
    for decoder in decoders:
        try:
            return decoder(data)
        except (KeyError, TypeError, ValueError) as error:
            errors.append(error)
    raise errors[0]


def _read_mapping(decoder: Decoder, data: Any) -> dict[str, Any]:
    _expect(isinstance(data, Mapping), dict, data)
    found, key = {}, ""
    try:
        for key, item in data.items():
            found[key] = decoder(item)
    except WRONG_DATA as error:
        error.add_note(f"[{key!r}]")
        raise
    return found


def _read_sequence(kind: Any, decoders: Iterable[Decoder], strict: bool, data: Any) -> Any:
    _expect(isinstance(data, list | tuple), kind, data)
    found: list[Any] = []
    try:
        for decoder, item in zip(decoders, data, strict=strict):
            found.append(decoder(item))
    except WRONG_DATA as error:
        error.add_note(f"[{len(found)}]")
        raise
    return kind(found)


def _read_float(data: Any) -> float:
    is_number = isinstance(data, float) or _is_int(data)
    return float(_expect(is_number or data in ("inf", "-inf", "nan"), float, data))


def _read_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected the name of a dtype, got {reprlib.repr(name)}")
    return dtype


def _expect(fits: bool, kind: Any, data: Any) -> Any:
    if not fits:
        raise TypeError(f"expected {getattr(kind, '__name__', kind)}, got {reprlib.repr(data)}")
    return data
