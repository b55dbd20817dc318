"""Names of ops: the ways to write one, and the overloads that each selects."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable

import torch
from torch._library.custom_ops import CustomOpDef

from torch_promote.errors import PolicyError
from torch_promote.policy.closest_ops import closest_ops
from torch_promote.policy.op_table import rows_by_name, schema_of
from torch_promote.policy.python_names import (
    HOW_TO_NAME,
    calls_of_function,
    is_python_name,
    op_of_function,
    op_of_python_name,
)

__all__ = ["exact_key", "find_op", "find_overloads", "in_order", "is_pattern", "matches", "name_op", "spell_key"]


def find_overloads(key: object) -> tuple[str, ...]:
    """Returns the overloads that a name, an op object or a pattern selects.

    Args:
        key: "softmax", "aten::softmax", "mylib::op" or `torch.ops.aten.softmax` (every overload of the op);
            "softmax.int", "aten::softmax.int" or `torch.ops.aten.softmax.int` (that overload); "mm.default" (the
            overload without a name); what `torch.library.custom_op` returns; a function or method of PyTorch, or its
            name in Python (`torch.mm`, `F.softmax`, "F.softmax", "torch.Tensor.softmax", "torch.ops.aten.mm"), which
            selects every overload of the op that it calls; or a shell pattern ("linalg_*", "aten::linalg_*",
            "mylib::*"), which has to match the op, the overload or the full name. The namespace defaults to aten.

    Returns:
        The full names of one or more registered overloads, in the order of `in_order`.

    Raises:
        PolicyError: No op has that name, or none matches the pattern; or a function of PyTorch calls several ops.

    Example:
        >>> find_overloads("mm.default"), find_overloads(torch.ops.aten.softmax.int)
        (('aten::mm',), ('aten::softmax.int',))
        >>> "aten::mm.out" in find_overloads("mm"), "aten::linalg_det" in find_overloads("linalg_*")
        (True, True)
        >>> find_overloads(torch.nn.functional.layer_norm)
        ('aten::layer_norm',)
    """
    asked = spell_key(key)
    name = asked if "::" in asked else f"aten::{asked}"
    found = _find(name)
    if not found:
        raise PolicyError(_unknown(asked, name))
    return in_order(found)


def _find(name: str) -> list[str]:
    """Returns the overloads that a name or pattern selects. It includes a namespace."""
    if is_pattern(name):
        means = re.compile(fnmatch.translate(name)).match
        every = torch._C._dispatch_get_all_op_names()
        return _defined(other for other in every if means(other.partition(".")[0]) or means(exact_key(other)))
    if "." in name:
        full = name.removesuffix(".default")
        return [full] if _exists(full) else []
    with_overload = f"{name}."
    every = torch._C._dispatch_get_all_op_names()
    return _defined(other for other in every if other.startswith(with_overload) or other == name)


def _defined(names: Iterable[str]) -> list[str]:
    """Those that are ops. The dispatcher also lists names that only have a kernel, of an op that is gone."""
    return [name for name in names if schema_of(name) is not None]


def _exists(full_name: str) -> bool:
    """Whether an overload is registered with the dispatcher."""
    try:
        return torch._C._dispatch_has_kernel(full_name)  # true for every op that is defined
    except (RuntimeError, UnicodeError):  # the text cannot be the name of an op
        return False


def _unknown(asked: str, name: str) -> str:
    """Returns the error text for a name or pattern that selects nothing."""
    every = _defined(torch._C._dispatch_get_all_op_names())
    namespace, _, rest = name.partition("::")
    known = {exact_key(other) for other in every if other.startswith(f"{namespace}::")}
    if is_pattern(name):
        what = f"the pattern {asked!r} matches no op."
        if is_python_name(asked):
            return f"{what} A pattern has to match names of ops: write {asked.rpartition('.')[2]!r}."
    elif "::" not in asked and _find(spelled := asked.replace(".", "::", 1)):
        return f"no op is called {asked!r}. Write {spelled!r}."
    elif "::" not in asked and _find(f"aten::{asked.replace('.', '_')}"):  # linalg.norm
        return f"no op is called {asked!r}. Write {asked.replace('.', '_')!r}."
    elif not known:
        namespaces = dict.fromkeys(other.partition("::")[0] for other in every)
        first = f"no op is registered in namespace {namespace!r}. Import the library that defines {asked!r} first."
        return f"{first}{_closest(namespace, namespaces, '')}"
    elif siblings := sorted(other for other in known if other.partition(".")[0] == name.partition(".")[0]):
        return f"{name.partition('.')[0]} has no overload {rest.partition('.')[2]!r}. Legal: {', '.join(siblings)}."
    elif exact_key(name) in {exact_key(row) for row in rows_by_name()}:
        return f"{name} has a row in the op table, but torch {torch.__version__} has no such op."
    elif "::" not in asked and (called := calls_of_function(asked)):
        return f"no op is called {asked!r}. {called}"
    else:
        what = f"no op is called {asked!r}."
    ops = sorted({other.partition(".")[0].removeprefix(f"{namespace}::") for other in known})
    meant = asked.rpartition(".")[2] if is_python_name(asked) else rest.partition(".")[0].strip("*?")
    return f"{what}{_closest(meant, ops, namespace)} {HOW_TO_NAME}"


def _closest(name: str, known: Iterable[str], namespace: str) -> str:
    close = ", ".join(closest_ops(name, known, namespace))
    return f" Closest: {close}." if close else ""


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts overloads: the rows of the op table in its order, then the others by name.

    Example:
        >>> in_order(["aten::mm.out", "aten::mm", "aten::add.Tensor", "aten::addmm"])
        ('aten::addmm', 'aten::mm', 'aten::add.Tensor', 'aten::mm.out')
    """
    rows = rows_by_name()
    return tuple(sorted(names, key=lambda name: (rows[name].index if name in rows else len(rows), name)))


