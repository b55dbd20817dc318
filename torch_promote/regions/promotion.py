"""`promotion`: a promotion rule of your choice, on the dispatch key of `my_autocast`.

The rules are data (torch_promote.reference.promotion_rules), loaded when the first region is made.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_promote.errors import (
    OptionError,
    PromotionLintError,
    PromotionWarning,
    RuleDefinitionError,
    check_flag,
    did_you_mean,
    explains_arguments,
    shown,
)
from torch_promote.extension import RegionSpec
from torch_promote.regions.autocast import Region

if TYPE_CHECKING:
    from torch_promote.reference.promotion_rules import PromotionRule, RuleName


class PromotionKind(enum.StrEnum):
    """A kind of silent promotion.

    The lint reports a call once for each kind that you ask for and that describes it. `ANY` includes all kinds; an
    event has the kind `ANY` if no other kind describes the call.

    Example:
        >>> PromotionKind("up to float64") is PromotionKind.UP_TO_FLOAT64
        True
    """

    ZERO_DIM_PRECISION_LOSS = "0-dim precision loss"
    INT_OVERFLOW = "int overflow by wrapping scalar"
    FLOAT_OVERFLOW = "number overflows to inf"
    INT_TO_LOW_PRECISION = "int to low-precision float"
    UP_TO_FLOAT64 = "up to float64"
    ANY = "any"


#: A kind as an argument: itself, its value or its name.
KindLike = (
    PromotionKind
    | Literal["0-dim precision loss", "int overflow by wrapping scalar", "number overflows to inf"]
    | Literal["int to low-precision float", "up to float64", "any"]
    | Literal["zero_dim_precision_loss", "int_overflow", "float_overflow", "int_to_low_precision", "up_to_float64"]
)

#: In the order of their bits; csrc/promotion/rule.h has those of the two overflows.
_KINDS = tuple(PromotionKind)
_ALL = (1 << len(_KINDS)) - 1
_BY_NAME = {kind.name.lower(): kind for kind in _KINDS} | {kind.value: kind for kind in _KINDS}

_LINE_OF_TRACE = re.compile(r'File "([^"]+)", line (\d+)')

#: Frames of files in these folders do not belong to the caller.
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

WARN, RAISE, CALL = 1, 2, 3


@dataclass(frozen=True, slots=True)
class PromotionEvent:
    """A silent promotion that the lint found.

    Attributes:
        op: The op, such as `aten::add.Tensor`.
        operands: The operands in words, such as `float16[3]` or `256 (a Python int)`.
        result: The dtype that the op computes in.
        kind: The kind of promotion.
        rule: The name of the promotion rule in force.
        filename: The file of the line of Python that called the op; "" if no Python did.
        lineno: Its number in the file, 0 if no Python did.

    Example:
        >>> import torch
        >>> kind = PromotionKind.INT_TO_LOW_PRECISION
        >>> print(PromotionEvent("mul", ("int32[3]", "bfloat16[3]"), torch.bfloat16, kind, "torch", "a.py", 1))
        a.py:1: mul of int32[3] and bfloat16[3] computes in bfloat16 (int to low-precision float)
    """

    op: str
    operands: tuple[str, ...]
    result: torch.dtype
    kind: PromotionKind
    rule: str
    filename: str
    lineno: int

    def __str__(self) -> str:
        result = str(self.result).removeprefix("torch.")
        where = f"{self.filename}:{self.lineno}: " if self.filename else ""
        return f"{where}{self.op} of {' and '.join(self.operands)} computes in {result} ({self.kind})"


def kinds_of(kinds: object) -> int:
    """Returns the kinds to look for, given as for `promotion`, as bits."""
    given = [kinds] if isinstance(kinds, str) or not isinstance(kinds, Iterable) else list(kinds)
    legal = ", ".join(repr(kind.value) for kind in _KINDS)
    if not given:
        raise OptionError(f"kinds names no kind of promotion. Legal: {legal}. Leave it out to look for all.")
    bits = 0
    for name in given:
        kind = _BY_NAME.get(name) if isinstance(name, str) else None
        if kind is None:
            close = did_you_mean(name, _BY_NAME) if isinstance(name, str) else ""
            raise OptionError(f"there is no kind of promotion {name!r}. Legal: {legal}, one or several.{close}")
        bits |= _ALL if kind is PromotionKind.ANY else 1 << _KINDS.index(kind)
    return bits


class Lint:
    """The lint of one `promotion` object."""

    __slots__ = ("__weakref__", "handler", "seen")

    def __init__(self, handler: Callable[[PromotionEvent], object] | None) -> None:
        self.handler: Callable[[PromotionEvent], object] | None = handler  # what the region was given to call
        # The lines of Python, and the kind of promotion, that were reported.
        self.seen: set[tuple[str, int, PromotionKind]] = set()


#: An operand: its dtype, its sizes, the type of Python number that it is (-1 for a tensor), and the number's value.
_Operand = tuple[torch.dtype, tuple[int, ...], int, int | float | complex | None]

#: The lint of each `promotion` object that has one, by the object's address; the extension passes the address back.
lints: weakref.WeakValueDictionary[int, Lint] = weakref.WeakValueDictionary()

#: The lint of regions without an object, which compiled functions open.
_without_object = Lint(None)


def report(number: int, region: int, op: str, operands: Sequence[_Operand], computed: torch.dtype) -> None:
    """Reports a call to the `promotion` object at an address: one event for each kind that describes the call."""
    from torch_promote.regions.promotion_tables import describe_operand, registered

    rule, _, wanted, mode = registered(number)
    asked = [kind for bit, kind in enumerate(_KINDS) if wanted >> bit & 1]
    kinds = [kind for kind in asked if any(_is_of(kind, operand, computed) for operand in operands)]
    if len(kinds) > 1:  # each other kind is one of ANY's
        kinds = [kind for kind in kinds if kind is not PromotionKind.ANY]
    if not kinds:
        return
    lint = lints.get(region, _without_object)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    filename, lineno = _traced_line() or ((frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0))
    words = tuple(map(describe_operand, operands))
    found = [PromotionEvent(op, words, computed, kind, rule.name, filename, lineno) for kind in kinds]
    if mode == RAISE:
        text = str(found[0]).replace(f"({found[0].kind})", f"({', '.join(kinds)})")
        raise PromotionLintError(f"{text}. Write the cast that you mean, or change `kinds`.")
    for one in found:
        line = filename, lineno, one.kind
        if line in lint.seen:
            continue
        lint.seen.add(line)
        if mode == WARN:
            _warn(one, frame)
        elif lint.handler is not None:
            try:
                lint.handler(one)
            except TypeError as error:  # PyTorch swallows a TypeError raised inside `x + y`
                raise PromotionLintError(f"on_promotion={lint.handler!r} raised TypeError: {error}") from error


def _is_of(kind: PromotionKind, operand: _Operand, computed: torch.dtype) -> bool:
    dtype, sizes, number, value = operand
    is_integral = not (computed.is_floating_point or computed.is_complex)
    if kind is PromotionKind.INT_OVERFLOW:
        if not isinstance(value, int) or not is_integral or computed is torch.bool:
            return False
        return not torch.iinfo(computed).min <= value <= torch.iinfo(computed).max
    if kind is PromotionKind.FLOAT_OVERFLOW:
        return value is not None and not is_integral and _becomes_infinite(value, computed)
    if number >= 0 or dtype is computed:
        return False
    if kind is PromotionKind.ZERO_DIM_PRECISION_LOSS:
        return not sizes and _loses(dtype, computed)
    if kind is PromotionKind.INT_TO_LOW_PRECISION:
        is_low = computed.to_real() in (torch.float16, torch.bfloat16)
        return is_low and not (dtype.is_floating_point or dtype.is_complex) and _loses(dtype, computed)
    return kind is PromotionKind.ANY or computed.to_real() is torch.float64


#: The binary digits of dtypes for whole numbers, and the largest value. The lint knows no others.
_PRECISION = {
    torch.bool: (1, 1.0),
    **{
        getattr(torch, f"{sign}int{bits}"): (bits - (not sign), 2.0 ** (bits - (not sign)))
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{
        dtype: (1 - math.frexp(torch.finfo(dtype).eps)[1] + 1, torch.finfo(dtype).max)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    },
}


def _loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a dtype has values that another cannot represent."""
    if source.to_real() not in _PRECISION or target.to_real() not in _PRECISION:
        return False
    digits, most = _PRECISION[source.to_real()]
    target_digits, target_most = _PRECISION[target.to_real()]
    becomes_unsigned = source.is_signed and not target.is_signed
    return digits > target_digits or becomes_unsigned or (source.to_real().is_floating_point and most > target_most)


