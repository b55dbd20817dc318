"""`result_type`: the dtype that any number of operands promote to.

Each operand has a state: tensor with dimensions, 0-dim tensor or Python number. The table promotes the dtypes within
each state. A weaker state affects the result only if its dtype is of a higher kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from torch_promote.policy.dtype_names import operand_of_name
from torch_promote.reference.dtypes import default_complex, dtype_name, is_complex, is_floating, to_complex
from torch_promote.reference.promotion.table import PromotionError, no_common_dtype, promote_skip_undefined

__all__ = [
    "Number",
    "Operand",
    "ResultTypeState",
    "combine_categories",
    "number_dtype",
    "result_type",
    "state_of",
]

Number = bool | int | float | complex
"""A Python number as an operand. Its dtype is weak: a "wrapped number"."""

_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)


class Operand(NamedTuple):
    """A description of an operand, without a tensor: the properties that promotion and TensorIterator use.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes; `()` is 0-dim.
        strides: Its strides in elements; None means contiguous.
        device: Its device type. None: the device type of the inference.
        wrapped: Whether it is a Python number wrapped in a tensor.

    Example:
        >>> result_type(Operand(torch.int32, (3,)), Operand(torch.int64))
        torch.int32

    Source: aten/src/ATen/TensorIterator.h, OperandInfo (v2.13).
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    device: str | None = None
    wrapped: bool = False


