"""Registers promotion rules with the extension, as tables, and answers what the tables cannot."""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.errors import PromotionRuleError, PromotionWriteError
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.native.fork_safe_lock import fork_safe_lock
from torch_promote.promoting import lint as promotion_lint
from torch_promote.promoting.ops import promoting_ops
from torch_promote.reference.dtypes import ALL_DTYPES, Kind, dtype_name
from torch_promote.reference.dtypes import kind as kind_of_dtype
from torch_promote.reference.promotion import Operand
from torch_promote.reference.promotion_rules import PromotionRule, promotion_rule
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES, describe

__all__ = ["Owner", "matmul_of", "promotion_change", "rule_of"]

_CODES = {dtype: _C.scalar_type(dtype) for dtype in ALL_DTYPES}

#: The dtypes that an op may write its result to under a rule; "same_kind" for rules that are not listed.
#:   same_kind        any dtype of no lower kind (bool < integer < floating < complex)
#:   numpy_same_kind  the same, with unsigned integers as a lower kind than signed ones
#:   safe             a dtype that the result's dtype promotes to
#:   no               only the result's dtype
_CASTING = {"numpy": "numpy_same_kind", "array_api": "safe", "strict": "no"}


#: How many rules stay registered after the last region object with them is gone.
_KEPT = 16


