"""JAX's rule: a lattice, in which Python numbers have nodes of their own below the dtypes of their kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping

import torch

from torch_promote.reference.dtypes import (
    ALL_DTYPES,
    Family,
    default_complex,
    dtype_name,
    family,
    is_complex,
    is_floating,
)
from torch_promote.reference.promotion_rules.rule import PromotionRule, words_of_table

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

_NUMBERS = {bool: "bool", int: "int*", float: "float*", complex: "complex*"}

_STANDS_FOR = {"int*": "PyTorch's int", "float*": "the default dtype", "complex*": "the default complex dtype"}

#: The dtype of an integer in true division: a floating dtype of similar width, independent of the default dtype.
_INEXACT = {
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
    """Returns JAX's rule with 64-bit dtypes enabled and PyTorch's default dtype for Python floats.

    A join of float* stands for the default dtype, one of complex* for its complex dtype.

    Source: jax/_src/dtypes.py, _type_promotion_lattice (v0.10).
    """
    weak = {"int*": torch.int64, "float*": default_dtype, "complex*": default_complex(default_dtype)}

    def dtype_of(node: str | None) -> torch.dtype | None:
        return None if node is None else weak.get(node) or _DTYPES[node]

    names = {name: dtype for name, dtype in _DTYPES.items() if name in LATTICE}
    return PromotionRule(
        name="jax",
        tensors={(a, b): dtype_of(_JOINS[x, y]) for x, a in names.items() for y, b in names.items()},
        numbers={
            (number, dtype): dtype_of(_JOINS[node, name])
            for number, node in _NUMBERS.items()
            for name, dtype in names.items()
        },
        floats={dtype: _INEXACT.get(name, dtype if _is_inexact(dtype) else None) for name, dtype in names.items()},
        # uint64 and int64 join in float*, which joins with float16 in float16. Folding pairwise would give float32.
        associative=False,
        default_dtype=default_dtype,
        reason=_reason,
        words=_words,
        many=lambda dtypes: dtype_of(_of_many(dtypes)),
        build=jax_rule,
    )


_DTYPES = {dtype_name(dtype): dtype for dtype in ALL_DTYPES}


def _is_inexact(dtype: torch.dtype) -> bool:
    return is_floating(dtype) or is_complex(dtype)


def _of_many(dtypes: Iterable[torch.dtype]) -> str | None:
    names = [dtype_name(dtype) for dtype in dtypes]
    return _join(names) if LATTICE.keys() >= set(names) else None


def _words(a: torch.dtype | type, b: torch.dtype, common: torch.dtype) -> str:
    names = _NUMBERS[a] if isinstance(a, type) else dtype_name(a), dtype_name(b)
    node = _JOINS.get(names)
    if node is None:  # a dtype that JAX does not have, with itself or a number
        return words_of_table("The rule", a, b, common)
    if node in names:
        told = f"In JAX's lattice, {names[1 - names.index(node)]} is below {node}, which stays"
    else:
        told = f"In JAX's lattice, {node} is the least node above {names[0]} and {names[1]}"
    return f"{told} and stands for {_STANDS_FOR[node]}, {dtype_name(common)}." if node in _STANDS_FOR else f"{told}."


def _reason(a: torch.dtype | type, b: torch.dtype) -> str:
    names = [f"a Python {a.__name__}" if isinstance(a, type) else dtype_name(a), dtype_name(b)]
    for name in names:
        if not name.startswith("a ") and name not in LATTICE:
            return f"JAX has no dtype {name}"
    return f"no node of JAX's lattice is above both {names[0]} and {names[1]}"
