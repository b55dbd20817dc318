"""The table of Python's operators: how to parse each, what it computes of numbers, and which op it runs on tensors."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_promote.reference.dtypes import TYPECODES, Family, Kind, dtype_name, family, kind
from torch_promote.reference.promotion import Number, Operand, PromotionError

__all__ = ["OPERATORS", "Operator", "refuse", "wrapped_value"]

_REAL_NUMBERS = "u1 i1 i2 i4 i8 bf f2 f4 f8"
_INTEGERS = "b1 u1 i1 i2 i4 i8 unsigned"
_COMPARED = f"b1 {_REAL_NUMBERS} c2 c4 c8 bc unsigned float8 float4"


class Operator(NamedTuple):
    """An operator of Python.

    Attributes:
        node: Its node in Python's syntax tree.
        of_numbers: What Python itself computes if both operands are numbers.
        op: The op that PyTorch runs if one operand is a tensor.
        preset: The op's TensorIterator configuration, a name in `PRESETS`.
        kernels: The dtypes of the op's CPU kernel: typecodes, or `unsigned` (uint16, uint32, uint64), `float8`,
            `float4`.

    Example:
        >>> OPERATORS["/"].op, OPERATORS["/"].preset
        ('true_divide', 'binary_float')
    """

    node: type[ast.operator] | type[ast.cmpop]
    of_numbers: Callable[[Any, Any], Any]
    op: str
    preset: str
    kernels: str


#: Symbol to operator. The dtypes are those that the kernels in PyTorch's aten/src/ATen/native/cpu dispatch on.
OPERATORS: dict[str, Operator] = {
    "+": Operator(ast.Add, operator.add, "add", "binary", f"b1 {_REAL_NUMBERS} c2 c4 c8"),
    "-": Operator(ast.Sub, operator.sub, "sub", "binary", f"{_REAL_NUMBERS} c2 c4 c8"),
    "*": Operator(ast.Mult, operator.mul, "mul", "binary", f"b1 {_REAL_NUMBERS} c2 c4 c8 unsigned float8"),
    "/": Operator(ast.Div, operator.truediv, "true_divide", "binary_float", "bf f2 f4 f8 c4 c8"),
    "//": Operator(ast.FloorDiv, operator.floordiv, "floor_divide", "binary", _REAL_NUMBERS),
    "%": Operator(ast.Mod, operator.mod, "remainder", "binary", _REAL_NUMBERS),
    "**": Operator(ast.Pow, operator.pow, "pow", "binary", f"{_REAL_NUMBERS} c4 c8"),
    "&": Operator(ast.BitAnd, operator.and_, "bitwise_and", "binary", _INTEGERS),
    "|": Operator(ast.BitOr, operator.or_, "bitwise_or", "binary", _INTEGERS),
    "^": Operator(ast.BitXor, operator.xor, "bitwise_xor", "binary", _INTEGERS),
    "<": Operator(ast.Lt, operator.lt, "lt", "comparison", f"b1 {_REAL_NUMBERS}"),
    "<=": Operator(ast.LtE, operator.le, "le", "comparison", f"b1 {_REAL_NUMBERS}"),
    ">": Operator(ast.Gt, operator.gt, "gt", "comparison", f"b1 {_REAL_NUMBERS}"),
    ">=": Operator(ast.GtE, operator.ge, "ge", "comparison", f"b1 {_REAL_NUMBERS}"),
    "==": Operator(ast.Eq, operator.eq, "eq", "comparison", _COMPARED),
    "!=": Operator(
        ast.NotEq, operator.ne, "ne", "comparison", f"b1 {_REAL_NUMBERS} c2 c4 c8 bc unsigned float8 float4"
    ),
}


def _has_kernel(symbol: str, dtype: torch.dtype) -> bool:
    known = OPERATORS[symbol].kernels.split()
    if dtype in (TYPECODES.get(code) for code in known):
        return True
    if dtype_name(dtype) in ("uint16", "uint32", "uint64"):
        return "unsigned" in known
    return family(dtype) in (Family.FLOAT8, Family.FLOAT4) and family(dtype).value in known


def wrapped_value(number: Number, dtype: torch.dtype) -> Number:
    """Returns the value of a Python number in the dtype that an op computes in. An integer wraps around.

    Args:
        number: The number.
        dtype: The dtype.

    Returns:
        The number itself, unless it is an integer that does not fit an integer dtype.

    Example:
        >>> wrapped_value(1000, torch.uint8), wrapped_value(200, torch.int8), wrapped_value(1000, torch.float32)
        (232, -56, 1000)

    Source: c10/util/TypeCast.h, convert (v2.13).
    """
    if kind(dtype) is not Kind.INTEGRAL or not isinstance(number, int):
        return number
    info = torch.iinfo(dtype)
    return (int(number) - info.min) % (info.max - info.min + 1) + info.min


#: Returns why PyTorch refuses an operator on operands, or None.
_Check = Callable[[str, tuple[Operand, ...], tuple["Number | None", ...], torch.dtype], str | None]


def _bool_minus(
    symbol: str, operands: tuple[Operand, ...], numbers: tuple[Number | None, ...], dtype: torch.dtype
) -> str | None:
    """Source: aten/src/ATen/native/BinaryOps.h, sub_check (v2.13)."""
    if symbol == "-" and any(operand.dtype is torch.bool for operand in operands):
        return "subtraction with a bool is not defined; use ^, or logical_not for 1 - x."
    return None


def _negative_power(
    symbol: str, operands: tuple[Operand, ...], numbers: tuple[Number | None, ...], dtype: torch.dtype
) -> str | None:
    """Source: aten/src/ATen/native/Pow.cpp, TORCH_META_FUNC2(pow, Tensor_Scalar) (v2.13)."""
    exponent = numbers[1]
    integral = kind(operands[0].dtype) in (Kind.INTEGRAL, Kind.BOOL) and numbers[0] is None
    if symbol == "**" and integral and isinstance(exponent, int) and exponent < 0:
        return "an integer cannot be raised to a negative integer power; make the base floating."
    return None


def _large_exponent(
    symbol: str, operands: tuple[Operand, ...], numbers: tuple[Number | None, ...], dtype: torch.dtype
) -> str | None:
    exponent = numbers[1]
    if symbol != "**" or exponent is None:
        return None
    if wrapped_value(exponent, dtype) != exponent:
        return f"the exponent {exponent} does not fit {dtype_name(dtype)}, and PyTorch does not wrap exponents."
    if dtype is torch.float16 and isinstance(exponent, int | float) and abs(exponent) > torch.finfo(dtype).max:
        return f"the exponent {exponent} does not fit {dtype_name(dtype)}."
    return None


def _zero_divisor(
    symbol: str, operands: tuple[Operand, ...], numbers: tuple[Number | None, ...], dtype: torch.dtype
) -> str | None:
    """Source: aten/src/ATen/native/cpu/BinaryOpsKernel.cpp, div_floor_kernel (v2.13)."""
    divisor = numbers[1]
    if symbol not in ("//", "%") or divisor is None or kind(dtype) is not Kind.INTEGRAL:
        return None
    return f"the divisor {divisor} is 0 in {dtype_name(dtype)}." if wrapped_value(divisor, dtype) == 0 else None


def _no_kernel(
    symbol: str, operands: tuple[Operand, ...], numbers: tuple[Number | None, ...], dtype: torch.dtype
) -> str | None:
    """Source: aten/src/ATen/native/Pow.cpp, TORCH_IMPL_FUNC(pow_Tensor_Scalar_out) (v2.13)."""
    # These results are filled or copied without calling the kernel. A base of True equals 1 in Python only.
    if symbol == "**" and (numbers[1] in (0, 1) or (numbers[0] == 1 and numbers[0] is not True)):
        return None
    if not _has_kernel(symbol, dtype):
        return f"{OPERATORS[symbol].op} has no CPU kernel for {dtype_name(dtype)}."
    return None


#: In PyTorch's order: the first reason is the one that PyTorch raises.
_CHECKS: tuple[_Check, ...] = (_bool_minus, _negative_power, _large_exponent, _zero_divisor, _no_kernel)


def refuse(
    symbol: str, operands: tuple[Operand, ...], numbers: tuple[Number | None, ...], computation_dtype: torch.dtype
) -> None:
    """Raises if PyTorch refuses an operator on operands whose dtypes do promote.

    Args:
        symbol: The operator, a key of `OPERATORS`.
        operands: Its two operands.
        numbers: The values of Python numbers, None for tensors.
        computation_dtype: The dtype that the operator computes in.

    Raises:
        PromotionError: The op is not defined for the operands, or the CPU has no kernel for the dtype.

    Example:
        >>> operands = Operand(torch.bool, (3,)), Operand(torch.int8, (3,))
        >>> refuse("-", operands, (None, None), torch.int8)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.promotion.PromotionError: subtraction with a bool is not defined...

    Source: aten/src/ATen/native/BinaryOps.h, sub_check (v2.13); aten/src/ATen/native/Pow.cpp,
    TORCH_META_FUNC2(pow, Tensor_Scalar) (v2.13).
    """
    for check in _CHECKS:
        why = check(symbol, operands, numbers, computation_dtype)
        if why is not None:
            raise PromotionError(why)
