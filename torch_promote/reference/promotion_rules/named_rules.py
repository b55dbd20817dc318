"""`promotion_rule`: the promotion rules by name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch

from torch_promote.errors import DtypeError, RuleDefinitionError, did_you_mean
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.reference.dtypes import (
    ALL_DTYPES,
    Family,
    Kind,
    default_complex,
    dtype_name,
    family,
    is_complex,
    is_floating,
    is_integral,
    kind,
)
from torch_promote.reference.promotion import (
    CODES,
    PromotionError,
    combine_categories,
    number_dtype,
    promote_types,
    read_table,
    result_type,
)
from torch_promote.reference.promotion_rules.rule import (
    NUMBER_TYPES,
    PromotionRule,
    fits,
    words_of_table,
)

# --- jax: a lattice, in which Python numbers have nodes of their own below the dtypes of their kind

#: The float8 dtypes. Each is a node with nothing above it.
FLOAT8 = tuple(dtype_name(dtype) for dtype in ALL_DTYPES if family(dtype) is Family.FLOAT8)

#: Maps each node to the nodes directly above it, as in JAX's type promotion semantics. A Python bool is the node bool;
#: int*, float* and complex* are the other Python numbers.
LATTICE: Mapping[str, tuple[str, ...]] = {
    "bool": ("int*",),
    "int*": ("uint8", "int8", "uint4", "int4", "uint2", "int2"),
    **dict.fromkeys(("uint2", "uint4", "int2", "int4"), ()),
    "uint8": ("int16", "uint16"),
    "uint16": ("int32", "uint32"),
    "uint32": ("int64", "uint64"),
    "uint64": ("float*",),
    "int8": ("int16",),
    "int16": ("int32",),
    "int32": ("int64",),
    "int64": ("float*",),
    "float*": (*FLOAT8, "bfloat16", "float16", "complex*"),
    **dict.fromkeys(FLOAT8, ()),
    "bfloat16": ("float32",),
    "float16": ("float32",),
    "float32": ("float64", "complex64"),
    "float64": ("complex128",),
    "complex*": ("complex64",),
    "complex64": ("complex128",),
    "complex128": (),
}

_JAXS_NUMBERS = {bool: "bool", int: "int*", float: "float*", complex: "complex*"}

_JAXS_STANDS_FOR = {"int*": "PyTorch's int", "float*": "the default dtype", "complex*": "the default complex dtype"}

#: The dtype of an integer in true division: a floating dtype of similar width, independent of the default dtype.
_JAXS_INEXACT = {
    **dict.fromkeys(("bool", "uint4", "int4", "uint8", "int8", "uint16", "int16", "uint32", "int32"), torch.float32),
    **dict.fromkeys(("uint64", "int64"), torch.float64),
}


@functools.cache
def _above(node: str) -> frozenset[str]:
    """The nodes above a node, including itself."""
    return frozenset({node}).union(*map(_above, LATTICE[node]))


def _join(nodes: Iterable[str]) -> str | None:
    """The least node above all of the nodes, or None. Source: jax/_src/dtypes.py, _least_upper_bound (v0.10)."""
    common = frozenset.intersection(*map(_above, nodes))
    return next((node for node in common if common <= _above(node)), None)


_JOINS = {pair: _join(pair) for pair in itertools.product(LATTICE, repeat=2)}


@functools.cache
def jax_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns JAX's rule with 64-bit dtypes enabled and PyTorch's default dtype for Python floats."""
    # A join of float* stands for the default dtype, one of complex* for its complex dtype.
    # Source: jax/_src/dtypes.py, _type_promotion_lattice (v0.10).
    weak = {"int*": torch.int64, "float*": default_dtype, "complex*": default_complex(default_dtype)}

    def dtype_of(node: str | None) -> torch.dtype | None:
        return None if node is None else weak.get(node) or _DTYPES[node]

    names = {name: dtype for name, dtype in _DTYPES.items() if name in LATTICE}
    return PromotionRule(
        name="jax",
        tensors={(a, b): dtype_of(_JOINS[x, y]) for x, a in names.items() for y, b in names.items()},
        numbers={
            (number, dtype): dtype_of(_JOINS[node, name])
            for number, node in _JAXS_NUMBERS.items()
            for name, dtype in names.items()
        },
        floats={
            dtype: _JAXS_INEXACT.get(name, dtype if is_floating(dtype) or is_complex(dtype) else None)
            for name, dtype in names.items()
        },
        # uint64 and int64 join in float*, which joins with float16 in float16. Folding pairwise would give float32.
        associative=False,
        default_dtype=default_dtype,
        reason=_jaxs_reason,
        words=_jaxs_words,
        many=lambda dtypes: dtype_of(_of_many(dtypes)),
        build=jax_rule,
    )


