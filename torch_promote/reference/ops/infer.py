"""`infer`: the dtypes of an op's results, and the shape and strides of elementwise ops, without running the op.

The `.rules` files beside this module are a table with a line for each overload:

    sort.stable                same int64
    native_batch_norm_backward wanted(0, input) wanted(1, weight, save_mean) wanted(2, weight, save_mean)

A line names an overload of aten and, for each of its results, a rule or a dtype. The names in parentheses are the
arguments that the rule uses; the default is the first tensor or all tensors, depending on the rule. An elementwise op
has one result and an elementwise rule. `each(add.Tensor)` names the op that an op on lists runs on their elements.
Lines that start with # are comments. An op needs no line if its schema suffices: a result that is a written argument
has that argument's dtype, and some ops return no tensors. Neither does an overload that differs from one with a line
only in that it takes numbers for tensors, as `add.Scalar` from `add.Tensor`: it has the same rule and operands.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_promote.reference.ops.call import Call, TensorLike, signature_of, strides_of
from torch_promote.reference.ops.dtype_rules import DTYPE_RULES
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.promotion import Operand

_LINE = re.compile(r"^(?P<op>\w+(?:\.\w+)?)\s+(?P<terms>\w.*)$")
_TERM = re.compile(r"(\w+)(?:\(([^()]*)\))?")


@dataclass(frozen=True)
class Term:
    """The rule for one result: its name, or that of a dtype, and the names of the arguments that it uses."""

    rule: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.rule}({', '.join(self.names)})" if self.names else self.rule


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    op: str  # such as `aten::add.Tensor`
    terms: tuple[Term, ...]  # one for each result
    family: str  # the name of the file, such as `elementwise`

    def __str__(self) -> str:
        return ", ".join(map(str, self.terms))


@functools.cache
def rule_table() -> dict[str, Entry]:
    """Returns the lines of all `.rules` files, and those of overloads that take numbers for tensors, by overload."""
    table: dict[str, Entry] = {}
    for path in sorted((Path(__file__).parent / "rules").glob("*.rules")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.match(line)
            if match is None:
                raise ValueError(f"{path}:{number}: not a rule: {line!r}. Expected an overload and a rule per result.")
            op = f"aten::{match['op']}"
            if op in table:
                raise ValueError(f"{path}:{number}: {op} already has a rule in {table[op].family}.rules.")
            table[op] = Entry(op, _terms(match["terms"]), path.stem)
    for op in {name.partition(".")[0] for name in table}:
        table.update(_of_numbers(torch._C._jit_get_schemas_for_operator(op), table))
    return table


def _of_numbers(schemas: Sequence[Any], table: Mapping[str, Entry]) -> dict[str, Entry]:
    """The lines of an op's overloads without one that take numbers for the tensors of one with a line, or back."""
    named = {f"{s.name}.{s.overload_name}" if s.overload_name else s.name: s for s in schemas}
    lines = {_with_tensors(named[name]): table[name] for name in reversed(named) if name in table}
    found = {}
    for name in named.keys() - table.keys():
        if (entry := lines.get(_with_tensors(named[name]))) is not None:
            tensors = tuple(a.name for a in named[entry.op].arguments if str(a.real_type) == "Tensor")
            found[name] = Entry(name, tuple(Term(t.rule, t.names or tensors) for t in entry.terms), entry.family)
    return found


def _with_tensors(schema: Any) -> tuple[tuple[str, str], ...]:
    """The names and types of arguments and results, where numbers count as tensors."""
    return tuple((a.name, str(a.real_type).replace("number", "Tensor")) for a in (*schema.arguments, *schema.returns))


def _terms(text: str) -> tuple[Term, ...]:
    return tuple(
        Term(rule, tuple(name.strip() for name in names.split(",") if name.strip()))
        for rule, names in _TERM.findall(text)
    )