def _becomes_infinite(value: complex, dtype: torch.dtype) -> bool:
    """Whether a finite Python number becomes infinity in a floating dtype: from half a unit above its maximum on."""
    real = dtype.to_real()
    if real not in _PRECISION:
        return False
    most, eps = torch.finfo(real).max, torch.finfo(real).eps
    limit = most + most / (2 - eps) * eps / 2
    return any(math.isfinite(part) and abs(part) >= limit for part in (float(value.real), float(value.imag)))


def _warn(event: PromotionEvent, frame: FrameType | None) -> None:
    registry = None if frame is None else frame.f_globals.setdefault("__warningregistry__", {})
    module = None if frame is None else frame.f_globals.get("__name__")
    text = str(event).removeprefix(f"{event.filename}:{event.lineno}: ")
    warnings.warn_explicit(text, PromotionWarning, event.filename or "<no Python>", event.lineno, module, registry)


def _traced_line() -> tuple[str, int] | None:
    """Returns the line of the function that torch.compile is compiling; None outside a compilation."""
    # While Dynamo traces, its tracing context has the line; when the graph is traced again, the graph's nodes have it.
    if torch._guards.TracingContext.try_get() is None:
        return None
    stack = torch._guards.TracingContext.extract_stack()
    if stack:
        return stack[-1].filename, stack[-1].lineno or 0
    lines = _LINE_OF_TRACE.findall(torch.fx.traceback.get_current_meta().get("stack_trace") or "")
    return (lines[-1][0], int(lines[-1][1])) if lines else None


