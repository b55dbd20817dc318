"""Registers promotion rules with the extension, as tables, and the ops that promote their operands.

The ops, and the arguments that take part, are derived from the reference's op rules, which name functional overloads.
An overload that writes (in place, out=) has the arguments of a functional one and is found by its schema. The lists
below contain only what the rules do not say.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from torch_promote import _C
from torch_promote.errors import PromotionRuleError, PromotionWriteError
from torch_promote.extension import fork_safe_lock
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.reference.dtypes import ALL_DTYPES, Kind, dtype_name
from torch_promote.reference.dtypes import kind as kind_of_dtype
from torch_promote.reference.ops.infer import EACH, Entry, rule_table
from torch_promote.reference.promotion import Operand
from torch_promote.reference.promotion_rules import PromotionRule, promotion_rule
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES, describe

# What an op computes in; csrc/promotion/call.h, Computes.
COMMON, FLOATS, BOOLEAN, _COMPOSITE = range(4)

#: The rules of promoting ops, and what an op with such a rule computes in.
_COMPUTES = {
    "binary": COMMON,
    "ternary": COMMON,
    "with_numbers": COMMON,
    "power_of_number": COMMON,
    "where": COMMON,
    "promoted": COMMON,
    "real_of_promoted": COMMON,
    "binary_float": FLOATS,
    "unary_float": FLOATS,
    "like_float": FLOATS,
    "angle": FLOATS,
    "quotient": FLOATS,
    "comparison": BOOLEAN,
}

#: Those of them whose results are real.
_REAL = ("angle", "real_of_promoted")

#: Tensor arguments that are not operands.
_NO_OPERANDS = {"where": ("condition",)}

#: The operands of rules that do not name them.
_NAMED = {"power_of_number": ("self", "exponent")}

#: Composite matrix products. Those with a kernel have the op rule `one_dtype` in the family "matrices".
_PRODUCTS = (
    *("bilinear", "chain_matmul", "einsum", "inner", "linalg_matmul", "linalg_multi_dot", "linalg_vecdot", "linear"),
    *("matmul", "tensordot"),
)

#: Ops with the op rule `one_dtype` in the family "matrices" that are not matrix products.
_NO_PRODUCTS = ("aten::linalg_cross",)

#: Ops that no rule acts on, nor on the ops that they call.
_LEFT_ALONE = (
    *("float_power", "ldexp"),  # a conversion to float64; a mantissa and an exponent
    *("cov", "gradient"),  # integer frequencies; a spacing, which makes integers floats
    # Kernels that mix dtypes, which shows in inference mode: NOTE [ Inside kernels ] in csrc/policy/dispatch_state.h.
    *("convolution", "linalg_matrix_exp", "linalg_matrix_sqrth", "_linalg_det", "_linalg_slogdet", "linalg_pinv"),
    *("linalg_polar", "linalg_vector_norm", "logsumexp", "mvlgamma", "native_dropout", "native_dropout_backward"),
)

#: In-place operators, and the op that computes the same; for others the name without its last underscore is that op.
_OPERATORS = {"__ilshift__": "__lshift__", "__irshift__": "__rshift__"}


class PromotingOp(NamedTuple):
    """An overload that promotes."""

    name: str  # such as `aten::add.Tensor`
    # For an op that writes: the overload that computes the same without writing. For an op on numbers alone: the
    # overload that takes tensors for them. Otherwise "".
    functional: str
    participants: tuple[int, ...]  # the places of the arguments that take part
    computes: int  # COMMON, FLOATS or BOOLEAN
    rounding_mode: int = -1  # the place of the argument that makes a quotient whole; -1 if there is none
    each: bool = False  # whether its lists go in step: each element is a call of its own
    matmul: bool = False
    real: bool = False  # whether its result is real, also of complex operands


@functools.cache
def promoting_ops() -> tuple[PromotingOp, ...]:
    """Returns the promoting ops that the running PyTorch has."""
    return tuple(_find(_schemas()))


def _composite_ops() -> Iterator[PromotingOp]:
    """Yields the other ops that compute by calling ops; see NOTE [ Composite calls ] in csrc/promotion/call.h."""
    known = {op.name for op in promoting_ops()}
    for name, schema in itertools.chain.from_iterable(overloads.items() for overloads in _schemas().values()):
        left_alone = schema.name.removeprefix("aten::").removesuffix("_") in _LEFT_ALONE
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        shares = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
        computes = not schema.returns or any("Tensor" in str(result.type) for result in schema.returns)
        if left_alone or (is_composite and computes and not shares and name not in known and _tensors(schema)):
            yield PromotingOp(name, "", () if left_alone else _tensors(schema, _NUMBERS), _COMPOSITE)


def _schemas() -> dict[str, dict[str, Any]]:
    """Returns the overloads of aten by op, then by full name."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and torch._C._dispatch_has_kernel(_full_name(schema)):
            found[schema.name][_full_name(schema)] = schema
    return found


