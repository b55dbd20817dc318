"""Formats numbers, policies, ops and modules for the reports of `compare` and `tune`."""

from __future__ import annotations

import math

from torch_promote.policy.policy import Policy

__all__ = ["shorten", "spell_number", "spell_op", "spell_policy_name", "spell_tolerance"]

_NONE = "-"


def spell_number(value: float | None) -> str:
    """Spells an error with two digits.

    Example:
        >>> [spell_number(one) for one in (0.0, 1.2e-5, 0.0123, 4.0, 1234.5, 3e7, float("inf"), None)]
        ['0', '1.2e-5', '0.012', '4', '1234', '3e+7', 'inf', '-']
    """
    if value is None:
        return _NONE
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{'-' if power[0] == '-' else '+'}{power[1:].lstrip('0')}"


def spell_tolerance(value: float) -> str:
    """Spells a tolerance in the usual notation: "1e-3", "0.05".

    Example:
        >>> spell_tolerance(1e-3), spell_tolerance(0.05), spell_tolerance(1.25e-6)
        ('1e-3', '0.05', '1.25e-6')
    """
    text = f"{value:g}"
    if abs(value) < 0.005 and value:
        text = f"{value:.3e}".replace("e-0", "e-")
        digits, _, power = text.partition("e")
        text = f"{digits.rstrip('0').rstrip('.')}e{power}"
    return text


def spell_op(name: str) -> str:
    """Returns the name of an op or a site without PyTorch's namespace.

    Example:
        >>> spell_op("aten::softmax.int"), spell_op("lib::gelu"), spell_op("blocks.0: aten::exp")
        ('softmax.int', 'lib::gelu', 'blocks.0: exp')
    """
    return name.replace("aten::", "")


def spell_policy_name(policy: Policy) -> str:
    """Returns a policy in a few words.

    Example:
        >>> stock = Policy.stock()
        >>> [spell_policy_name(one) for one in (Policy.named("off"), stock, stock.override({"mm.default": "fp32"}))]
        ['fp32', 'stock', 'stock with 1 change']
    """
    tables = ""
    if policy.modules:
        tables = f" and {len(policy.modules)} table{'s' if len(policy.modules) != 1 else ''} for modules"
    for name in Policy.names():
        if Policy.named(name).changes == policy.changes:
            return ("fp32" if name == "off" else name) + tables
    overloads = len({overload for overload, _, _ in policy.changes})
    return f"stock with {overloads} change{'s' if overloads != 1 else ''}{tables}"


def shorten(name: str, width: int) -> str:
    """Cuts a name to a width. A path loses whole parts at its beginning if that is sufficient.

    Example:
        >>> shorten("model.layers.11.self_attn.q_proj", 20), shorten("a" * 30, 10)
        ('...self_attn.q_proj', 'aaaaaaa...')
    """
    if len(name) <= width:
        return name
    parts = name.split(".")
    while len(parts) > 1:
        parts = parts[1:]
        if len(kept := "..." + ".".join(parts)) <= width:
            return kept
    return f"{name[: width - 3]}..."