_CALL = "a callable"
_MODES = {"warn": WARN, "raise": RAISE, _CALL: CALL}


class promotion(Region):  # noqa: N801 (a context manager, as my_autocast)
    """Makes ops promote their operands by a rule of your choice.

    In the region, an op on operands of several dtypes computes in the common dtype that the rule gives them, as if you
    had cast the operands by hand; gradients come back in the operands' own dtypes. You can nest regions in each other
    and in `my_autocast`, in either order: the innermost rule applies. Autocast acts first, and the rule on the result.

    A rule acts on the ops that are called in the region: elementwise ops of two and three operands, comparisons,
    `where`, `cat` and `stack`, their in-place, out= and foreach versions, and the dtype that floating-point ops compute
    in for integers. It does not act inside these ops, nor in a backward, nor where PyTorch itself mixes dtypes.

    Use it as a context manager or as a decorator, as `my_autocast`.

    Args:
        rule: "torch" (what PyTorch does), "jax", "numpy", "array_api", "strict", or a rule of your own.
        on_promotion: What to do where an operand is promoted silently: "warn", "raise", or a callable that gets a
            `PromotionEvent`. Each kind is reported once for each line of Python and `promotion` object; "raise" raises
            each time.
        matmul: Whether the rule applies to matrix products too, which PyTorch does not promote.
        kinds: The kinds of promotion that `on_promotion` applies to: one or several of "0-dim precision loss",
            "int overflow by wrapping scalar", "number overflows to inf", "int to low-precision float",
            "up to float64" and "any" (each a `PromotionKind`). None: all.

    Raises:
        RuleDefinitionError: The rule does not exist. It is a ValueError.
        OptionError: The kind does not exist, or on_promotion is not one of the above. It is a ValueError.

    Example:
        >>> half, brain = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)
        >>> ints = torch.ones(3, dtype=torch.int64)
        >>> with promotion("jax"):
        ...     (half + brain).dtype, (half + ints).dtype
        (torch.float32, torch.float16)
        >>> events = []
        >>> with promotion("torch", on_promotion=events.append, kinds="int to low-precision float"):
        ...     y = half + ints
        >>> events[0].op, events[0].result
        ('aten::add.Tensor', torch.float16)
    """

    __slots__ = ("_arguments", "_lint")

    @explains_arguments
    def __init__(
        self,
        rule: RuleName | PromotionRule,
        on_promotion: Literal["warn", "raise"] | Callable[[PromotionEvent], object] | None = None,
        *,
        matmul: bool = False,
        kinds: KindLike | Iterable[KindLike] | None = None,
    ) -> None:
        if kinds is not None and not isinstance(kinds, str):
            kinds = tuple(kinds) if isinstance(kinds, Iterable) else kinds
        handler = on_promotion if callable(on_promotion) else None
        if handler is not None and torch.compiler.is_dynamo_compiling():  # pragma: no cover: as below
            raise OptionError(
                "in a compiled function, on_promotion is 'warn', 'raise' or None, since its ops are looked at while "
                "it is compiled, and not afterwards. Open the region outside of the function, or do not compile it."
            )
        if handler is not None:
            try:
                inspect.signature(handler).bind(None)
            except TypeError as error:
                raise OptionError(
                    f"on_promotion={handler!r} is called with one PromotionEvent, and does not take one argument: "
                    f"{error}. Legal: a callable such as `events.append` or `lambda event: print(event)`."
                ) from None
            except ValueError:
                pass  # a builtin without a signature
        mode = on_promotion if handler is None else _CALL
        self._packed = RegionSpec(policy_change=_change_of(rule, mode, matmul, kinds)).pack()
        self._arguments = (rule, on_promotion, matmul, kinds)
        self._lint = None
        if on_promotion is not None and not torch.compiler.is_dynamo_compiling():
            self._lint = Lint(handler)
            lints[id(self)] = self._lint

    def __reduce__(self) -> tuple[Any, ...]:
        rule, on_promotion, matmul, kinds = self._arguments
        return functools.partial(promotion, matmul=matmul, kinds=kinds), (rule, on_promotion)

    def __repr__(self) -> str:
        rule, on_promotion, matmul, kinds = self._arguments
        parts = [repr(rule) if isinstance(rule, str) else f"<rule {rule.name!r}>"]
        parts += [f"on_promotion={on_promotion!r}"] if on_promotion is not None else []
        parts += ["matmul=True"] if matmul else []
        parts += [f"kinds={kinds!r}"] if kinds is not None else []
        return f"promotion({', '.join(parts)})"