def combine_categories(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Joins the dtype of a state with the dtype of the next weaker one.

    The weaker dtype only matters if it is of a higher kind: a 0-dim int64 does not widen an int32 with dimensions, but
    a 0-dim float makes it floating, and a 0-dim complex makes it complex.

    Args:
        higher: The dtype of the stronger state. None: no operand has this state.
        lower: The dtype of the weaker state, or None.

    Returns:
        The joined dtype. None if both are undefined, or if only one of them is a bits dtype.

    Raises:
        PromotionError: One dtype is complex, and the other is a floating dtype without a complex counterpart (float8,
            float4); or `promote_types` raises.

    Example:
        >>> combine_categories(torch.int8, torch.int64), combine_categories(torch.int8, torch.float64)
        (torch.int8, torch.float64)
        >>> combine_categories(torch.float16, torch.complex128)
        torch.complex32

    Source: aten/src/ATen/native/TypeProperties.cpp, combine_categories (v2.13).
    """
    if higher is not None and is_complex(higher):
        return higher
    if lower is not None and is_complex(lower):
        if higher is None or not is_floating(higher):
            return lower
        # The floating operand's precision stays: float16 with a complex number gives complex32.
        both = to_complex(higher)
        if both is None:
            raise no_common_dtype(
                higher, lower, f"{dtype_name(higher)} would have to become complex, and no complex dtype has such parts"
            )
        return both
    if higher is not None and is_floating(higher):
        return higher
    if higher is torch.bool or (lower is not None and is_floating(lower)):
        return promote_skip_undefined(higher, lower)
    return lower if higher is None else higher


class ResultTypeState(NamedTuple):
    """The promoted dtype of the operands so far, by state. None: no operand yet (Undefined in PyTorch).

    Attributes:
        dim: The tensors with dimensions.
        zero: The 0-dim tensors.
        wrapped: The Python numbers.

    Example:
        >>> ResultTypeState(dim=torch.int32, wrapped=torch.float32).result()
        torch.float32

    Source: aten/src/ATen/native/TypeProperties.h, ResultTypeState (v2.13).
    """

    dim: torch.dtype | None = None
    zero: torch.dtype | None = None
    wrapped: torch.dtype | None = None

    def update(self, dtype: torch.dtype, ndim: int, wrapped: bool = False) -> ResultTypeState:
        """Returns the state with one more operand.

        Args:
            dtype: Its dtype. For a Python number, that of `number_dtype`.
            ndim: Its number of dimensions.
            wrapped: Whether it is a Python number.

        Raises:
            PromotionError: It has no common dtype with the operands of its state.

        Example:
            >>> ResultTypeState().update(torch.int8, 1).update(torch.int64, 0)
            ResultTypeState(dim=torch.int8, zero=torch.int64, wrapped=None)

        Source: aten/src/ATen/native/TypeProperties.cpp, update_result_type_state (v2.13).
        """
        if ndim > 0:
            return ResultTypeState(promote_skip_undefined(self.dim, dtype), self.zero, self.wrapped)
        if wrapped:
            return ResultTypeState(self.dim, self.zero, promote_skip_undefined(self.wrapped, dtype))
        return ResultTypeState(self.dim, promote_skip_undefined(self.zero, dtype), self.wrapped)

    def result(self) -> torch.dtype:
        """Returns the common dtype of all operands.

        Raises:
            PromotionError: There are no operands, a bits dtype is among others, or two states do not join.

        Example:
            >>> ResultTypeState(dim=torch.int8, zero=torch.int64).result()
            torch.int8

        Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
        """
        found = combine_categories(self.dim, combine_categories(self.zero, self.wrapped))
        if found is None:
            raise PromotionError(
                "the operands have no common dtype: there are no operands, or bits dtypes are combined with others. "
                "Bits dtypes promote only with themselves. Convert the operands first."
            )
        return found


def number_dtype(number: Number, default_dtype: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype that promotion uses for a Python number.

    Args:
        number: The number.
        default_dtype: The default dtype. None: the current one.

    Returns:
        bool, int64 (uint64 if the number only fits that), the default dtype, or its complex dtype.

    Raises:
        PromotionError: The int fits neither int64 nor uint64, or the value is not a number.

    Example:
        >>> number_dtype(5.5, default_dtype=torch.float64), number_dtype(2**63)
        (torch.float64, torch.uint64)

    Source: aten/src/ATen/ScalarOps.h, scalar_to_tensor (v2.13); aten/src/ATen/native/TypeProperties.cpp,
    update_result_type_state (v2.13).
    """
    if isinstance(number, bool | torch.SymBool):
        return torch.bool
    if isinstance(number, int | torch.SymInt):
        if isinstance(number, torch.SymInt) or number in _INT64:
            return torch.int64
        if number in _UINT64:
            return torch.uint64
        raise PromotionError(f"the int {number} fits neither int64 nor uint64, so no tensor can hold it.")
    if isinstance(number, float | torch.SymFloat):
        return default_dtype or torch.get_default_dtype()
    if isinstance(number, complex):
        return default_complex(default_dtype or torch.get_default_dtype())
    raise PromotionError(f"an operand is a tensor, a Python number, a torch.dtype or an Operand, got {number!r}.")


def state_of(
    operands: Iterable[torch.Tensor | Number | torch.dtype | str | Operand], default_dtype: torch.dtype | None = None
) -> ResultTypeState:
    """Returns the state after all operands. Arguments and errors are those of `result_type`.

    Example:
        >>> state_of([torch.ones(3, dtype=torch.int8), 2.5], default_dtype=torch.float32)
        ResultTypeState(dim=torch.int8, zero=None, wrapped=torch.float32)

    Source: aten/src/ATen/native/TypeProperties.cpp, update_result_type_state (v2.13).
    """
    state = ResultTypeState()
    for operand in operands:
        operand = operand_of_name(operand)
        if isinstance(operand, torch.Tensor):
            state = state.update(operand.dtype, operand.ndim)
        elif isinstance(operand, torch.dtype):
            state = state.update(operand, 1)
        elif isinstance(operand, Operand):
            dtype = operand.dtype
            if operand.wrapped:
                dtype = _wrapped_dtype(dtype, default_dtype)
            state = state.update(dtype, len(operand.shape), operand.wrapped)
        else:
            state = state.update(number_dtype(operand, default_dtype), 0, wrapped=True)
    return state


def _wrapped_dtype(dtype: torch.dtype, default_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that promotion uses for a wrapped number, whose tensor may have another dtype.

    Source: aten/src/ATen/native/TypeProperties.cpp, update_result_type_state (v2.13).
    """
    if is_complex(dtype):
        return number_dtype(1j, default_dtype)
    return number_dtype(1.0, default_dtype) if is_floating(dtype) else dtype


def result_type(
    *operands: torch.Tensor | Number | torch.dtype | str | Operand, default_dtype: torch.dtype | None = None
) -> torch.dtype:
    """Returns the dtype that operands promote to. Unlike `torch.result_type`, it takes any number of operands.

    Args:
        operands: Tensors, Python numbers, dtypes or their names (each stands for a tensor with dimensions), Operands.
        default_dtype: The dtype of Python floats. None: the current default dtype.

    Returns:
        The common dtype.

    Raises:
        PromotionError: Two operands have no common dtype, or there are no operands.

    Example:
        >>> result_type(torch.ones(3, dtype=torch.int32), 5.5, default_dtype=torch.float32)
        torch.float32
        >>> result_type(torch.ones(3, dtype=torch.int8), torch.tensor(1), 3), result_type("int8", "float16")
        (torch.int8, torch.float16)

    Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    """
    return state_of(operands, default_dtype).result()
