"""What a promotion rule does with a call, for the reference: the operands as the op gets them.

Under PyTorch's own rule nothing changes. Under another one, the operands that take part are described in the common
dtype that the rule itself gives (`PromotionRule.common`), so a result is held against the rule, and not against what
the extension has made of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_promote import _C
from torch_promote.reference.elementwise.strides import temporary_strides
from torch_promote.reference.ops.call import TensorLike, described
from torch_promote.reference.promotion.states import Operand

__all__ = ["foreign_rule", "promoted_values"]


def foreign_rule() -> str | None:
    """Returns the name of the promotion rule that acts here, None if none does or if it is PyTorch's own."""
    number = _C.promotion_in_force()
    if number is None:
        return None
    from torch_promote.promoting.hooks import rule_of

    rule = rule_of(number)
    return None if rule.name == "torch" else rule.name


def promoted_values(runs: torch._ops.OpOverload, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a call's arguments by name, with the operands that the rule in force casts as they are then.

    Args:
        runs: The overload that runs.
        values: Its arguments by name, after autocast's casts.

    Raises:
        PromotionRuleError: The operands have no common dtype.
    """
    number = _C.promotion_in_force()
    if number is None or foreign_rule() is None:
        return values
    from torch_promote.promoting.hooks import matmul_of, rule_of
    from torch_promote.promoting.ops import FLOATS, OPAQUE

    schema = runs._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    written = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    op = _ops().get(name)
    if op is None or op.computes == OPAQUE or (op.matmul and not matmul_of(number)):
        return values
    rule = rule_of(number)
    names = [list(values)[place] for place in op.participants]
    floats = op.computes == FLOATS and values.get("rounding_mode") is None
    result = dict(values)
    for step in _steps(op.each, [values[argument] for argument in names]):
        operands = [_operand(values[names[place]], element) for place, element in step]
        if not any(isinstance(operand, Operand) and not operand.wrapped for operand in operands):
            continue
        dtype = rule.common(operands, name, floats)
        for (place, element), operand in zip(step, operands, strict=True):
            if isinstance(operand, Operand) and not operand.wrapped and operand.dtype is not dtype:
                argument = names[place]
                if argument not in written:
                    result[argument] = _replaced(result[argument], element, _cast(operand, dtype))
    return result


def _steps(each: bool, values: Sequence[Any]) -> Iterator[list[tuple[int, int | None]]]:
    """The places of the operands of each call: one call, but of an op whose lists go in step."""
    if each:
        count = next(len(value) for value in values if isinstance(value, list | tuple))
        for index in range(count):
            yield [(place, index if isinstance(value, list | tuple) else None) for place, value in enumerate(values)]
        return
    places: list[tuple[int, int | None]] = []
    for place, value in enumerate(values):
        if isinstance(value, list | tuple):
            places += [(place, index) for index in range(len(value))]
        elif value is not None:
            places.append((place, None))
    yield places


def _operand(value: Any, element: int | None) -> Any:
    found = value if element is None else value[element]
    return described(found) if isinstance(found, TensorLike) else found


def _cast(operand: Operand, dtype: torch.dtype) -> Operand:
    strides = None if operand.strides is None else temporary_strides(operand.shape, operand.strides)
    return operand._replace(dtype=dtype, strides=strides)


def _replaced(value: Any, element: int | None, operand: Operand) -> Any:
    if element is None:
        return operand
    return [operand if index == element else one for index, one in enumerate(value)]


@functools.cache
def _ops() -> dict[str, Any]:
    from torch_promote.promoting.ops import promoting_ops

    return {op.name: op for op in promoting_ops()}