class Owner:
    """Keeps a rule registered. Each region object with the rule holds it, and so does a compiled graph.

    Attributes:
        number: The rule's number in the extension.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class _Known(NamedTuple):
    """A rule that is registered with the extension.

    Attributes:
        rule: The rule.
        mode: What the lint does with the promotions that it finds; 0 without a lint.
        matmul: Whether the rule acts on matrix products.
        key: Its key in `_numbers`.
    """

    rule: PromotionRule
    mode: int
    matmul: bool
    key: _Key


#: The rule's address and the options. Holding the rule keeps its address from being reused.
_Key = tuple[int, bool, int, int]

_lock = fork_safe_lock()
#: The rules by their number in the extension, in the order in which regions were last made with them.
_known: OrderedDict[int, _Known] = OrderedDict()
_numbers: dict[_Key, int] = {}
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
#: The rules and changes of regions that compiled functions open: their graphs hold numbers.
_traced: dict[int, tuple[Owner, _C.HeldChange]] = {}


def promotion_change(rule: PromotionRule, matmul: bool, kinds: int, mode: int) -> tuple[int, Owner]:
    """Returns the number of the change of policy that sets a promotion rule; registers the rule and its ops if needed.

    Args:
        rule: The rule.
        matmul: Whether the rule acts on matrix products.
        kinds: The kinds of promotion that the lint looks for, as bits; 0 for none.
        mode: What the lint does with them.

    Returns:
        The number, and what keeps the rule registered.
    """
    _register_ops()
    _checkpoint.install()
    key = (id(rule), matmul, kinds, mode)
    with _lock:
        number = _numbers.get(key)
        if number is None:
            _drop_unused()
            number = _numbers[key] = _register(rule, matmul, kinds, mode, key)
        _known.move_to_end(number)
        owner = _owners.get(number)
        if owner is None:
            owner = _owners[number] = Owner(number)
        change = _C.register_promotion_change(number)
        if torch._guards.TracingContext.try_get() is not None:
            _traced[number] = owner, _C.HeldChange(change)
        return change, owner


def _drop_unused() -> None:
    """Drops all but the last rules that no region object has. Policies that are in force somewhere keep theirs."""
    unowned = [number for number in _known if number not in _owners]
    for number in unowned[:-_KEPT]:
        key = _known[number].key
        _numbers.pop(key, None)  # first: after an interrupt no key may lead to a rule that is gone
        if _C.drop_promotion(number):
            del _known[number]
        else:
            _numbers[key] = number


def rule_of(number: int) -> PromotionRule:
    """Returns the rule with a number in the extension, for the current default dtype."""
    return _known[number].rule.under(torch.get_default_dtype())


def matmul_of(number: int) -> bool:
    """Returns whether the rule with a number in the extension acts on matrix products."""
    return _known[number].matmul


@functools.cache
def _register_ops() -> None:
    _C.set_promotion_hooks(_Hooks())
    for op in promoting_ops():
        name, _, overload = op.name.partition(".")
        participants = sum(1 << place for place in op.participants)
        _C.register_promoting_op(
            name, overload, op.functional, participants, op.computes, op.rounding_mode, op.each, op.matmul, op.refuses
        )


def _register(rule: PromotionRule, matmul: bool, kinds: int, mode: int, key: _Key) -> int:
    default_dtype = torch.get_default_dtype()
    options = _C.PromotionOptions(
        rule.zero_dim_is_weak,
        rule.associative,
        rule.under(default_dtype) is promotion_rule("torch", default_dtype=default_dtype),
        matmul,
        kinds,
        mode,
    )
    number = _C.register_promotion(rule.name, options, _CODES[default_dtype], _tables(rule.under(default_dtype)))
    _known[number] = _Known(rule, mode, matmul, key)
    return number


def _tables(rule: PromotionRule) -> _C.PromotionTables:
    pairs = list(itertools.product(ALL_DTYPES, ALL_DTYPES))
    tables = (
        _coded((a, b, rule.of_pair(a, b)) for a, b in pairs),
        [
            (index, _CODES[dtype], _code(rule.of_number(number, dtype)))
            for index, number in enumerate(NUMBER_TYPES)
            for dtype in ALL_DTYPES
        ],
        _coded((dtype, rule.of_float(dtype)) for dtype in ALL_DTYPES),
        _coded((a, b, rule.zero_dims.get((a, b), a if a is b else None)) for a, b in pairs),
        _coded((a, b) for a, b in pairs if _may_write(rule, a, b)),
    )
    content = hashlib.blake2b(repr(tables).encode(), digest_size=8).digest()
    return _C.PromotionTables(*tables, int.from_bytes(content))


def _code(dtype: torch.dtype | None) -> int:
    return -1 if dtype is None else _CODES[dtype]


def _coded(rows: Iterable[tuple[torch.dtype | None, ...]]) -> list[Any]:
    return [tuple(map(_code, row)) for row in rows]


def _may_write(rule: PromotionRule, computed: torch.dtype, written: torch.dtype) -> bool:
    casting = _CASTING.get(rule.name, "same_kind")
    if computed is written:
        return True
    if casting == "no":
        return False
    if casting == "safe":
        return rule.of_pair(computed, written) is written
    return _kind(computed, casting) <= _kind(written, casting)


def _kind(dtype: torch.dtype, casting: str) -> tuple[int, bool]:
    split = casting == "numpy_same_kind" and kind_of_dtype(dtype) is Kind.INTEGRAL
    return int(kind_of_dtype(dtype)), split and dtype.is_signed


class _Hooks:
    """What the extension calls; csrc/promotion/callbacks.h."""

    def put_tables(self, number: int, default_dtype: torch.dtype) -> None:
        rule = _known[number].rule.under(default_dtype)
        _C.put_promotion_tables(number, _CODES[default_dtype], _tables(rule))

    def common(self, number: int, dtypes: Sequence[torch.dtype]) -> int:
        try:
            return _CODES[rule_of(number).common(dtypes)]
        except PromotionRuleError:
            return -1

    def refuse_operands(self, number: int, op: str, operands: Sequence[Any], floats: bool) -> None:
        rule_of(number).common(map(_operand, operands), op, floats)

    def refuse_to_write(
        self, number: int, op: str, operands: Sequence[Any], computed: torch.dtype, written: torch.dtype
    ) -> None:
        raise PromotionWriteError(
            _known[number].rule.name,
            map(describe, map(_operand, operands)),
            f"it computes in {dtype_name(computed)}, which the rule does not write to {dtype_name(written)}",
            f"Write to a {dtype_name(computed)} tensor, or cast the result of the op that does not write: "
            f".to({written}).",
            op,
        )

    def report(
        self, number: int, region: int, op: str, operands: Sequence[Any], result: torch.dtype, kinds: int
    ) -> None:
        known = _known[number]
        words = tuple(describe(_operand(operand)) for operand in operands)
        event = {"op": op, "operands": words, "result": result, "rule": known.rule.name}
        promotion_lint.report(known.mode, region, kinds, event)


def _operand(
    described: tuple[torch.dtype, tuple[int, ...], int, int | float | complex | None],
) -> Operand | int | float | complex:
    dtype, sizes, number, value = described
    if value is not None:
        return value
    return Operand(dtype, sizes, wrapped=number >= 0)
