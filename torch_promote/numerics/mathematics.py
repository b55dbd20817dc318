"""For which numbers an op is defined, what made it inf or NaN, and what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_promote.observe.call import Call
from torch_promote.observe.ops import unnoticed
from torch_promote.reference.dtypes import dtype_name

#: The numbers for which an op is defined: from, to.
_DOMAINS = {
    **dict.fromkeys((f"aten::{name}" for name in ("sqrt", "rsqrt", "log", "log2", "log10")), (0.0, math.inf)),
    **dict.fromkeys((f"aten::{name}" for name in ("acos", "asin", "atanh")), (-1.0, 1.0)),
    "aten::log1p": (-1.0, math.inf),
    "aten::acosh": (1.0, math.inf),
}
#: Where the derivative of an op is infinite, by the name of its autograd node.
_POLES = {
    **dict.fromkeys(("Sqrt", "Rsqrt", "Log", "Log2", "Log10", "Reciprocal"), "0"),
    **dict.fromkeys(("Acos", "Asin", "Atanh"), "-1 and 1"),
    "Acosh": "1",
    "Pow": "0, with an exponent below 1",
}
#: Decompositions whose vectors have no derivative where values are equal, by the name of the autograd node.
_OF_EQUAL_VALUES = {"LinalgSvd": "singular vectors", "LinalgEigh": "eigenvectors"}
#: What does in one what two ops do, without rounding in between: by the ops, and one of those in between; "": whatever
#: is in between; "=": nothing is.
_IDIOMS = {
    ("softmax", "", "log"): "F.log_softmax",
    ("sigmoid", "", "log"): "F.logsigmoid (or F.binary_cross_entropy_with_logits)",
    ("sigmoid", "", "binary_cross_entropy"): "F.binary_cross_entropy_with_logits",
    ("exp", "=", "log"): "x, in place of log(exp(x)),",
    ("exp", "sum", "log"): "torch.logsumexp",
    ("exp", "sub", "log"): "torch.log(torch.expm1(x))",
    ("exp", "rsub", "log"): "torch.log(-torch.expm1(x))",
    ("exp", "sum", "div"): "torch.softmax",
}


def tell_idiom(maker: Call, call: Call, between: Iterable[Call] = ()) -> list[str]:
    """Names what does the work of two calls, and of those in between."""
    names = [one.op.removeprefix("aten::") for one in (maker, *between, call)]
    for via in ("", *(names[1:-1] or "=")):
        if one := _IDIOMS.get((names[0], via, names[-1])):
            return [f"{one} computes the same without the rounding in between."]
    return []


def tell_outside(low: torch.Tensor, exact: torch.Tensor, op: str) -> str:
    """Names the values for which `op` is not defined, if it is for the same in float32; "" if there are none."""
    lowest, highest = _DOMAINS.get(op, (-math.inf, math.inf))
    outside = ((low < lowest) | (low > highest)) & (exact >= lowest) & (exact <= highest)
    if not bool(outside.any()):
        return ""
    low, exact, of = low[outside], exact[outside], f"{int(outside.sum()):,} of {low.numel():,}"
    return (
        f"{of} values are outside of {lowest:g} to {highest:g} in {dtype_name(low.dtype)}: from {low.min():.9g} to "
        f"{low.max():.9g}; in float32, they are from {exact.min():.9g} to {exact.max():.9g}."
    )


def explain(op: str, arguments: Mapping[str, Any], results: Sequence[torch.Tensor], node: str) -> list[str]:
    """Says what made a call inf or NaN that is so in float32 as well, and what to write instead, if that is known."""
    # `arguments` are those of the schema, by name; `node` is the name of the autograd node in a backward, or "".
    try:
        with unnoticed():
            return list(_explain(op, arguments, results, node))
    except Exception:  # another overload; a dtype or a device that lacks an op
        return []


def _explain(op: str, arguments: Mapping[str, Any], results: Sequence[torch.Tensor], node: str) -> Iterator[str]:
    tensors = [one for one in arguments.values() if isinstance(one, torch.Tensor)]
    name = op.removeprefix("aten::").removesuffix("_")
    of = node.partition("Backward")[0].removesuffix("_")
    pole = _POLES.get(of)
    if pole and any(bool(((one == 0) | one.isinf()).any()) for one in tensors):
        same = f"aten::{of.lower()}"
        keep = _inside(same) if _DOMAINS.get(same, (0,))[0] else "add a small number to it"
        yield (
            f"The derivative of {of.lower()} is infinite at {pole}. Keep its argument x away from there: "
            f"{keep}, or replace it there before the op. torch.where on the result does not help: its backward "
            "multiplies the infinite derivative by 0."
        )
    elif of == "Xlogy":
        yield (
            "The derivative of kl_div with respect to its target is not finite where the target is 0. Pass its "
            "logarithm, of log_softmax: F.kl_div(..., log_target=True)."
        )
    elif of in _OF_EQUAL_VALUES:
        yield (
            f"The derivative of {_OF_EQUAL_VALUES[of]} divides by differences of the values. If some are equal, "
            "separate them by a small random matrix that is added before, or detach the vectors."
        )
    elif not node and any(not one.numel() for one in tensors if one.is_floating_point()):
        yield "An argument has no elements, so the mean of them is 0 / 0. Compute it only if there are some."
    elif name in _CAUSES:
        yield from _CAUSES[name](arguments, results)
    elif op in _DOMAINS:
        (lowest, highest), x = _DOMAINS[op], arguments["self"]
        border = int((((x == lowest) | (x == highest)) & ~results[0].isfinite()).sum())
        if outside := int(((x < lowest) | (x > highest)).sum()):
            where = f"outside of {lowest:g} to {highest:g}"
            yield f"{outside:,} of {x.numel():,} values are {where}: clamp them, {_inside(op)}."
        if border:
            where = f"on the border of {lowest:g} to {highest:g}"
            add = ", or add a small number" * (lowest == 0)
            yield f"{border:,} of {x.numel():,} values are {where}: clamp them, {_inside(op)}{add}."


def _inside(op: str) -> str:
    """What keeps the argument of an op where the op and its derivative are finite."""
    lowest, highest = _DOMAINS[op]
    low = f"{lowest:g} + eps" if lowest else "eps"
    clamp = f"min={low}" if highest == math.inf else f"{low}, {highest:g} - eps"
    return f"x.clamp({clamp}) with eps = torch.finfo(x.dtype).eps"


def _masked_rows(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    rows = (arguments["self"] == -math.inf).all(arguments["dim"])
    if count := int(rows.sum()):
        yield (
            f"{count:,} of {rows.numel():,} rows are -inf throughout: a mask leaves nothing of them. Leave one element "
            "of such a row unmasked, mask with torch.finfo(dtype).min in place of -inf, or replace the NaNs of the "
            "result with torch.nan_to_num."
        )


def _ignored(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    target, ignored, weight = arguments["target"], arguments["ignore_index"], arguments["weight"]
    rest = target[target != ignored]
    if target.numel() and not rest.numel():
        yield (
            f"All {target.numel():,} targets are {ignored}, which is ignore_index, so the mean of the others is 0 / 0. "
            'Skip such a batch, or divide the loss with reduction="sum" by max(1, number of targets).'
        )
    elif weight is not None and not bool(weight[rest].any()):
        yield f"The weights of all {rest.numel():,} targets are 0, so the mean is 0 / 0. Skip such a batch."


def _one_value(arguments: Mapping[str, Any], results: Sequence[torch.Tensor]) -> Iterator[str]:
    if arguments["self"].numel() == max(1, results[0].numel()):
        yield "It is taken of one value, and divides by the number of values less 1. Pass correction=0, or skip it."


def _no_alignment(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    inputs, lengths = (torch.as_tensor(arguments[f"{name}_lengths"]).flatten().tolist() for name in ("input", "target"))
    targets = arguments["targets"].cpu()
    rows = targets.split(lengths) if targets.dim() == 1 else [row[:n] for row, n in zip(targets, lengths, strict=True)]
    blanks = (int((row[1:] == row[:-1]).sum()) for row in rows)
    if count := sum(n + more > most for n, more, most in zip(lengths, blanks, inputs, strict=True)):
        yield (
            f"{count:,} of {len(rows):,} targets, with a blank between equal labels, are longer than their inputs, so "
            "that their losses are inf. zero_infinity=True makes such losses and their gradients 0."
        )


def _zeros(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    above, below = arguments["self"], torch.as_tensor(arguments["other"])
    places, both = int((below == 0).sum()), int(((above == 0) & (below == 0)).sum())
    if places:
        yield (
            f"The divisor is 0 in {places:,} of {below.numel():,} places"
            + (f", and 0 is divided by 0 in {both:,}." if both else ".")
            + " Keep the divisor away from 0: clamp(min=...)."
        )


def _zero_norms(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    norms = torch.norm_except_dim(arguments["v"], 2, arguments["dim"])
    if count := int((norms == 0).sum()):
        yield f"It divides v by its norm, which is 0 in {count:,} of {norms.numel():,} places: initialize v otherwise."


def _zero_times_infinity(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    one, other = arguments["self"], torch.as_tensor(arguments["other"])
    if count := int((((one == 0) & other.isinf()) | (one.isinf() & (other == 0))).sum()):
        yield f"It multiplies 0 by inf in {count:,} places. Mask with masked_fill or torch.where in place of a product."


def _negative(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    base, exponent = arguments["self"], torch.as_tensor(arguments["exponent"])
    if count := int(((base < 0) & (exponent != exponent.round())).sum()):
        yield f"{count:,} numbers below 0 have no power with an exponent that is no integer: clamp them, or take abs()."
    if count := int(((base == 0) & (exponent < 0)).sum()):
        yield f"{count:,} numbers are 0, and the exponent is below 0. Replace them before, or the inf after."


def _difference(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    one, other = arguments["self"], torch.as_tensor(arguments["other"])
    if count := int((one.isinf() & (one == other)).sum()):
        yield f"It subtracts inf from inf of the same sign in {count:,} places."


def _exponential(arguments: Mapping[str, Any], _: Any) -> Iterator[str]:
    highest = math.log(torch.finfo(torch.float32).max)
    yield (
        f"exp is inf above {highest:.4g} in float32. If its results are divided by their sum, subtract the largest "
        "argument before, as softmax does; otherwise bound the argument: clamp(max=...)."
    )


#: What says why the result of an op is not finite.
_CAUSES: dict[str, Callable[[Mapping[str, Any], Sequence[torch.Tensor]], Iterator[str]]] = {
    **dict.fromkeys(("softmax", "log_softmax"), _masked_rows),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), _ignored),
    **dict.fromkeys(("std", "var"), _one_value),
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), _zero_norms),
    "ctc_loss": _no_alignment,
    "div": _zeros,
    "reciprocal": lambda arguments, results: _zeros({"self": torch.ones(()), "other": arguments["self"]}, results),
    "mul": _zero_times_infinity,
    "pow": _negative,
    "sub": _difference,
    "exp": _exponential,
}