_DTYPES = {dtype_name(dtype): dtype for dtype in ALL_DTYPES}


def _of_many(dtypes: Iterable[torch.dtype]) -> str | None:
    names = [dtype_name(dtype) for dtype in dtypes]
    return _join(names) if LATTICE.keys() >= set(names) else None


def _jaxs_words(a: torch.dtype | type, b: torch.dtype, common: torch.dtype) -> str:
    names = _JAXS_NUMBERS[a] if isinstance(a, type) else dtype_name(a), dtype_name(b)
    node = _JOINS.get(names)
    if node is None:  # a dtype that JAX does not have, with itself or a number
        return words_of_table("The rule", a, b, common)
    if node in names:
        told = f"In JAX's lattice, {names[1 - names.index(node)]} is below {node}, which stays"
    else:
        told = f"In JAX's lattice, {node} is the least node above {names[0]} and {names[1]}"
    return (
        f"{told} and stands for {_JAXS_STANDS_FOR[node]}, {dtype_name(common)}."
        if node in _JAXS_STANDS_FOR
        else f"{told}."
    )


def _jaxs_reason(a: torch.dtype | type, b: torch.dtype) -> str:
    names = [f"a Python {a.__name__}" if isinstance(a, type) else dtype_name(a), dtype_name(b)]
    for name in names:
        if not name.startswith("a ") and name not in LATTICE:
            return f"JAX has no dtype {name}"
    return f"no node of JAX's lattice is above both {names[0]} and {names[1]}"


# --- torch: 0-dim tensors and Python numbers are weaker than tensors with dimensions


@functools.cache
def torch_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns PyTorch's rule for every dtype of the running PyTorch."""
    # Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    pairs = list(itertools.product(ALL_DTYPES, ALL_DTYPES))
    return PromotionRule(
        name="torch",
        tensors={pair: _or_none(promote_types, *pair) for pair in pairs},
        numbers={
            (number, dtype): _or_none(combine_categories, dtype, number_dtype(number(1), default_dtype))
            for number in NUMBER_TYPES
            for dtype in ALL_DTYPES
        },
        floats={dtype: default_dtype if is_integral(dtype, include_bool=True) else dtype for dtype in ALL_DTYPES},
        zero_dim_is_weak=True,
        zero_dims={pair: _or_none(combine_categories, *pair) for pair in pairs},
        default_dtype=default_dtype,
        reason=lambda a, b: f"PyTorch does not promote {_name(a)} with {_name(b)}",
        whole=lambda operands: result_type(*operands, default_dtype=default_dtype),
        build=torch_rule,
    )


def _name(operand: torch.dtype | type) -> str:
    return dtype_name(operand) if isinstance(operand, torch.dtype) else f"a Python {operand.__name__}"


def _or_none(function: object, *args: torch.dtype) -> torch.dtype | None:
    assert callable(function)
    try:
        found: torch.dtype | None = function(*args)
    except PromotionError:
        return None
    return found


# --- numpy: NumPy 2's rule (NEP 50), a table for tensors of any number of dimensions; only Python numbers are weak


