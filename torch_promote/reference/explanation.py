"""Explains in words what the reference computes for a call of an op: a plan of autocast, an inference, a promotion.

The words of a promotion mirror the branches of torch_promote.reference.promotion, whose functions compute the dtypes in
them. torch_promote.checking.why writes the steps of whole expressions with these functions.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence

import torch

from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.autocast import AutocastPlan
from torch_promote.reference.dtypes import (
    Kind,
    dtype_name,
    is_complex,
    is_floating,
    is_integral,
    kind,
    to_real,
    typecode,
)
from torch_promote.reference.ops.dtype_rules import DTYPE_RULES
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.ops.infer import Inference
from torch_promote.reference.promotion import (
    Number,
    Operand,
    PromotionError,
    combine_categories,
    number_dtype,
    promote_types,
)
from torch_promote.reference.promotion_rules import PromotionRule

#: What a rule says, for those whose docstrings do not say it in a sentence about one call.
_RULES = {
    "same": "",
    "unary": "It keeps the dtype of its operand.",
    "unary_float": "Integers and bools become the default dtype, {default}.",
    "like": "It keeps the dtype of its operand.",
    "each": "Each result is that of the op on one element of each list.",
    "one_dtype": "It takes operands of one dtype, and keeps it.",
    "modulus": "The modulus of a complex number is real.",
    "softmax": "It keeps the dtype, unless half_to_float is set.",
    "written": "An op that writes to a tensor keeps the tensor's dtype.",
}


def listed(items: Sequence[str]) -> str:
    """Returns items as a list in a sentence."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def explain_plan(op: str, plan: AutocastPlan, overridden: bool, names: Mapping[str, str]) -> str:
    """Returns the step that says what autocast does with a call that has a policy; `names` spells tensors, by path."""
    policy = plan.policy.value if isinstance(plan.policy, CastPolicy) else f"to run in {_names([plan.policy])}"
    casts: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for cast in plan.all_casts():
        path = cast.argument
        casts.setdefault((cast.from_, cast.to), []).append(f"{path} ({names[path]})" if path in names else path)
    texts = [
        f"{listed(paths)} {'are' if paths[1:] else 'is'} cast from {dtype_name(from_)} to {dtype_name(to)}"
        for (from_, to), paths in casts.items()
    ]
    texts += [f"it is called with {key}={dtype_name(value)}" for key, value in plan.dtype_arguments.items()]
    if plan.error is not None:
        texts = ["it must not be called"]
    elif not texts and plan.policy is CastPolicy.keep:
        texts = ["it runs as it is, with autocast off"]
    elif not texts and plan.policy is CastPolicy.fp32_set_opt_dtype:
        texts = ["its dtype argument is given, or its first operand is not cast, so nothing changes"]
    what = "; ".join(texts or ["no operand needs a cast"])
    return f"Autocast has the policy {policy} for {op}{' (an override)' if overridden else ''}: {what}."


def explain_inference(
    op: str, inference: Inference, operands: Sequence[str], default_dtype: torch.dtype, dtype_given: bool = False
) -> str:
    """Returns the step for an op whose rule is not a promotion, in the words of the rule's docstring."""
    rule = re.split(r"\W", inference.rule)[0]
    function = DTYPE_RULES.get(rule) or ELEMENTWISE_RULES.get(rule)
    if dtype_given:
        reason = "Its dtype argument says so."
    elif rule in _RULES:
        reason = _RULES[rule].format(default=dtype_name(default_dtype))
    else:
        reason = "" if isinstance(function, functools.partial) else (function.__doc__ or "").partition("\n")[0]
    subject = f"{op} of {listed(operands)}" if operands else op
    return f"{subject} returns {_names(inference.dtypes)}. {reason}".rstrip()


def explain_promotion(
    op: str,
    operands: Sequence[tuple[str, Operand | Number]],  # with their names in the expression
    results: Sequence[torch.dtype | None],
    rule: PromotionRule,
    *,
    divides: bool = False,  # whether the op computes in floating point
    symbol: str = "",  # the operator of Python that calls the op, if one does
    refused: bool = False,  # whether PyTorch refuses the call
) -> Iterator[str]:
    """Yields the steps of an op that promotes its operands. Raises if the rule, or PyTorch, has no common dtype."""
    # Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    names, values = [name for name, _ in operands], [value for _, value in operands]
    called, default, by_state = symbol or op, rule.default_dtype, rule.name == "torch"
    for name, value in operands if len(operands) > 1 else ():
        yield _state_of(name, value, default) if by_state else _strength_of(name, value, rule)
    if by_state:
        computed = yield from _promotion_by_state(values, default)
        if divides and is_integral(computed, include_bool=True):
            integral, computed = dtype_name(computed), default
            becomes = f"integral dtypes become the default dtype, {dtype_name(default)}"
            yield f"{called} does not compute in {integral}: {becomes}."
    else:
        computed = yield from _promotion_by_rule(op, names, values, rule)
        floating = rule.common(values, op, floats=True) if divides else computed
        if floating is not computed:
            takes = f"{dtype_name(floating)} for {dtype_name(computed)}"
            yield f"{called} computes in floating point, and the rule takes {takes}."
            computed = floating
        cast = [name for name, value in operands if isinstance(value, Operand) and value.dtype is not computed]
        if cast:
            yield f"{listed(cast)} {'are' if cast[1:] else 'is'} cast to {dtype_name(computed)}."
    if refused:
        yield f"{called} would compute in {dtype_name(computed)}."
        return
    compares = tuple(results) == (torch.bool,) and computed is not torch.bool
    function = op.partition("::")[2].partition(".")[0]
    has_dimensions = any(isinstance(value, Operand) and value.shape for value in values)
    step = f"{called} computes in {dtype_name(computed)} and returns {_names(results)}."
    for name, value in operands:
        if not isinstance(value, Operand) or (not value.shape and has_dimensions):
            step += _overflow(name, value, computed, function, compares)
    yield step


