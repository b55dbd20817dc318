"""`promotion`: a promotion rule of your choice, on the dispatch key of `my_autocast`.

The rules are data (torch_promote.reference.promotion_rules), loaded when the first region is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from torch_promote._C import HeldChange
from torch_promote.errors import OptionError, RuleDefinitionError
from torch_promote.native.region_spec import RegionSpec
from torch_promote.promoting import lint as promotion_lint
from torch_promote.promoting.lint import Lint, PromotionEvent, check_handler, kinds_of
from torch_promote.regions.base import Region

if TYPE_CHECKING:
    from torch_promote.promoting.hooks import Owner
    from torch_promote.reference.promotion_rules import PromotionRule

__all__ = ["promotion"]

_CALL = "a callable"
_MODES = {"warn": promotion_lint.WARN, "raise": promotion_lint.RAISE, _CALL: promotion_lint.CALL}


class promotion(Region):  # noqa: N801 (a context manager, as my_autocast)
    """Makes ops promote their operands by a rule of your choice.

    In the region, an op on operands of several dtypes computes in the common dtype that the rule gives them, as if you
    had cast the operands by hand; gradients come back in the operands' own dtypes. You can nest regions in each other
    and in `my_autocast`, in either order: the innermost rule applies. Autocast acts first, and the rule on the result.

    A rule acts on the ops that are called in the region: elementwise ops of two and three operands, comparisons,
    `where`, `cat` and `stack`, their in-place, out= and foreach versions, and the dtype that floating-point ops compute
    in for integers. It does not act inside these ops, nor in a backward.

    Use it as a context manager or as a decorator, as `my_autocast`.

    Args:
        rule: "torch" (what PyTorch does), "jax", "numpy", "array_api", "strict", or a rule of your own.
        on_promotion: What to do where an operand is promoted silently: "warn", "raise", or a callable that gets a
            `PromotionEvent`. Each kind is reported once for each line of Python and `promotion` object; "raise" raises
            each time.
        matmul: Whether the rule applies to matrix products too, which PyTorch does not promote.
        kinds: The kinds of promotion that `on_promotion` applies to: one or several of "0-dim precision loss",
            "int overflow by wrapping scalar", "number overflows to inf", "int to low-precision float",
            "up to float64" and "any" (each a `PromotionKind`). None: all.

    Raises:
        RuleDefinitionError: The rule does not exist. It is a ValueError.
        OptionError: The kind does not exist, or on_promotion is not one of the above. It is a ValueError.

    Example:
        >>> half, brain = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)
        >>> ints = torch.ones(3, dtype=torch.int64)
        >>> with promotion("jax"):
        ...     (half + brain).dtype, (half + ints).dtype
        (torch.float32, torch.float16)
        >>> events = []
        >>> with promotion("torch", on_promotion=events.append, kinds="int to low-precision float"):
        ...     y = half + ints
        >>> events[0].op, events[0].result
        ('aten::add.Tensor', torch.float16)
    """

    __slots__ = ("_arguments", "_lint", "_owner")

    def __init__(
        self,
        rule: str | PromotionRule,
        on_promotion: str | Callable[[PromotionEvent], object] | None = None,
        *,
        matmul: bool = False,
        kinds: str | Iterable[str] | None = None,
    ) -> None:
        if kinds is not None and not isinstance(kinds, str):
            kinds = tuple(kinds) if isinstance(kinds, Iterable) else kinds
        handler = on_promotion if callable(on_promotion) else None
        if handler is not None and torch.compiler.is_dynamo_compiling():  # pragma: no cover: as below
            raise OptionError(
                "in a compiled function, on_promotion is 'warn', 'raise' or None, since its ops are looked at while "
                "it is compiled, and not afterwards. Open the region outside of the function, or do not compile it."
            )
        if handler is not None:
            check_handler(handler)
        mode = on_promotion if handler is None else _CALL
        if torch.compiler.is_dynamo_compiling():  # pragma: no cover: Dynamo traces it, and nothing calls it
            change, self._owner = _traced_change_of(rule, mode, matmul, kinds), None
        else:
            change, self._owner = _change_of(rule, mode, matmul, kinds)
            self._held = HeldChange(change)
        self._packed = RegionSpec(policy_change=change).pack()
        self._arguments = (rule, on_promotion, matmul, kinds)
        self._lint = None
        if on_promotion is not None and not torch.compiler.is_dynamo_compiling():
            self._lint = Lint(handler)
            promotion_lint.lints[id(self)] = self._lint

    def __reduce__(self) -> tuple[Any, ...]:
        rule, on_promotion, matmul, kinds = self._arguments
        return functools.partial(promotion, matmul=matmul, kinds=kinds), (rule, on_promotion)

    def __repr__(self) -> str:
        rule, on_promotion, matmul, kinds = self._arguments
        parts = [repr(rule) if isinstance(rule, str) else f"<rule {rule.name!r}>"]
        parts += [f"on_promotion={on_promotion!r}"] if on_promotion is not None else []
        parts += ["matmul=True"] if matmul else []
        parts += [f"kinds={kinds!r}"] if kinds is not None else []
        return f"promotion({', '.join(parts)})"


def _change_of(rule: Any, on_promotion: object, matmul: object, kinds: object) -> tuple[int, Owner]:
    """Returns the number of the change of policy that is asked for, and what keeps its rule registered."""
    from torch_promote.reference.promotion_rules import RULE_NAMES, promotion_rule

    if callable(rule):  # a decorator without parentheses
        raise RuleDefinitionError(
            f"promotion takes a rule, got {rule!r}. Legal: {', '.join(RULE_NAMES)}, or a rule of make_rule. As a "
            f'decorator, write it with a rule: @promotion("torch").'
        )
    if not isinstance(matmul, bool):
        raise OptionError(f"matmul is True or False, got {matmul!r} of type {type(matmul).__name__}.")
    if on_promotion is None:
        mode, bits = 0, 0
        if kinds is not None:
            raise OptionError(
                f"kinds={kinds!r} says which promotions on_promotion is for, and there is no on_promotion. Give "
                f"on_promotion='warn', 'raise' or a callable."
            )
    elif isinstance(on_promotion, str) and on_promotion in _MODES:
        mode, bits = _MODES[on_promotion], kinds_of("any" if kinds is None else kinds)
    else:
        raise OptionError(
            f"on_promotion is 'warn', 'raise', None or a callable that takes one PromotionEvent, got {on_promotion!r}."
        )
    from torch_promote.promoting.hooks import promotion_change

    return promotion_change(_rule_of(rule, promotion_rule), matmul, bits, mode)


def _traced_change_of(rule: Any, on_promotion: object, matmul: object, kinds: object) -> int:
    return _change_of(rule, on_promotion, matmul, kinds)[0]


# Dynamo calls it while it traces, and keeps the number.
_traced_change_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rule_of(rule: Any, promotion_rule: Callable[[Any], PromotionRule]) -> PromotionRule:
    return promotion_rule(rule)