#: The dtype of arithmetic on two arrays, with ml_dtypes' bfloat16. NumPy's own table is in
#: numpy/_core/src/multiarray/common_dtype.c and in its casting tables.
NUMPY_TABLE = """
     b1 u1 u2 u4 u8 i1 i2 i4 i8 bf f2 f4 f8 c4 c8
b1   b1 u1 u2 u4 u8 i1 i2 i4 i8 bf f2 f4 f8 c4 c8
u1   u1 u1 u2 u4 u8 i2 i2 i4 i8 bf f2 f4 f8 c4 c8
u2   u2 u2 u2 u4 u8 i4 i4 i4 i8 f4 f4 f4 f8 c4 c8
u4   u4 u4 u4 u4 u8 i8 i8 i8 i8 f8 f8 f8 f8 c8 c8
u8   u8 u8 u8 u8 u8 f8 f8 f8 f8 f8 f8 f8 f8 c8 c8
i1   i1 i2 i4 i8 f8 i1 i2 i4 i8 bf f2 f4 f8 c4 c8
i2   i2 i2 i4 i8 f8 i2 i2 i4 i8 f4 f4 f4 f8 c4 c8
i4   i4 i4 i4 i8 f8 i4 i4 i4 i8 f8 f8 f8 f8 c8 c8
i8   i8 i8 i8 i8 f8 i8 i8 i8 i8 f8 f8 f8 f8 c8 c8
bf   bf bf f4 f8 f8 bf f4 f8 f8 bf f4 f4 f8 c4 c8
f2   f2 f2 f4 f8 f8 f2 f4 f8 f8 f4 f2 f4 f8 c4 c8
f4   f4 f4 f4 f8 f8 f4 f4 f8 f8 f4 f4 f4 f8 c4 c8
f8   f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 c8 c8
c4   c4 c4 c4 c8 c8 c4 c4 c8 c8 c4 c4 c4 c8 c4 c8
c8   c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8
"""

_NUMPYS_TABLE = read_table(NUMPY_TABLE)

#: NumPy's types, sorted by their numbers. Of several, the last one is promoted with each of the others.
_TYPE_NUMBERS = "b1 i1 u1 i2 u2 i4 u4 i8 u8 f4 f8 c4 c8 f2"
_RANK = {CODES[code]: rank for rank, code in enumerate(_TYPE_NUMBERS.split())}

#: The dtypes whose values bfloat16 can represent.
_IN_BFLOAT16 = (torch.bool, torch.int8, torch.uint8)


@functools.cache
def numpy_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns NumPy 2's rule. It does not depend on PyTorch's default dtype, since NumPy's is float64."""
    # Source: numpy/_core/src/multiarray/common_dtype.c, PyArray_PromoteDTypeSequence (v2.4).
    dtypes = list(dict.fromkeys(dtype for dtype, _ in _NUMPYS_TABLE))
    return PromotionRule(
        name="numpy",
        tensors=_NUMPYS_TABLE,
        numbers={(number, dtype): _numpys_number(number, dtype) for number in NUMBER_TYPES for dtype in dtypes},
        floats={dtype: dtype if is_floating(dtype) or is_complex(dtype) else torch.float64 for dtype in dtypes},
        associative=False,
        default_dtype=default_dtype,
        reason=_numpys_reason,
        words=_numpys_words,
        many=_numpys_many,
        build=numpy_rule,
    )


def _numpys_number(number: type, dtype: torch.dtype) -> torch.dtype:
    """A number of a higher kind than the array has NumPy's default precision; others have the array's dtype."""
    if fits(number, dtype):
        return dtype
    if number is complex and is_floating(dtype):
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return {int: torch.int64, float: torch.float64, complex: torch.complex128}[number]


