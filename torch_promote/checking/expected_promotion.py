"""What the promotion rule in force does with a call, for the reference.

Under PyTorch's own rule nothing changes. Under another rule, this module replaces each operand that takes part by a
description in the common dtype, which the rule computes (`PromotionRule.common`). The reference then infers the results
from the descriptions.

NOTE [ Operands found by trial ]
Which arguments take part must not come from `torch_promote.regions.promotion_tables`: the extension registers its
kernels from that list, so neither side would promote an op that is missing there, and the check would pass.
`operands_of` asks the reference instead, without reading how the rule is written: it infers the call with all operands
in bool, makes one of them complex, and infers again. If the dtype that the op computes in changes, that operand takes
part. A matrix product refuses instead, and all its tensors take part. An op that computes bools in floating point
divides, as `true_divide` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote import _C
from torch_promote.observe.ops import argument_names, find_overload, overload_name
from torch_promote.reference.ops.call import Call, TensorLike, described
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.ops.infer import Inference, functional_of, infer, rule_table
from torch_promote.reference.promotion import Operand, PromotionError
from torch_promote.reference.strides import temporary_strides

__all__ = ["JoinedOperands", "foreign_rule", "operands_of", "promoted_values"]

#: Ops whose reference rule joins dtypes, and that a promotion rule leaves alone: see docs/promotion_regions.md, "Which
#: ops". The backward formulas (`*_backward`) and the factories, such as linspace, are left alone too.
_LEFT_ALONE = frozenset(
    {
        "aten::ldexp.Tensor",  # a mantissa and an exponent: not operands of one dtype
        "aten::logsumexp",
        "aten::mvlgamma",
        "aten::special_multigammaln",
    }
)
#: The files of op rules in which an op that refuses two dtypes is a matrix product.
_PRODUCTS = ("matrices", "foreach")
#: Takes vectors of one dtype, and is not a matrix product.
_NOT_A_PRODUCT = "aten::linalg_cross"

#: An argument's name, and the position in it if it is a list.
_Path = tuple[str, int | None]


def foreign_rule() -> str | None:
    """Returns the name of the promotion rule in force here; None if there is none, or if it is PyTorch's own."""
    number = _C.promotion_in_force()
    if number is None:
        return None
    from torch_promote.regions.promotion_tables import rule_of

    rule = rule_of(number)
    return None if rule.name == "torch" else rule.name