def is_registered(overload: str, key: str) -> bool:
    """Whether PyTorch has registered a kernel for an overload on a dispatch key."""
    # A property of the build that no rule can predict, like the set of dtypes; it reveals no result dtype. Not cached:
    # a library may register a kernel at any time.
    # Source: aten/src/ATen/core/dispatch/OperatorEntry.h, hasKernelForDispatchKey (v2.13).
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload, key)


class NoRule(enum.Enum):
    """The result of `infer` for an op without a rule. It is false."""

    NO_RULE = "no rule"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return self.name


NO_RULE = NoRule.NO_RULE

#: The rule of ops on lists: `each(add.Tensor)` means that another op runs on the elements, one of each list at a time.
EACH = "each"

#: Python's in-place operators, such as `__ilshift__`.
_IN_PLACE_OPERATOR = re.compile("__i([lr]shift|and|or|xor)__")

#: In-place ops that change the shape or strides of their argument.
_RESHAPING = (
    *("as_strided_", "detach_", "resize_", "resize_as_", "resize_as_sparse_", "set_", "squeeze_", "swapaxes_"),
    *("swapdims_", "t_", "transpose_", "unsqueeze_"),
)


@dataclass(frozen=True)
class Inference:
    """The results of an op.

    Attributes:
        rule: The rule, as written in the table.
        dtypes: The dtype of each tensor result, with lists flattened. None stands for an undefined result.
        shape: The shape of an elementwise op's result. None for other ops.
        strides: Its strides in elements. None for other ops, for sparse tensors, and for outputs resized by an out= op
            without a kernel of its own.

    Example:
        >>> infer(torch.ops.aten.sort.default, (torch.ones(3),))
        Inference(rule='same, int64', dtypes=(torch.float32, torch.int64), shape=None, strides=None)
    """

    rule: str
    dtypes: tuple[torch.dtype | None, ...]
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None


def infer(
    op: torch._ops.OpOverload,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    default_dtype: torch.dtype | None = None,
) -> Inference | NoRule:
    """Infers the results of a call of an op. It assumes that PyTorch accepts the call.

    Args:
        op: An overload, such as `torch.ops.aten.add.Tensor`.
        args: Its positional arguments. Only the dtype, shape, strides, device and layout of tensors are used, and an
            `Operand` may replace a tensor.
        kwargs: Its keyword arguments.
        default_dtype: The dtype of Python floats. None: the current default dtype.

    Returns:
        The dtypes of the results, and the shape and strides for an elementwise op that does not take lists. For an op
        without a rule, `NO_RULE`, which is false.

    Raises:
        PromotionError: The operands do not promote, or have dtypes that the op does not accept.

    Example:
        >>> infer(torch.ops.aten.sum.default, (torch.ones(3, dtype=torch.int8),)).dtypes
        (torch.int64,)
        >>> infer(torch.ops.aten.add.Tensor, (torch.ones(2, 3, dtype=torch.int32), 5.5), default_dtype=torch.float32)
        Inference(rule='binary', dtypes=(torch.float32,), shape=(2, 3), strides=(3, 1))
        >>> infer(torch.ops.prims.svd.default, (torch.ones(2, 2),))
        NO_RULE
    """
    call = Call.of(op, args, kwargs or {}, default_dtype or torch.get_default_dtype())
    entry = rule_table().get(call.signature.name)
    if entry is not None:
        return _apply(entry, call)
    if not any("Tensor" in type_ for type_, _ in call.signature.returns):
        return Inference("no tensors", ())
    if all(written is not None for _, written in call.signature.returns):
        return _written(op, call)
    return NO_RULE


