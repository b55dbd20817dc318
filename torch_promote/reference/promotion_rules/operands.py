"""Operands of promotion rules: tensors with their dtypes, Python numbers with their types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from torch_promote.reference.dtypes import Kind, dtype_name, kind
from torch_promote.reference.promotion.states import Number, Operand

__all__ = [
    "NUMBER_TYPES",
    "OperandLike",
    "Parts",
    "describe",
    "fits",
    "number_type",
    "parts_of",
    "words_of_table",
]

OperandLike = torch.Tensor | Number | torch.dtype | Operand
"""A tensor, a Python number, a dtype (stands for a tensor with dimensions), or a description of an operand."""

#: The types of Python numbers, in ascending order of kind.
NUMBER_TYPES: tuple[type, ...] = (bool, int, float, complex)

_KIND_OF_NUMBER = {bool: Kind.BOOL, int: Kind.INTEGRAL, float: Kind.FLOATING, complex: Kind.COMPLEX}


def fits(number: type, dtype: torch.dtype) -> bool:
    """Whether tensors keep their dtype when combined with a Python number, which must not be of a higher kind.

    Args:
        number: bool, int, float or complex.
        dtype: The tensors' dtype.

    Example:
        >>> fits(int, torch.float16), fits(float, torch.int8)
        (True, False)
    """
    return kind(dtype) is not Kind.OPAQUE and _KIND_OF_NUMBER[number] <= kind(dtype)


def number_type(operand: OperandLike) -> type | None:
    """Returns the type of an operand that is a Python number, or None for a tensor.

    Args:
        operand: The operand. A wrapped `Operand` is a number of its dtype's kind.

    Raises:
        TypeError: The value is not an operand.

    Example:
        >>> number_type(True), number_type(2.5), number_type(torch.ones(()))
        (<class 'bool'>, <class 'float'>, None)
    """
    if isinstance(operand, torch.Tensor | torch.dtype):
        return None
    if isinstance(operand, Operand):
        return NUMBER_TYPES[kind(operand.dtype)] if operand.wrapped else None
    if isinstance(operand, bool | torch.SymBool):
        return bool
    if isinstance(operand, int | torch.SymInt):
        return int
    if isinstance(operand, float | torch.SymFloat):
        return float
    if isinstance(operand, complex):
        return complex
    raise TypeError(f"an operand is a tensor, a Python number, a torch.dtype or an Operand, got {operand!r}.")


def describe(operand: OperandLike) -> str:
    """Returns a description of an operand.

    Example:
        >>> describe(torch.ones(2, 3)), describe(5.5), describe(torch.int8)
        ('float32[2, 3]', '5.5 (a Python float)', 'int8')
    """
    if isinstance(operand, torch.dtype):
        return dtype_name(operand)
    number = number_type(operand)
    if isinstance(operand, torch.Tensor | Operand):
        shape = ", ".join(map(str, operand.shape))
        return f"{dtype_name(operand.dtype)}[{shape}]" if number is None else f"a Python {number.__name__}"
    assert number is not None
    return f"{operand} (a Python {number.__name__})"


def words_of_table(table: str, a: torch.dtype | type, b: torch.dtype, common: torch.dtype) -> str:
    """Returns a sentence that describes an entry of a table.

    Args:
        table: The name of the table.
        a: A dtype, or the type of a Python number.
        b: Another dtype.
        common: Their common dtype.

    Example:
        >>> words_of_table("The table", torch.int8, torch.uint8, torch.int16)
        'The table has int16 for int8 with uint8.'
        >>> words_of_table("The table", float, torch.float16, torch.float16)
        'A Python float is not of a higher kind than float16, so float16 stays.'
    """
    if not isinstance(a, type):
        return f"{table} has {dtype_name(common)} for {dtype_name(a)} with {dtype_name(b)}."
    if common is b:
        return f"A Python {a.__name__} is not of a higher kind than {dtype_name(b)}, so {dtype_name(b)} stays."
    return f"A Python {a.__name__} is of a higher kind than {dtype_name(b)}, and the two give {dtype_name(common)}."


class Parts(NamedTuple):
    """Operands by state: the distinct dtypes in order of appearance, and the highest type of number.

    Attributes:
        dims: The dtypes of the tensors with dimensions, or of all tensors if 0-dim tensors are not weak.
        zeros: The dtypes of the 0-dim tensors, if they are weak.
        number: The type of the Python numbers, or None.

    Example:
        >>> parts_of([torch.ones(3), torch.tensor(1), 2, 2.5], zero_dim_is_weak=True)
        Parts(dims=(torch.float32,), zeros=(torch.int64,), number=<class 'float'>)
    """

    dims: tuple[torch.dtype, ...]
    zeros: tuple[torch.dtype, ...]
    number: type | None


def parts_of(operands: Iterable[OperandLike], zero_dim_is_weak: bool) -> Parts:
    """Groups operands by state.

    Args:
        operands: The operands.
        zero_dim_is_weak: Whether 0-dim tensors are a state of their own.

    Example:
        >>> parts_of([torch.ones(3), torch.tensor(1)], zero_dim_is_weak=False)
        Parts(dims=(torch.float32, torch.int64), zeros=(), number=None)
    """
    dims: dict[torch.dtype, None] = {}
    zeros: dict[torch.dtype, None] = {}
    numbers: list[type] = []
    for operand in operands:
        number = number_type(operand)
        if number is not None:
            numbers.append(number)
        elif isinstance(operand, torch.dtype):
            dims[operand] = None
        else:
            assert isinstance(operand, torch.Tensor | Operand)
            (zeros if zero_dim_is_weak and not operand.shape else dims)[operand.dtype] = None
    return Parts(tuple(dims), tuple(zeros), max(numbers, key=NUMBER_TYPES.index, default=None))