def _full_name(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _find(schemas: dict[str, dict[str, Any]]) -> Iterator[PromotingOp]:
    for name, entry in rule_table().items():
        schema = schemas.get(name.partition(".")[0], {}).get(name)
        made = None if schema is None else _of_entry(entry, schema)
        if made is not None:
            yield made._replace(functional=_on_tensors(made, schema, schemas))
            yield from _writers(made, schema, schemas)
    for op in _PRODUCTS:
        for name, schema in schemas.get(f"aten::{op}", {}).items():
            if not any(_is_written(argument) for argument in schema.arguments):
                made = PromotingOp(name, "", _tensors(schema), COMMON, matmul=True)
                yield made
                yield from _writers(made, schema, schemas)


def _of_entry(entry: Entry, schema: Any) -> PromotingOp | None:
    term = entry.terms[0]
    if term.rule == "one_dtype" and entry.family == "matrices" and entry.op not in _NO_PRODUCTS:
        return PromotingOp(entry.op, "", _tensors(schema), COMMON, matmul=True)
    each = term.rule == EACH
    inner = entry.op.removeprefix("aten::")
    if each:
        inner = term.names[0]
        on_elements = rule_table()[f"aten::{inner}"]
        term = on_elements.terms[0]
        if term.rule == "one_dtype" and on_elements.family == "matrices":
            return PromotingOp(entry.op, "", _places_of_each(inner, (), schema), COMMON, each=True, matmul=True)
    if term.rule not in _COMPUTES or len(entry.terms) != 1 or schema.name.endswith("_backward"):
        return None
    names = [argument.name for argument in schema.arguments]
    operands = term.names or _NAMED.get(term.rule, ())
    if each:
        places = _places_of_each(inner, operands, schema)
    elif operands:
        places = tuple(names.index(name) for name in operands)
    else:
        places = _tensors(schema)
    excluded = _NO_OPERANDS.get(term.rule, ())
    places = tuple(place for place in places if names[place] not in excluded)
    if len(places) < 2 and _COMPUTES[term.rule] is not FLOATS and str(schema.arguments[places[0]].type) != _LIST:
        return None  # a single operand keeps its dtype
    mode = names.index("rounding_mode") if "rounding_mode" in names else -1
    return PromotingOp(entry.op, "", places, _COMPUTES[term.rule], mode, each, real=term.rule in _REAL)


def _places_of_each(inner: str, named: tuple[str, ...], schema: Any) -> tuple[int, ...]:
    """Returns the places of the list arguments that take part: those of the op on elements, by name, else by place."""
    packet, _, overload = inner.partition(".")
    other = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    chosen = named or tuple(argument.name for argument in other.arguments if _is_tensor(argument))
    names = [argument.name for argument in schema.arguments]
    places = [
        names.index(argument.name) if argument.name in names else place
        for place, argument in enumerate(other.arguments)
        if argument.name in chosen
    ]
    return tuple(place for place in places if place < len(names))


def _writers(made: PromotingOp, schema: Any, schemas: dict[str, dict[str, Any]]) -> Iterator[PromotingOp]:
    """Yields the overloads that write what another one returns: they have its arguments, and may have outputs."""
    operators = [f"aten::{name}" for name, op in _OPERATORS.items() if f"aten::{op}" == schema.name]
    wanted = {argument.name: str(argument.type) for argument in schema.arguments}
    for op in (schema.name, f"{schema.name}_", *operators):
        for name, other in schemas.get(op, {}).items():
            arguments = {a.name: str(a.type) for a in other.arguments if not (_is_written(a) and a.is_out)}
            if arguments == wanted and any(_is_written(a) for a in other.arguments):
                names = list(arguments)
                places = tuple(names.index(schema.arguments[place].name) for place in made.participants)
                functional = made.name if names == list(wanted) else ""  # polygamma_ has another order
                yield made._replace(name=name, functional=functional, participants=places)


def _on_tensors(made: PromotingOp, schema: Any, schemas: dict[str, dict[str, Any]]) -> str:
    """Returns the overload of an op on numbers alone that takes tensors for them; "" for any other op."""
    if {str(schema.arguments[place].type) for place in made.participants} != {"number"}:
        return ""
    names = [argument.name for argument in schema.arguments]
    return next(
        name
        for name, other in schemas[schema.name].items()
        if [a.name for a in other.arguments] == names and all(_is_tensor(other.arguments[p]) for p in made.participants)
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


_LIST = "List[Tensor]"
_NUMBERS = ("number", "Optional[number]")


def _tensors(schema: Any, numbers: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Returns the places of the tensors, of lists of them, and of arguments of the types in `numbers`."""
    return tuple(
        place
        for place, argument in enumerate(schema.arguments)
        if not argument.is_out and (_is_tensor(argument) or str(argument.type) in (_LIST, *numbers))
    )


_CODES = {dtype: _C.scalar_type(dtype) for dtype in ALL_DTYPES}

#: The dtypes that an op may write its result to under a rule; "same_kind" for rules that are not listed.
#:   same_kind        any dtype of no lower kind (bool < integer < floating < complex)
#:   numpy_same_kind  the same, with unsigned integers as a lower kind than signed ones
#:   safe             a dtype that the result's dtype promotes to
#:   no               only the result's dtype
_CASTING = {"numpy": "numpy_same_kind", "array_api": "safe", "strict": "no"}


class RegisteredRule(NamedTuple):
    """A rule with options, which stays registered with the extension as long as the process lives: 9 KB for each."""

    rule: PromotionRule
    matmul: bool  # whether the rule acts on matrix products
    kinds: int  # the kinds of promotion that the lint looks for, as bits; 0 for none
    mode: int  # what the lint does with them


_lock = fork_safe_lock()
#: The rules by their number in the extension.
_known: dict[int, RegisteredRule] = {}
#: The changes of policy that set them.
_changes: dict[int, _C.HeldChange] = {}


def promotion_change(rule: PromotionRule, matmul: bool, kinds: int, mode: int) -> int:
    """Returns the number of the change of policy that sets a promotion rule; registers the rule and its ops once."""
    _register_ops()
    _checkpoint.install()
    asked = RegisteredRule(rule, matmul, kinds, mode)
    with _lock:
        number = next((number for number, known in _known.items() if known == asked), None)
        if number is None:
            default_dtype = torch.get_default_dtype()
            rule = rule.under(default_dtype)
            is_stock = rule is promotion_rule("torch", default_dtype=default_dtype)
            options = _C.PromotionOptions(rule.zero_dim_is_weak, rule.associative, is_stock, matmul, kinds, mode)
            number = _C.register_promotion(rule.name, options, default_dtype, _tables(rule))
            _changes[number] = _C.register_promotion_change(number)
            _known[number] = asked
        return _changes[number].number


def rule_of(number: int) -> PromotionRule:
    """Returns the rule with a number in the extension, for the current default dtype."""
    return _known[number].rule.under(torch.get_default_dtype())


def registered(number: int) -> RegisteredRule:
    """Returns what has a number in the extension."""
    return _known[number]


@functools.cache
def _register_ops() -> None:
    for op in itertools.chain(promoting_ops(), _composite_ops()):
        name, _, overload = op.name.partition(".")
        participants = sum(1 << place for place in op.participants)
        _C.register_promoting_op(
            name, overload, op.functional, participants, op.computes, op.rounding_mode, op.each, op.matmul, op.real
        )


def _tables(rule: PromotionRule) -> _C.PromotionTables:
    return _C.PromotionTables(*_rows(rule), int.from_bytes(_content(rule)))


def _content(rule: PromotionRule) -> bytes:
    """A hash of what decides a rule's results. Those of three dtypes also depend on the rules that it is over."""
    over = b"" if rule.over is None else rule.over.name.encode() + _content(rule.over)
    return hashlib.blake2b(repr(_rows(rule)).encode() + over, digest_size=8).digest()


def _rows(rule: PromotionRule) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
    pairs = list(itertools.product(ALL_DTYPES, ALL_DTYPES))
    return (
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


_TORCH = str(Path(torch.__file__).parent) + os.sep

#: The files whose functions compute with what they were given, and with nothing else. A method of a module also
#: computes with the module's weights.
_COMPUTE = tuple(
    _TORCH + path.replace("/", os.sep)
    for path in ("functional.py", "masked/", "nn/", "_linalg_utils.py", "_lobpcg.py", "_lowrank.py")
)

#: Optimizers and GradScaler: PyTorch chose the dtypes of states and scales, with which the user mixes nothing.
_STEPS = (_TORCH + "optim" + os.sep, _TORCH + "amp" + os.sep)


# --- what the extension calls; csrc/promotion/rule.h and call.h

#: PyTorch's files and this package's. A frame of any other file is the user's.
folders: tuple[str, str] = (_TORCH, str(Path(__file__).parents[1]) + os.sep)


def caller() -> list[Any] | None:
    """Returns what PyTorch's outermost Python function that makes this call got; None if the user calls the op."""
    # See NOTE [ Composite calls ] in csrc/promotion/call.h. Nothing is recorded beforehand: the frames of the stack
    # tell.
    found = None
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_code.co_filename.startswith(folders) or frame.f_code.co_name == "__torch_function__"
    ):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_filename.startswith(_STEPS):
            found = []
        elif code.co_filename.startswith(_COMPUTE):
            if names[:1] == ("self",):
                break
            given = tree_leaves([frame.f_locals.get(name) for name in names])
            if any(isinstance(value, torch.Tensor) for value in given):
                found = [value for value in given if isinstance(value, torch.Tensor | int | float | complex)]
        frame = frame.f_back
    return found


def put_tables(number: int, default_dtype: torch.dtype) -> None:
    """Gives the extension the tables of a rule under a default dtype, when it first meets them."""
    rule = _known[number].rule.under(default_dtype)
    _C.put_promotion_tables(number, default_dtype, _tables(rule))


def common(number: int, dtypes: Sequence[torch.dtype]) -> int:
    """Returns the code of the common dtype of dtypes under a rule, or -1 if it has none."""
    try:
        return _CODES[rule_of(number).common(dtypes)]
    except PromotionRuleError:
        return -1


def refuse_operands(number: int, op: str, operands: Sequence[Any], floats: bool) -> None:
    """Raises the error of a rule that has no common dtype for the operands of an op."""
    rule_of(number).common(map(_operand, operands), op, floats)


def refuse_to_write(number: int, op: str, operands: Sequence[Any], computed: torch.dtype, written: torch.dtype) -> None:
    """Raises the error of a rule that does not write a result to the tensor of an in-place op or an `out`."""
    raise PromotionWriteError(
        _known[number].rule.name,
        map(describe_operand, operands),
        f"it computes in {dtype_name(computed)}, which the rule does not write to {dtype_name(written)}",
        f"Write to a tensor of {dtype_name(computed)}, or cast the result of the op that does not write: "
        f".to({written}).",
        op,
    )


def describe_operand(operand: tuple[torch.dtype, tuple[int, ...], int, int | float | complex | None]) -> str:
    """Returns a description of an operand as the extension gives it; csrc/python/callbacks.cpp, to_python."""
    return describe(_operand(operand))


def _operand(
    described: tuple[torch.dtype, tuple[int, ...], int, int | float | complex | None],
) -> Operand | int | float | complex:
    dtype, sizes, number, value = described
    if value is not None:
        return value
    return Operand(dtype, sizes, wrapped=number >= 0)
