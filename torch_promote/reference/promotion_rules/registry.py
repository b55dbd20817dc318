"""`promotion_rule`: the promotion rules by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_promote.errors import RuleDefinitionError, did_you_mean
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.reference.promotion_rules.array_api_rule import array_api_rule
from torch_promote.reference.promotion_rules.jax_rule import jax_rule
from torch_promote.reference.promotion_rules.numpy_rule import numpy_rule
from torch_promote.reference.promotion_rules.rule import PromotionRule
from torch_promote.reference.promotion_rules.strict_rule import strict_rule
from torch_promote.reference.promotion_rules.torch_rule import torch_rule

__all__ = ["RULE_NAMES", "promotion_rule"]

_RULES: dict[str, Callable[[torch.dtype], PromotionRule]] = {
    "torch": torch_rule,
    "jax": jax_rule,
    "numpy": numpy_rule,
    "array_api": array_api_rule,
    "strict": strict_rule,
}

#: The names of the rules, in the order of the documentation.
RULE_NAMES: tuple[str, ...] = tuple(_RULES)


def promotion_rule(rule: str | PromotionRule, default_dtype: torch.dtype | str | None = None) -> PromotionRule:
    """Returns the rule with a name.

    Args:
        rule: One of `RULE_NAMES`, or a rule.
        default_dtype: The default dtype for the rule, or its name. None: the current one.

    Raises:
        RuleDefinitionError: There is no rule with this name.

    Example:
        >>> promotion_rule("torch").name
        'torch'
        >>> promotion_rule("troch")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.errors.RuleDefinitionError: no promotion rule is called 'troch'. Legal: torch, ... Closest: torch.
    """
    default = torch.get_default_dtype() if default_dtype is None else parse_dtype(default_dtype, "default_dtype")
    if isinstance(rule, PromotionRule):
        return rule.under(default)
    if not isinstance(rule, str) or rule not in _RULES:
        close = did_you_mean(rule, _RULES) if isinstance(rule, str) else ""
        raise RuleDefinitionError(f"no promotion rule is called {rule!r}. Legal: {', '.join(_RULES)}.{close}")
    return _RULES[rule](default)