def promoted_values(runs: torch._ops.OpOverload, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a call's arguments by name, with descriptions of the operands that the rule in force casts.

    Args:
        runs: The overload that runs.
        values: Its arguments by name, after autocast's casts.

    Raises:
        PromotionRuleError: The operands have no common dtype.
    """
    number = _C.promotion_in_force()
    if number is None or foreign_rule() is None:
        return values
    from torch_promote.regions.promotion_tables import matmul_of, rule_of

    found = operands_of(runs, values)
    if found is None or (found.is_product and not matmul_of(number)):
        return values
    rule = rule_of(number)
    name = overload_name(runs)
    written = {argument.name for argument in runs._schema.arguments if argument.alias_info is not None}
    result = dict(values)
    for paths in found.joins(values):
        operands = [_operand(values, path) for path in paths]
        if not any(isinstance(operand, Operand) and not operand.wrapped for operand in operands):
            continue
        dtype = rule.common(operands, name, found.divides)
        for (argument, element), operand in zip(paths, operands, strict=True):
            if isinstance(operand, Operand) and not operand.wrapped and argument not in written:
                result[argument] = _replaced(result[argument], element, _cast(operand, dtype))
    return result


def dtype_if_product(runs: torch._ops.OpOverload, dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Returns the dtype in which the rule in force runs an op without a reference rule, if the op is a matrix product.

    The reference has rules for the products with a kernel, such as `mm`, and none for composites, such as `matmul`.

    Args:
        runs: The overload that runs.
        dtypes: The dtypes of its tensors, after autocast's casts.

    Returns:
        The common dtype; None if no rule acts on products here, or if the reference has a rule for the op.
    """
    number = _C.promotion_in_force()
    if number is None or foreign_rule() is None or (functional_of(runs) or overload_name(runs)) in rule_table():
        return None
    from torch_promote.regions.promotion_tables import matmul_of, rule_of

    given = list(dtypes)
    return rule_of(number).common(given) if given and matmul_of(number) else None


@dataclass(frozen=True, slots=True)
class JoinedOperands:
    """The operands of one call that a promotion rule joins.

    Attributes:
        names: The arguments that take part.
        divides: Whether the op computes in floating point, whatever the operands are.
        in_step: Whether lists go in step, one call for each position, as in `_foreach_add`. Otherwise all elements
            are joined, as in `cat`.
        is_product: Whether the op is a matrix product, on which rules act with `matmul=True` alone.
    """

    names: tuple[str, ...]
    divides: bool = False
    in_step: bool = False
    is_product: bool = False

    def joins(self, values: Mapping[str, Any]) -> Iterator[list[_Path]]:
        """Yields the operands that are joined: once, or once for each position of lists that go in step."""
        paths = [path for name in self.names for path in _paths(name, values[name])]
        if not self.in_step:
            yield paths
            return
        count = max(element for _, element in paths if element is not None) + 1
        for index in range(count):
            yield [(name, element) for name, element in paths if element in (None, index)]


def operands_of(runs: torch._ops.OpOverload, values: Mapping[str, Any]) -> JoinedOperands | None:
    """Returns the operands of a call that a promotion rule joins; None if rules do not act on it.

    See NOTE [ Operands found by trial ].

    Args:
        runs: The overload that runs.
        values: Its arguments by name.

    Example:
        >>> x = torch.ones(2)
        >>> operands_of(torch.ops.aten.where.self, {"condition": x > 0, "self": x, "other": x}).names
        ('self', 'other')
    """
    op = find_overload(functional_of(runs) or overload_name(runs))
    name = overload_name(op)
    entry = rule_table().get(name)
    is_backward = name.partition(".")[0].endswith("_backward")
    if entry is None or name in _LEFT_ALONE or entry.family == "factories" or is_backward:
        return None
    call = Call.of(op, (), {name: values[name] for name in argument_names(op) if name in values}, torch.float32)
    candidates = [a.name for a in call.signature.arguments if "Tensor" in a.type or "number" in a.type]
    trial = {**call, **{name: _in_bool(call[name]) for name in candidates}}
    joined, refused = [], []
    try:
        base = _computes_in(op, trial)
    except PromotionError:
        return None
    for path in (path for name in candidates for path in _paths(name, trial[name])):
        try:
            if _computes_in(op, _with_complex(trial, path)) is not base:
                joined.append(path)
        except PromotionError:
            refused.append(path)
    if not joined and len(refused) > 1 and entry.family in _PRODUCTS and name != _NOT_A_PRODUCT:
        tensors = [argument.name for argument in call.signature.arguments if argument.is_tensor or argument.is_list]
        return JoinedOperands(tuple(tensors), in_step=entry.family == "foreach", is_product=True)
    names = tuple(dict.fromkeys(name for name, _ in joined))
    has_lists = any(element is not None for _, element in joined)
    in_step = has_lists and not any(element == 1 for _, element in joined)
    divides = base is not None and base.is_floating_point
    if len(names) > 1 or (names and (divides or (has_lists and not in_step))):
        return JoinedOperands(names, divides, in_step)
    return None  # one operand, which keeps its dtype


def _computes_in(op: torch._ops.OpOverload, values: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the dtype that an op computes in, by the reference.

    Raises:
        PromotionError: The op refuses the operands.
    """
    term = rule_table()[overload_name(op)].terms[0]
    if term.rule in ELEMENTWISE_RULES:
        call = Call.of(op, (), values, torch.get_default_dtype())
        return ELEMENTWISE_RULES[term.rule](call, *term.names).computation_dtype
    inferred = infer(op, (), values)
    assert isinstance(inferred, Inference)
    return inferred.dtypes[0] if inferred.dtypes else None


def _in_bool(value: Any) -> Any:
    """An argument with its operands in bool. Of a list, the first two tell how its elements take part."""
    if isinstance(value, TensorLike):
        return described(value)._replace(dtype=torch.bool)
    if isinstance(value, list | tuple):
        return [_in_bool(element) for element in value[:2]]
    return True if _is_number(value) else value


def _with_complex(trial: Mapping[str, Any], path: _Path) -> dict[str, Any]:
    """The trial's arguments with one operand made complex."""
    name, element = path
    operand = trial[name] if element is None else trial[name][element]
    made = operand._replace(dtype=torch.complex128) if isinstance(operand, Operand) else 1j
    return {**trial, name: _replaced(trial[name], element, made)}


def _paths(name: str, value: Any) -> Iterator[_Path]:
    """Yields the places of the operands in an argument."""
    if isinstance(value, list | tuple) and not isinstance(value, Operand):
        yield from ((name, index) for index, element in enumerate(value) if _is_operand(element))
    elif _is_operand(value):
        yield name, None


def _is_operand(value: Any) -> bool:
    return isinstance(value, TensorLike) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def _operand(values: Mapping[str, Any], path: _Path) -> Any:
    name, element = path
    found = values[name] if element is None else values[name][element]
    return described(found) if isinstance(found, TensorLike) else found


def _cast(operand: Operand, dtype: torch.dtype) -> Operand:
    if operand.dtype is dtype:
        return operand
    strides = None if operand.strides is None else temporary_strides(operand.shape, operand.strides)
    return operand._replace(dtype=dtype, strides=strides)


def _replaced(value: Any, element: int | None, operand: Any) -> Any:
    if element is None:
        return operand
    return [operand if index == element else one for index, one in enumerate(value)]