def _names(dtypes: Sequence[torch.dtype | None]) -> str:
    return listed([dtype_name(dtype) for dtype in dtypes if dtype is not None]) or "no tensor"


# --- Promotion by a rule other than PyTorch's


def _strength_of(name: str, value: Operand | Number, rule: PromotionRule) -> str:
    if not isinstance(value, Operand):
        return f"{name} is a Python {type(value).__name__}: it is weak, so a tensor's dtype takes precedence."
    if value.shape:
        return f"{name} is a tensor of {dtype_name(value.dtype)}."
    how = "is weaker than a tensor with dimensions" if rule.zero_dim_is_weak else "counts like any other tensor"
    return f"{name} is a 0-dim tensor of {dtype_name(value.dtype)}, which {how}."


def _promotion_by_rule(
    op: str, names: Sequence[str], values: Sequence[Operand | Number], rule: PromotionRule
) -> Generator[str, None, torch.dtype]:
    """Yields the step that promotes operands by a rule. Returns their common dtype."""
    common = rule.common(values, op)
    tensors = [value for value in values if isinstance(value, Operand)]
    if len(values) == 1:
        return common
    if len(values) > 2 or not tensors:
        yield f"The rule {rule.name} has {dtype_name(common)} for {listed(names)}."
    elif len(tensors) == 1:
        number = next(type(value) for value in values if not isinstance(value, Operand))
        same = number is bool and tensors[0].dtype is torch.bool
        yield "Both are bool: nothing is promoted." if same else rule.words(number, tensors[0].dtype, common)
    elif tensors[0].dtype is tensors[1].dtype:
        yield f"Both are {dtype_name(common)}: nothing is promoted."
    elif rule.zero_dim_is_weak and bool(tensors[0].shape) is not bool(tensors[1].shape):
        strong, weak = sorted(tensors, key=lambda tensor: not tensor.shape)
        yield f"The rule has {_names([common])} for {_names([strong.dtype])} with a weaker {_names([weak.dtype])}."
    else:
        yield rule.words(tensors[0].dtype, tensors[1].dtype, common)
    return common


# --- Promotion by PyTorch's own rule, in which each operand has a state


def _state_of(name: str, value: Operand | Number, default_dtype: torch.dtype) -> str:
    """Source: aten/src/ATen/native/TypeProperties.cpp, update_result_type_state (v2.13)."""
    if isinstance(value, Operand):
        state = "tensor with dimensions: state dim" if value.shape else "0-dim tensor: state zero"
        return f"{name} is a {state}, {dtype_name(value.dtype)}."
    counts_as = dtype_name(number_dtype(value, default_dtype))
    if isinstance(value, float):
        counts_as = f"the default dtype, {counts_as}"
    elif isinstance(value, complex):
        counts_as = f"the complex dtype of the default dtype, {counts_as}"
    return f"{value} is a Python {type(value).__name__}: state wrapped. It counts as {counts_as}."


def _promotion_by_state(
    values: Sequence[Operand | Number], default_dtype: torch.dtype
) -> Generator[str, None, torch.dtype]:
    """Yields the steps that promote operands: within each state, then across states. Returns the common dtype."""
    by_state: dict[str, list[torch.dtype]] = {"dim": [], "zero": [], "wrapped": []}
    for value in values:
        if isinstance(value, Operand):
            by_state["dim" if value.shape else "zero"].append(value.dtype)
        else:
            by_state["wrapped"].append(number_dtype(value, default_dtype))
    all_ = "Both" if len(values) == 2 else "All"
    joined = {}
    for state, dtypes in by_state.items():
        if not dtypes:
            continue
        common = dtypes[0]
        if len(dtypes) == len(values) > 1 and set(dtypes) == {common}:
            yield f"{all_} are {dtype_name(common)} in state {state}: nothing is promoted."
        for number, dtype in enumerate(dtypes[1:], start=1):
            if dtype is common:
                continue
            promoted = promote_types(common, dtype)
            if len(dtypes) == len(values) and number == 1:
                start = f"{all_} are in state {state}, so the {'two' if len(values) == 2 else 'dtypes'} are promoted."
            else:
                start = f"In state {state}, {dtype_name(common)} and {dtype_name(dtype)} are promoted."
            yield f"{start} {_looked_up(common, dtype, promoted)}"
            common = promoted
        joined[state] = common
    # The weakest states are joined first.
    states = list(joined)
    lower = joined[states[-1]]
    for stronger, weaker in reversed(list(itertools.pairwise(states))):
        words, both = _combine(joined[stronger], lower)
        yield f"{stronger} {dtype_name(joined[stronger])} with {weaker} {dtype_name(lower)}: {words}"
        lower = both
    return lower


