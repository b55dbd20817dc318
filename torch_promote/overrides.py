"""What a user may write for ops and for policies: names, packets, overloads and patterns, and the policies they get."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from torch_promote._op_patterns import is_pattern
from torch_promote.errors import PolicyError, did_you_mean
from torch_promote.policies import (
    CastPolicy,
    check_legal,
    legal_policies,
    legal_text,
    rows_by_name,
    spell_policy,
    why_illegal,
)

__all__ = [
    "exact_key",
    "find_op",
    "find_overloads",
    "in_order",
    "name_op",
    "parse_overrides",
    "parse_policy",
    "select",
    "spell_key",
]

_NAMES = [*(policy.value for policy in CastPolicy), "fp16"]
_LEGAL_VALUES = f"{', '.join(_NAMES)} or a floating dtype"
#: How many overloads an error names for each reason.
_SHOWN = 3


def parse_overrides(overrides: Mapping[Any, Any]) -> tuple[tuple[str, CastPolicy | torch.dtype], ...]:
    """Checks overrides and returns the policy of each overload that they name.

    Args:
        overrides: Maps ops, named as in `find_overloads`, to policies: the name of a cast policy, a `CastPolicy`, a
            floating `torch.dtype` or its name. A name or a pattern that means several overloads gives the policy to
            those for which it is legal.

    Returns:
        Pairs of an overload's full name and its policy, in the order of `in_order`.

    Raises:
        PolicyError: An op or a policy does not exist, a policy is not legal for an op, or two keys give one overload
            different policies.

    Example:
        >>> [(name, policy.value) for name, policy in parse_overrides({"mm.out": "match_self", "mm.default": "fp16"})]
        [('aten::mm', 'lower_precision_fp'), ('aten::mm.out', 'match_self')]
    """
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"overrides is a mapping of ops to policies, got {type(overrides).__name__}.")
    chosen: dict[str, tuple[CastPolicy | torch.dtype, object]] = {}
    for key, value in overrides.items():
        policy, names = select(key, value)
        for name in names:
            known = chosen.setdefault(name, (policy, key))
            if known[0] != policy:
                raise PolicyError(
                    f"{name} gets two policies, {spell_policy(known[0])!r} from {known[1]!r} and "
                    f"{spell_policy(policy)!r} from {key!r}. Name each overload once."
                )
    return tuple((name, chosen[name][0]) for name in in_order(chosen))


def select(key: object, value: object) -> tuple[CastPolicy | torch.dtype, tuple[str, ...]]:
    """Returns a policy as it was written, and the overloads named by a key to which it can be given.

    Args:
        key: An op, named as in `find_overloads`.
        value: A policy, written as in `parse_overrides`.

    Returns:
        The policy, and one full name or more.

    Raises:
        PolicyError: The op or the policy does not exist, or the policy is legal for none of the overloads.

    Example:
        >>> policy, overloads = select("softmax", "fp32")
        >>> policy, "aten::softmax.int" in overloads, "aten::softmax.int_out" in overloads
        (<CastPolicy.fp32: 'fp32'>, True, False)
    """
    names = find_overloads(key)
    policy = parse_policy(value, names[0] if len(names) == 1 else repr(spell_key(key)))
    if len(names) == 1:
        check_legal(names[0], policy)
        return policy, names
    reasons = {name: why_illegal(name, policy) for name in names}
    legal = tuple(name for name, why in reasons.items() if why is None)
    if not legal:
        raise PolicyError(_illegal_for_all(spell_key(key), policy, reasons))
    return policy, legal


def _illegal_for_all(key: str, policy: CastPolicy | torch.dtype, reasons: Mapping[str, str | None]) -> str:
    by_reason: dict[str | None, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    text = "; ".join(f"{why} ({_some(names)})" for why, names in by_reason.items())
    legal = {policy for name in reasons for policy in legal_policies(name)}
    for_some = legal_text(policy for policy in CastPolicy if policy in legal).replace(" Legal:", " Legal for some:")
    return f"none of the {len(reasons)} overloads of {key!r} can use {spell_policy(policy)!r}: {text}.{for_some}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def find_overloads(key: object) -> tuple[str, ...]:
    """Returns the overloads that an op's name, overload, packet or a pattern means.

    Args:
        key: "softmax", "aten::softmax", "mylib::op" or `torch.ops.aten.softmax` (every overload of the op);
            "softmax.int", "aten::softmax.int" or `torch.ops.aten.softmax.int` (that overload); "mm.default" (the
            overload without a name); what `torch.library.custom_op` returns; or a shell pattern ("linalg_*",
            "aten::linalg_*", "mylib::*"), held against the op, the overload and its full name. What has no namespace
            is in aten.

    Returns:
        Full names of overloads that the dispatcher knows, one or more, in the order of `in_order`.

    Raises:
        PolicyError: Nothing has that name, or nothing matches the pattern.

    Example:
        >>> find_overloads("mm.default"), find_overloads(torch.ops.aten.softmax.int)
        (('aten::mm',), ('aten::softmax.int',))
        >>> "aten::mm.out" in find_overloads("mm"), "aten::linalg_det" in find_overloads("linalg_*")
        (True, True)
    """
    asked = spell_key(key)
    name = asked if "::" in asked else f"aten::{asked}"
    found = _find(name)
    if not found:
        raise PolicyError(_unknown(asked, name))
    return in_order(found)


def _find(name: str) -> list[str]:
    """The overloads that a name or a pattern, both with a namespace, means."""
    if is_pattern(name):
        means = re.compile(fnmatch.translate(name)).match
        every = torch._C._dispatch_get_all_op_names()
        return [other for other in every if means(other.partition(".")[0]) or means(exact_key(other))]
    if "." in name:
        full = name.removesuffix(".default")
        return [full] if _exists(full) else []
    with_overload = f"{name}."
    every = torch._C._dispatch_get_all_op_names()
    return [other for other in every if other.startswith(with_overload) or other == name]


def _exists(full_name: str) -> bool:
    """Whether the dispatcher knows an overload."""
    try:
        return torch._C._dispatch_has_kernel(full_name)  # true of any op that is defined
    except (RuntimeError, UnicodeError):  # not what a name can be
        return False


def _unknown(asked: str, name: str) -> str:
    """What there is instead of a name that nothing has."""
    every = torch._C._dispatch_get_all_op_names()
    namespace, _, rest = name.partition("::")
    known = {exact_key(other) for other in every if other.startswith(f"{namespace}::")}
    if is_pattern(name):
        what = f"the pattern {asked!r} matches no op."
    elif "::" not in asked and _find(spelled := asked.replace(".", "::", 1)):
        return f"no op is called {asked!r}. Write {spelled!r}."
    elif not known:
        namespaces = dict.fromkeys(other.partition("::")[0] for other in every)
        close = did_you_mean(namespace, namespaces)
        return (
            f"no op is registered in namespace {namespace!r}. Import the library that defines {asked!r} first.{close}"
        )
    elif siblings := sorted(other for other in known if other.partition(".")[0] == name.partition(".")[0]):
        return f"{name.partition('.')[0]} has no overload {rest.partition('.')[2]!r}. Legal: {', '.join(siblings)}."
    elif exact_key(name) in {exact_key(row) for row in rows_by_name()}:
        return f"{name} has a row in the op table, and torch {torch.__version__} has no such op."
    else:
        what = f"no op is called {asked!r}."
    ops = {other.partition(".")[0].removeprefix(f"{namespace}::") for other in known}
    close = did_you_mean(rest.partition(".")[0].strip("*?"), sorted(ops))
    return f"{what}{close} Ops are named as in torch.ops: 'softmax', 'aten::softmax.int', 'mylib::op'."


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts overloads by their full names, the rows of the op table first.

    Example:
        >>> in_order(["aten::mm.out", "aten::mm", "aten::add.Tensor", "aten::addmm"])
        ('aten::addmm', 'aten::mm', 'aten::add.Tensor', 'aten::mm.out')
    """
    rows = rows_by_name()
    return tuple(sorted(names, key=lambda name: (rows[name].index if name in rows else len(rows), name)))