def _change_of(rule: Any, on_promotion: object, matmul: object, kinds: object) -> int:
    """Returns the number of the change of policy that is asked for."""
    from torch_promote.reference.promotion_rules import RULE_NAMES, promotion_rule

    if callable(rule):  # a decorator without parentheses
        raise RuleDefinitionError(
            f"promotion takes a rule, got {shown(rule)}. Legal: {', '.join(RULE_NAMES)}, or a rule of make_rule. As a "
            f'decorator, write it with a rule: @promotion("torch").'
        )
    if on_promotion is None:
        mode, bits = 0, 0
        if kinds is not None:
            raise OptionError(
                f"kinds={kinds!r} says which promotions on_promotion is for, and there is no on_promotion. Give "
                f"on_promotion='warn', 'raise' or a callable."
            )
    elif isinstance(on_promotion, str) and on_promotion in _MODES:
        mode, bits = _MODES[on_promotion], kinds_of("any" if kinds is None else kinds)
    else:
        raise OptionError(
            f"on_promotion is 'warn', 'raise', None or a callable of one PromotionEvent, got {shown(on_promotion)}."
        )
    from torch_promote.regions.promotion_tables import promotion_change

    return promotion_change(promotion_rule(rule), check_flag("matmul", matmul), bits, mode)


# Dynamo calls it while it traces, and keeps the number.
_change_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