def _looked_up(a: torch.dtype, b: torch.dtype, common: torch.dtype) -> str:
    row, column = typecode(a), typecode(b)
    if row is None or column is None:
        return f"They give {dtype_name(common)}: an unsigned integer takes the floating dtype."
    return f"The table has {dtype_name(common)} for them (row {row}, column {column})."


def _combine(higher: torch.dtype, lower: torch.dtype) -> tuple[str, torch.dtype]:
    """The words for a call of `combine_categories`, and its result."""
    joined = combine_categories(higher, lower)
    strong, weak = dtype_name(higher), dtype_name(lower)
    if joined is None:
        raise PromotionError(f"{strong} and {weak} have no common dtype: bits promote only with themselves.")
    if higher is lower:
        return "they are the same.", joined
    if joined is higher:
        return (
            f"{weak} is not of a higher kind than {strong}, so {strong} stays: a weaker state does not widen.",
            joined,
        )
    kinds = f"{weak} is {kind(lower).name.lower()}, a higher kind than {kind(higher).name.lower()}"
    if not is_complex(lower):
        return f"{kinds}, so the two are promoted. {_looked_up(higher, lower, joined)}", joined
    if is_floating(higher):
        return f"{kinds}, but {strong} decides the precision: {dtype_name(joined)}.", joined
    return f"{kinds}, so it decides.", joined


# --- Values that may not fit the dtype that an op computes in

#: The dtypes whose kernels compute in float32, and may read a number or a 0-dim CPU tensor in float32, too.
_ROUNDED = (torch.float16, torch.bfloat16)
#: The ops that convert these to the dtype that they compute in, and return inf for inf.
_CONVERT = ("add", "sub", "rsub")
#: The largest value of a dtype, and the least number that rounds to infinity.
_LIMITS = {
    torch.float16: (65504.0, 65520.0),
    torch.bfloat16: (float(2**128 - 2**120), float(2**128 - 2**119)),
    torch.float32: (float(2**128 - 2**104), float(2**128 - 2**103)),
    torch.float64: (math.inf, math.inf),
}


def _overflow(name: str, value: Operand | Number, computed: torch.dtype, op: str, compares: bool) -> str:
    """What happens to a number that does not fit the dtype that an op computes in: "", or a text after a space."""
    # Source: aten/src/ATen/native/cpu/BinaryOpsKernel.cpp, binary_kernel_reduced_floating_vec_opmath_support (v2.13);
    # c10/util/TypeCast.h, convert (v2.13); aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_types (v2.13).
    target, real = dtype_name(computed), to_real(computed)
    if kind(computed) is Kind.INTEGRAL:
        return _wrapping(name, value, computed)
    if real not in _LIMITS or real is torch.float64:
        return ""
    largest, to_infinity = _LIMITS[real]
    limit = "65504" if real is torch.float16 else f"{largest:g}"
    if isinstance(value, Operand):
        integral = kind(value.dtype) is Kind.INTEGRAL
        reach = torch.iinfo(value.dtype).max if integral else _LIMITS.get(to_real(value.dtype), (0.0,))[0]
        if compares or reach < 2 * to_infinity:  # float32's values exceed bfloat16's by less than 1%
            return ""
        becomes = "becomes" if op in _CONVERT else "may become"
        return f" A value of {name} beyond {limit} does not fit {target}, and {becomes} inf."
    reach = max((abs(part) for part in (value.real, value.imag) if math.isfinite(part)), default=0.0)
    if reach < to_infinity:
        return ""
    may_fit = computed in _ROUNDED and op not in _CONVERT and reach < _LIMITS[torch.float32][1]
    becomes = "is compared as" if compares else "may become" if may_fit else "becomes"
    return f" {name} does not fit {target}, whose largest value is {limit}, and {becomes} inf."


def _wrapping(name: str, value: Operand | Number, computed: torch.dtype) -> str:
    """What happens to a value that does not fit an integral dtype."""
    info = torch.iinfo(computed)
    if isinstance(value, Operand):
        own = torch.iinfo(value.dtype) if kind(value.dtype) is Kind.INTEGRAL else info
        fits = info.min <= own.min and own.max <= info.max
        return "" if fits else f" A value of {name} that does not fit {dtype_name(computed)} wraps around."
    if not isinstance(value, int) or info.min <= value <= info.max:
        return ""
    wrapped = (value - info.min) % (info.max - info.min + 1) + info.min
    return f" {name} does not fit {dtype_name(computed)} and wraps to {wrapped}."