def exact_key(name: str) -> str:
    """Returns the key that means one overload: its full name, with `default` for an overload without a name.

    Example:
        >>> exact_key("aten::mm"), exact_key("aten::softmax.int")
        ('aten::mm.default', 'aten::softmax.int')
    """
    return name if "." in name else f"{name}.default"


def spell_key(key: object) -> str:
    """Returns the name that means the same as a key.

    Example:
        >>> spell_key(torch.ops.aten.mm), spell_key(torch.ops.aten.mm.default), spell_key("softmax")
        ('aten::mm', 'aten::mm.default', 'softmax')
    """
    named = name_op(key)
    if isinstance(named, str):
        return named
    if isinstance(key, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and isinstance(named, tuple):
        op, overload = named
        return op if overload is None else f"{op}.{overload}"
    raise PolicyError(f"an op is named by a str, an OpOverload or an OpOverloadPacket, got {key!r}.")


def name_op(op: object) -> object:
    """Returns an op as something that can be pickled: a name as it is, an op as its name and that of its overload."""
    if isinstance(op, torch._ops.OpOverload):
        return op._schema.name, op._overloadname
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name, None
    if isinstance(op, CustomOpDef):
        return op._qualname
    return op


def find_op(name: object) -> object:
    """Returns the op that `name_op` named."""
    if not isinstance(name, tuple):
        return name
    qualified, overload = name
    packet = functools.reduce(getattr, qualified.split("::"), torch.ops)
    return packet if overload is None else getattr(packet, overload)


def parse_policy(value: object, op: str) -> CastPolicy | torch.dtype:
    """Returns the policy that a value means.

    Args:
        value: A `CastPolicy` or its name, a floating `torch.dtype` or its name.
        op: What is to get it, for errors.

    Raises:
        PolicyError: It is none of these.

    Example:
        >>> parse_policy("fp16", "mm"), parse_policy("torch.bfloat16", "mm")
        (<CastPolicy.lower_precision_fp: 'lower_precision_fp'>, torch.bfloat16)
    """
    if isinstance(value, CastPolicy):
        return value
    if isinstance(value, torch.dtype):
        if value.is_floating_point:
            return value
        raise PolicyError(
            f"{op}: {value} is not a floating dtype, so nothing can be run in it. Legal: {_LEGAL_VALUES}."
        )
    if not isinstance(value, str):
        raise PolicyError(
            f"{op}: a policy is a str, a CastPolicy or a torch.dtype, got {value!r}. Legal: {_LEGAL_VALUES}."
        )
    try:
        return CastPolicy(value)
    except ValueError:
        pass
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return parse_policy(dtype, op)
    raise PolicyError(f"{op}: no cast policy is called {value!r}.{did_you_mean(value, _NAMES)} Legal: {_LEGAL_VALUES}.")