def exact_key(name: str) -> str:
    """Returns the key that selects exactly one overload: its full name, with `default` for the overload without a name.

    Example:
        >>> exact_key("aten::mm"), exact_key("aten::softmax.int")
        ('aten::mm.default', 'aten::softmax.int')
    """
    return name if "." in name else f"{name}.default"


def spell_key(key: object) -> str:
    """Returns the name that selects the same overloads as a key.

    Example:
        >>> spell_key(torch.ops.aten.mm), spell_key(torch.ops.aten.mm.default), spell_key("softmax")
        ('aten::mm', 'aten::mm.default', 'softmax')
        >>> spell_key(torch.mm), spell_key("F.cross_entropy")
        ('aten::mm', 'aten::cross_entropy_loss')
    """
    if isinstance(key, str):
        is_written_in_python = is_python_name(key) and (not is_pattern(key) or key.startswith("torch.ops."))
        return (op_of_python_name(key) if is_written_in_python else None) or key
    if isinstance(key, torch._ops.OpOverload):
        return f"{key._schema.name}.{key._overloadname}"
    if isinstance(key, torch._ops.OpOverloadPacket):
        return key._qualified_op_name
    return key._qualname if isinstance(key, CustomOpDef) else op_of_function(key)


def name_op(op: object) -> object:
    """Returns an op in a form that can be pickled: a name unchanged, an op object as its name and overload name."""
    if isinstance(op, torch._ops.OpOverload):
        return op._schema.name, op._overloadname
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name, None
    return op if isinstance(op, str) else spell_key(op)


def find_op(name: object) -> object:
    """Returns the op that `name_op` made a name of."""
    if not isinstance(name, tuple):
        return name
    qualified, overload = name
    packet = functools.reduce(getattr, qualified.split("::"), torch.ops)
    return packet if overload is None else getattr(packet, overload)


def is_pattern(name: str) -> bool:
    """Whether a name contains a wildcard. Names of ops never do.

    Example:
        >>> is_pattern("linalg_*"), is_pattern("softmax.int")
        (True, False)
    """
    return any(wildcard in name for wildcard in "*?[")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern, or a name as in `find_overloads`, matches an op: by its name, its overload or its full name.

    Example:
        >>> [matches("aten::softmax.int", pattern) for pattern in ("softmax", "softmax.*", "aten::*", "F.softmax", "s")]
        [True, True, True, True, False]
    """
    if is_python_name(pattern):
        pattern = spell_key(pattern)
    overload = name.partition("::")[2]
    known = (overload.partition(".")[0], overload, name.partition(".")[0], name, exact_key(name))
    return any(fnmatch.fnmatchcase(one, pattern) for one in known)