def _apply(entry: Entry, call: Call) -> Inference:
    first = entry.terms[0]
    if first.rule == EACH:
        return Inference(str(entry), tuple(_of_each(call, *first.names)))
    if first.rule in ELEMENTWISE_RULES:
        described = call.without_layout()
        result = ELEMENTWISE_RULES[first.rule](described or call, *first.names)
        return Inference(str(entry), (result.dtype,), result.shape, None if described else result.strides)
    dtypes: list[torch.dtype | None] = []
    for term in entry.terms:
        found = _dtype(term, call)
        dtypes.extend(found if isinstance(found, tuple) else (found,))
    return Inference(str(entry), tuple(dtypes))


def _of_each(call: Call, name: str) -> Iterator[torch.dtype | None]:
    """The results of another op on the elements of the lists. Arguments correspond by name, else by position."""
    # Source: aten/src/ATen/native/ForeachOpsKernels.cpp, FOREACH_BINARY_OP_LIST (v2.13).
    packet, _, overload = name.partition(".")
    namespace = getattr(torch.ops, call.signature.name.partition("::")[0])
    op = getattr(getattr(namespace, packet), overload or "default")
    places = [argument.name for argument in signature_of(op).arguments]
    lists = [isinstance(value, list | tuple) and not isinstance(value, Operand) for value in call.values()]
    for index in range(len(next(value for value, is_list in zip(call.values(), lists, strict=True) if is_list))):
        kwargs = {
            argument if argument in places else places[place]: value[index] if is_list else value
            for place, ((argument, value), is_list) in enumerate(zip(call.items(), lists, strict=True))
        }
        result = infer(op, (), kwargs, default_dtype=call.default_dtype)
        assert isinstance(result, Inference), f"{name} has no rule"
        yield from result.dtypes


def _dtype(term: Term, call: Call) -> torch.dtype | tuple[torch.dtype, ...] | None:
    if term.rule in DTYPE_RULES:
        return DTYPE_RULES[term.rule](call, *term.names)
    dtype = getattr(torch, term.rule)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _written(op: torch._ops.OpOverload, call: Call) -> Inference:
    """The results of an op that returns only arguments that it writes to."""
    names = [written for _, written in call.signature.returns if written is not None]
    dtypes = tuple(x.dtype for name in names for x in call.operands(name) if isinstance(x, TensorLike))
    functional = functional_of(op)
    entry = rule_table().get(functional) if functional is not None else None
    if entry is None or entry.terms[0].rule not in ELEMENTWISE_RULES or call.without_layout() is not None:
        return Inference("written", dtypes)
    if not dtypes:  # a Python number was passed for the written argument, and PyTorch returns a number
        return Inference("written", dtypes)
    out = call.tensor(names[0])
    if names[0] == "self":
        return Inference("written", dtypes, tuple(out.shape), strides_of(out))
    term = entry.terms[0]
    rule = functools.partial(ELEMENTWISE_RULES[term.rule], call, *term.names)
    # A composite out= op has no kernel of its own: it calls other ops and copies.
    if not is_registered(call.signature.name, "CompositeExplicitAutograd"):
        result = rule(out=out)
        return Inference("written", dtypes, result.shape, result.strides)
    # How it resizes an output of another shape depends on the overload.
    shape = rule().shape
    return Inference("written", dtypes, shape, strides_of(out) if shape == tuple(out.shape) else None)


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def functional_of(op: torch._ops.OpOverload) -> str | None:
    """Returns the overload that computes the same without writing, or None: `aten::add.Tensor` for add_ and add.out."""
    signature = signature_of(op)
    namespace, name = signature.name.split(".")[0].split("::")
    name = _IN_PLACE_OPERATOR.sub(r"__\1__", name)
    if name in _RESHAPING:
        return None
    inputs = [(a.name, a.type) for a in signature.arguments if not a.written or a.name == "self"]
    packet = getattr(getattr(torch.ops, namespace), name if name.endswith("__") else name.removesuffix("_"), None)
    for overload in packet.overloads() if packet is not None else ():
        other = signature_of(getattr(packet, overload))
        if not any(a.written for a in other.arguments) and [(a.name, a.type) for a in other.arguments] == inputs:
            return other.name
    return None
