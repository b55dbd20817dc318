"""The steps that promote operands by PyTorch's own rule, which gives each operand a state.

They mirror torch_promote.reference.promotion, whose functions compute the dtypes in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from torch_promote.reference.dtypes import Kind, dtype_name, is_complex, is_floating, kind, typecode
from torch_promote.reference.promotion import (
    Number,
    Operand,
    PromotionError,
    combine_categories,
    number_dtype,
    promote_types,
)

__all__ = ["describe", "promotion_steps"]

_KIND_WORDS = {
    Kind.BOOL: "bool",
    Kind.INTEGRAL: "integral",
    Kind.FLOATING: "floating",
    Kind.COMPLEX: "complex",
    Kind.OPAQUE: "opaque",
}


def describe(name: str, side: Operand, number: Number | None, default_dtype: torch.dtype) -> str:
    """Returns the step that says which state an operand has.

    Args:
        name: The operand as the expression spells it.
        side: The operand.
        number: Its value, for a Python number.
        default_dtype: The default dtype.

    Example:
        >>> describe("x", Operand(torch.int8, (2,)), None, torch.float32)
        'x is a tensor with dimensions: state dim, int8.'

    Source: aten/src/ATen/native/TypeProperties.cpp, update_result_type_state (v2.13).
    """
    if number is None:
        if side.shape:
            return f"{name} is a tensor with dimensions: state dim, {dtype_name(side.dtype)}."
        return f"{name} is a 0-dim tensor: state zero, {dtype_name(side.dtype)}."
    counts_as = dtype_name(number_dtype(number, default_dtype))
    if isinstance(number, float):
        counts_as = f"the default dtype, {counts_as}"
    elif isinstance(number, complex):
        counts_as = f"the complex dtype of the default dtype, {counts_as}"
    return f"{number} is a Python {type(number).__name__}: state wrapped. It counts as {counts_as}."


def promotion_steps(sides: Sequence[Operand], default_dtype: torch.dtype) -> tuple[torch.dtype, list[str]]:
    """Returns the common dtype of operands, and the steps that lead to it: within each state, then across states.

    Args:
        sides: Two or more operands.
        default_dtype: The default dtype.

    Raises:
        PromotionError: The operands have no common dtype.

    Example:
        >>> sides = Operand(torch.int8, (2,)), Operand(torch.int64), Operand(torch.uint8, (3,))
        >>> common, steps = promotion_steps(sides, torch.float32)
        >>> common, len(steps)
        (torch.int16, 2)

    Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    """
    by_state: dict[str, list[torch.dtype]] = {"dim": [], "zero": [], "wrapped": []}
    for side in sides:
        by_state[_state(side)].append(_dtype_of(side, default_dtype))
    steps, joined = [], {}
    for state, dtypes in by_state.items():
        if not dtypes:
            continue
        common = dtypes[0]
        all_ = "Both" if len(sides) == 2 else "All"
        if len(dtypes) == len(sides) and all(dtype is common for dtype in dtypes):
            steps.append(f"{all_} are {dtype_name(common)} in state {state}: nothing is promoted.")
        for number, dtype in enumerate(dtypes[1:], start=1):
            if dtype is common:
                continue
            promoted = promote_types(common, dtype)
            looked_up = _looked_up(common, dtype, promoted)
            if len(dtypes) == len(sides) and number == 1:
                what = "two" if all_ == "Both" else "dtypes"
                steps.append(f"{all_} are in state {state}, so the {what} are promoted. {looked_up}")
            else:
                steps.append(
                    f"In state {state}, {dtype_name(common)} and {dtype_name(dtype)} are promoted. {looked_up}"
                )
            common = promoted
        joined[state] = common
    # The weakest states are joined first.
    states = list(joined)
    lower = joined[states[-1]]
    for stronger, weaker in reversed(list(itertools.pairwise(states))):
        words, both = _combine(joined[stronger], lower)
        steps.append(f"{stronger} {dtype_name(joined[stronger])} with {weaker} {dtype_name(lower)}: {words}")
        lower = both
    return lower, steps


def _dtype_of(side: Operand, default_dtype: torch.dtype) -> torch.dtype:
    if not side.wrapped:
        return side.dtype
    if is_complex(side.dtype):
        return number_dtype(1j, default_dtype)
    return default_dtype if is_floating(side.dtype) else side.dtype


def _state(side: Operand) -> str:
    return "dim" if side.shape else "wrapped" if side.wrapped else "zero"


def _looked_up(a: torch.dtype, b: torch.dtype, common: torch.dtype) -> str:
    row, column = typecode(a), typecode(b)
    if row is None or column is None:
        return f"They give {dtype_name(common)}: an unsigned integer takes the floating dtype."
    return f"The table has {dtype_name(common)} for them (row {row}, column {column})."


def _combine(higher: torch.dtype, lower: torch.dtype) -> tuple[str, torch.dtype]:
    """The text for a call of `combine_categories`, and its result. Both functions have the same branches."""
    joined = combine_categories(higher, lower)
    if joined is None:
        raise PromotionError(
            f"{dtype_name(higher)} and {dtype_name(lower)} have no common dtype: bits promote only with themselves."
        )
    strong, weak = dtype_name(higher), dtype_name(lower)
    kinds = f"{weak} is {_KIND_WORDS[kind(lower)]}, a higher kind than {_KIND_WORDS[kind(higher)]}"
    if not is_complex(higher) and is_complex(lower):
        if is_floating(higher):
            return f"{kinds}, but {strong} decides the precision: {dtype_name(joined)}.", joined
        return f"{kinds}, so it decides.", joined
    if not is_complex(higher) and not is_floating(higher) and (higher is torch.bool or is_floating(lower)):
        if higher is lower:
            return "they are the same.", joined
        return f"{kinds}, so the two are promoted. {_looked_up(higher, lower, joined)}", joined
    if higher is lower:
        return "they are the same.", joined
    return f"{weak} is not of a higher kind than {strong}, so {strong} stays: a weaker state does not widen.", joined
