"""The ops that promote their operands, and the arguments that take part, derived from the reference's op rules.

The rules name functional overloads. An overload that writes (in place, out=) has the arguments of a functional one and
is found by its schema. The lists below contain only what the rules do not say.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_promote.reference.ops.infer import EACH, Entry, rule_table

__all__ = ["BOOLEAN", "COMMON", "FLOATS", "OPAQUE", "PromotingOp", "promoting_ops"]

# What an op computes in; csrc/promotion/ops.h, Computes.
COMMON, FLOATS, BOOLEAN, OPAQUE = range(4)

#: The rules of promoting ops, and what an op with such a rule computes in.
_COMPUTES = {
    "binary": COMMON,
    "ternary": COMMON,
    "with_numbers": COMMON,
    "power_of_number": COMMON,
    "where": COMMON,
    "promoted": COMMON,
    "binary_float": FLOATS,
    "unary_float": FLOATS,
    "like_float": FLOATS,
    "angle": FLOATS,
    "quotient": FLOATS,
    "comparison": BOOLEAN,
}

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

#: Ops that no rule acts on, nor on the ops that they call: their operands need not have one dtype, or they are
#: composites that mix tensors of their own with their arguments.
_OPAQUE = (
    *("float_power", "ldexp"),  # a conversion to float64; a mantissa and an exponent
    *("corrcoef", "cov", "gradient", "mvlgamma", "nanmean", "nanquantile", "quantile", "special_multigammaln"),
    *("cumulative_trapezoid", "trapezoid", "trapz"),
    *("isclose", "logsumexp", "special_logsumexp", "native_dropout_backward", "special_ndtr", "square"),
    *("_linalg_det", "_linalg_slogdet", "det", "linalg_det", "linalg_slogdet", "logdet", "slogdet"),
    *("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout"),
    *("linalg_matrix_sqrth", "linalg_polar"),
    *("linalg_matrix_exp", "matrix_exp", "linalg_matrix_rank", "linalg_pinv", "pinverse", "linalg_vector_norm"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
    *("cosine_embedding_loss", "margin_ranking_loss", "poisson_nll_loss", "triplet_margin_loss"),
    "pairwise_distance",
)

#: Ops that raise for some dtypes of operands before they promote them. Under PyTorch's own rule they get such operands
#: uncast, so that they raise as ever.
REFUSES_NOTHING, REFUSES_BOOL, REFUSES_INTEGRAL, REFUSES_COMPLEX, REFUSES_MIXED = range(5)
_REFUSES = {
    "_cdist_forward": REFUSES_MIXED,
    "addr": REFUSES_MIXED,
    "addcdiv": REFUSES_INTEGRAL,
    "clamp": REFUSES_COMPLEX,
    "heaviside": REFUSES_MIXED,
    "lerp": REFUSES_MIXED,
    "rsub": REFUSES_BOOL,
    "selu": REFUSES_MIXED,
    "special_round": REFUSES_MIXED,
    "sub": REFUSES_BOOL,
    "subtract": REFUSES_BOOL,
}

#: In-place operators, and the op that computes the same; for others the name without its last underscore is that op.
_OPERATORS = {"__ilshift__": "__lshift__", "__irshift__": "__rshift__"}


class PromotingOp(NamedTuple):
    """An overload that promotes.

    Attributes:
        name: The overload, such as `aten::add.Tensor`.
        functional: For an op that writes: the overload that computes the same without writing. Otherwise "".
        participants: The places of the arguments that take part.
        computes: COMMON, FLOATS, BOOLEAN or OPAQUE.
        rounding_mode: The place of the argument that makes a quotient whole; -1 if there is none.
        each: Whether its lists go in step: each element is a call of its own.
        matmul: Whether it is a matrix product.
        refuses: The operands for which it raises before it promotes them: a REFUSES_ constant.
    """

    name: str
    functional: str
    participants: tuple[int, ...]
    computes: int
    rounding_mode: int = -1
    each: bool = False
    matmul: bool = False
    refuses: int = REFUSES_NOTHING


@functools.cache
def promoting_ops() -> tuple[PromotingOp, ...]:
    """Returns the promoting ops that the running PyTorch has.

    Example:
        >>> ops = {op.name: op for op in promoting_ops()}
        >>> ops["aten::add_.Tensor"].functional, ops["aten::where.self"].participants
        ('aten::add.Tensor', (1, 2))
    """
    return tuple(_find(_schemas()))


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
            yield made
            yield from _writers(made, schema, schemas)
    for op in _PRODUCTS:
        for name, schema in schemas.get(f"aten::{op}", {}).items():
            if not any(_is_written(argument) for argument in schema.arguments):
                made = PromotingOp(name, "", _tensors(schema), COMMON, matmul=True)
                yield made
                yield from _writers(made, schema, schemas)
    for op in _OPAQUE:
        for base in (f"aten::{op}", f"aten::{op}_"):
            for name in schemas.get(base, {}):
                yield PromotingOp(name, "", (), OPAQUE)


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
    if len(places) < 2 and _COMPUTES[term.rule] is not FLOATS and not _is_list(schema.arguments[places[0]]):
        return None  # a single operand keeps its dtype
    mode = names.index("rounding_mode") if "rounding_mode" in names else -1
    refuses = _REFUSES.get(inner.partition(".")[0], REFUSES_NOTHING)
    return PromotingOp(entry.op, "", places, _COMPUTES[term.rule], mode, each, refuses=refuses)


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
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    for op in (schema.name, f"{schema.name}_", *operators):
        for name, other in schemas.get(op, {}).items():
            arguments = [(a.name, str(a.type)) for a in other.arguments if not (_is_written(a) and a.is_out)]
            if any(_is_written(a) for a in other.arguments) and arguments == wanted:
                yield made._replace(name=name, functional=made.name)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def _is_list(argument: Any) -> bool:
    return str(argument.type) == "List[Tensor]"


def _tensors(schema: Any) -> tuple[int, ...]:
    return tuple(
        place
        for place, argument in enumerate(schema.arguments)
        if (_is_tensor(argument) or _is_list(argument)) and not argument.is_out
    )