def _numpys_many(dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """Promotes one dtype with each of the others, and folds the results, like PyArray_PromoteDTypeSequence."""
    # Thus int16, uint16 and float32 give float32, without int32 as an intermediate step. NumPy uses ml_dtypes only for
    # pairs; among more dtypes, bfloat16 stands for float32 unless it represents the values of all others.
    found = set(dtypes)
    if torch.bfloat16 in found:
        found.remove(torch.bfloat16)
        if found <= set(_IN_BFLOAT16):
            return torch.bfloat16
        found.add(torch.float32)
    if not found <= _RANK.keys():
        return None
    main, *others = sorted(found, key=_RANK.__getitem__, reverse=True)
    return functools.reduce(_numpys_pair, (_numpys_pair(main, other) for other in others), main)


def _numpys_pair(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    found = _NUMPYS_TABLE[a, b]
    assert found is not None, "NumPy's table is complete"
    return found


def _numpys_words(a: torch.dtype | type, b: torch.dtype, common: torch.dtype) -> str:
    told = words_of_table("NumPy's table", a, b, common)
    return f"{told[:-1]}, NumPy's default." if isinstance(a, type) and common is not b and not is_floating(b) else told


def _numpys_reason(a: torch.dtype | type, b: torch.dtype) -> str:
    unknown = next((x for x in (a, b) if isinstance(x, torch.dtype) and x not in {d for d, _ in _NUMPYS_TABLE}), None)
    assert unknown is not None, (a, b)
    if isinstance(a, type):
        return f"NumPy has no {dtype_name(b)}, and a Python {a.__name__} is of a higher kind ({kind(b).name.lower()})"
    return f"NumPy has no {dtype_name(unknown)}"


# --- array_api: kinds do not mix, and a Python number must not be of a higher kind than the array


#: The promotions that the standard defines: among integers, and among real and complex floating dtypes.
ARRAY_API_TABLE = """
     b1 u1 u2 u4 u8 i1 i2 i4 i8 f4 f8 c4 c8
b1   b1 -- -- -- -- -- -- -- -- -- -- -- --
u1   -- u1 u2 u4 u8 i2 i2 i4 i8 -- -- -- --
u2   -- u2 u2 u4 u8 i4 i4 i4 i8 -- -- -- --
u4   -- u4 u4 u4 u8 i8 i8 i8 i8 -- -- -- --
u8   -- u8 u8 u8 u8 -- -- -- -- -- -- -- --
i1   -- i2 i4 i8 -- i1 i2 i4 i8 -- -- -- --
i2   -- i2 i4 i8 -- i2 i2 i4 i8 -- -- -- --
i4   -- i4 i4 i8 -- i4 i4 i4 i8 -- -- -- --
i8   -- i8 i8 i8 -- i8 i8 i8 i8 -- -- -- --
f4   -- -- -- -- -- -- -- -- -- f4 f8 c4 c8
f8   -- -- -- -- -- -- -- -- -- f8 f8 c8 c8
c4   -- -- -- -- -- -- -- -- -- c4 c8 c4 c8
c8   -- -- -- -- -- -- -- -- -- c8 c8 c8 c8
"""

_STANDARDS_TABLE = read_table(ARRAY_API_TABLE)
_STANDARD = frozenset(dtype for dtype, _ in _STANDARDS_TABLE)
_COMPLEX_OF = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@functools.cache
def array_api_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns the standard's rule. Dtypes outside the standard promote only with themselves and with numbers."""
    # Source: array_api_strict/_dtypes.py, _result_type (v2.6).
    return PromotionRule(
        name="array_api",
        tensors=_STANDARDS_TABLE,
        numbers={(number, dtype): _standards_number(number, dtype) for number in NUMBER_TYPES for dtype in ALL_DTYPES},
        floats={dtype: dtype if is_floating(dtype) or is_complex(dtype) else None for dtype in ALL_DTYPES},
        default_dtype=default_dtype,
        reason=_standards_reason,
        words=functools.partial(words_of_table, "The standard's table"),
        build=array_api_rule,
    )


def _standards_number(number: type, dtype: torch.dtype) -> torch.dtype | None:
    if number is bool or dtype is torch.bool:
        return dtype if number is bool and dtype is torch.bool else None
    if number is complex and is_floating(dtype):
        return _COMPLEX_OF.get(dtype)
    return dtype if fits(number, dtype) else None


def _standards_reason(a: torch.dtype | type, b: torch.dtype) -> str:
    if isinstance(a, type):
        return f"the standard does not mix a Python {a.__name__} with {_kind(b)} arrays such as {dtype_name(b)}"
    for dtype in (a, b):
        if dtype not in _STANDARD:
            return f"the standard has no {dtype_name(dtype)}"
    if kind(a) is kind(b):
        return "the standard has no dtype for uint64 with signed integers"
    return f"the standard does not mix kinds: {dtype_name(a)} is {_kind(a)}, {dtype_name(b)} is {_kind(b)}"


def _kind(dtype: torch.dtype) -> str:
    return {Kind.BOOL: "bool", Kind.INTEGRAL: "integer", Kind.FLOATING: "floating", Kind.COMPLEX: "complex"}.get(
        kind(dtype), "opaque"
    )


# --- strict: all tensors must have one dtype, and a Python number must not be of a higher kind


@functools.cache
def strict_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns the strict rule: a call whose tensors have one dtype never raises, and integers divide to the default."""
    return PromotionRule(
        name="strict",
        tensors={(a, b): a if a is b else None for a in ALL_DTYPES for b in ALL_DTYPES},
        numbers={
            (number, dtype): dtype if fits(number, dtype) else None for number in NUMBER_TYPES for dtype in ALL_DTYPES
        },
        floats={dtype: default_dtype if is_integral(dtype, include_bool=True) else dtype for dtype in ALL_DTYPES},
        default_dtype=default_dtype,
        reason=_strict_reason,
        build=strict_rule,
    )


def _strict_reason(a: torch.dtype | type, b: torch.dtype) -> str:
    if isinstance(a, type):
        return f"a Python {a.__name__} would change the dtype of {dtype_name(b)}"
    return f"{dtype_name(a)} and {dtype_name(b)} differ, and nothing is promoted implicitly"


RuleName = Literal["torch", "jax", "numpy", "array_api", "strict"]

_RULES: dict[str, Callable[[torch.dtype], PromotionRule]] = {
    "torch": torch_rule,
    "jax": jax_rule,
    "numpy": numpy_rule,
    "array_api": array_api_rule,
    "strict": strict_rule,
}

#: The names of the rules, in the order of the documentation.
RULE_NAMES: tuple[RuleName, ...] = get_args(RuleName)


def promotion_rule(rule: RuleName | PromotionRule, default_dtype: torch.dtype | str | None = None) -> PromotionRule:
    """Returns the rule with a name.

    Args:
        rule: One of `RULE_NAMES`, or a rule.
        default_dtype: The default dtype for the rule, or its name. None: the current one.

    Raises:
        RuleDefinitionError: There is no rule with this name.
        DtypeError: The default dtype does not exist, or is none that `torch.set_default_dtype` takes.

    Example:
        >>> promotion_rule("torch").name
        'torch'
        >>> promotion_rule("troch")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.errors.RuleDefinitionError: no promotion rule is called 'troch'. Legal: torch, ... Closest: torch.
    """
    default = torch.get_default_dtype() if default_dtype is None else parse_dtype(default_dtype, "default_dtype")
    if family(default) is not Family.FLOAT:
        raise DtypeError(
            f"default_dtype is the dtype of Python floats, got {dtype_name(default)}. Legal: float16, bfloat16, "
            f"float32, float64."
        )
    if isinstance(rule, PromotionRule):
        return rule.under(default)
    if not isinstance(rule, str) or rule not in _RULES:
        close = did_you_mean(rule, _RULES) if isinstance(rule, str) else ""
        raise RuleDefinitionError(f"no promotion rule is called {rule!r}. Legal: {', '.join(_RULES)}.{close}")
    return _RULES[rule](default)
