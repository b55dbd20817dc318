"""`why`: explains the dtype of an expression, with calls of functions and with the casts of autocast.

The reference explains operators alone (torch_promote/reference/derivation). For a call of a function, PyTorch chooses
the overload, and composite ops call others. So this module runs the call on fake tensors, observes which ops are
dispatched, and lets the reference explain each: what autocast casts, how the operands promote, and the result's dtype.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from torch_promote.checking.call_in_words import CallWriter
from torch_promote.checking.functions_by_name import find_function
from torch_promote.checking.pretend_cuda import pretend_cuda
from torch_promote.checking.seen_calls import CallObserver
from torch_promote.errors import OptionError, PromotionRuleError
from torch_promote.observe.dispatch import observe_dispatch
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.policy.policy import Policy
from torch_promote.reference import Derivation, ExpressionError, Operand, PromotionError, PromotionRule
from torch_promote.reference.derivation.derivation import derive
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion_rules import promotion_rule
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.promotion import promotion

__all__ = ["why"]

_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")
#: Calls on more elements are not run on real tensors.
_SMALL = 1 << 20
#: Errors of real tensors that depend on dtypes. Others depend on the values, which an expression does not have.
_ABOUT_DTYPES = re.compile(
    r"not implemented for|overflow|ZeroDivision|dtype|scalar type|floating|integ|bool|complex|Half|BFloat16|not support"
)


def why(
    expression: str,
    *,
    autocast: str | None = None,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    default_dtype: torch.dtype | str | None = None,
    rule: str | PromotionRule = "torch",
) -> Derivation:
    """Explains the dtype of an expression, step by step.

    Args:
        expression: Operands are tensors, written as dtype and sizes (`int32[2, 3]`, `f2[3]`, `int64[]`), Python
            numbers, and calls of functions of PyTorch or of methods (`cat([int8[2], half[2]])`,
            `F.softmax(bf16[2, 3], -1)`). They are joined by Python's operators.
        autocast: "cpu" or "cuda": explains the expression inside a region of `my_autocast`. "cuda" needs no GPU.
        dtype: The region's dtype, or its name. None: PyTorch's default.
        policy: The region's policy. None: the default policy.
        default_dtype: The dtype of Python floats. None: the current default dtype.
        rule: The promotion rule, or its name.

    Returns:
        The derivation. `str()` formats it. If PyTorch or the rule raises, it ends with the last step before that.

    Raises:
        ExpressionError: The expression is invalid, or contains no tensor. It is a ValueError.
        OptionError: `dtype` or `policy` is given without `autocast`.

    Example:
        >>> print(why("cat([int8[2], f2[2]])"))
        cat([int8[2], float16[2]])
        1. int8[2] is a tensor with dimensions: state dim, int8.
        2. float16[2] is a tensor with dimensions: state dim, float16.
        3. Both are in state dim, so the two are promoted. The table has float16 for them (row i1, column
           f2).
        4. aten::cat computes in float16 and returns float16.
        Result: float16 of shape [4]
        >>> why("F.linear(f4[2, 3], f4[4, 3])", autocast="cpu").dtype
        torch.bfloat16
    """
    default = torch.get_default_dtype() if default_dtype is None else parse_dtype(default_dtype, "default_dtype")
    if autocast is None and (dtype is not None or policy is not None):
        raise OptionError('dtype and policy are those of a region: pass autocast="cpu" or autocast="cuda", too.')
    if autocast not in (None, "cpu", "cuda"):
        raise OptionError(f"autocast is 'cpu', 'cuda' or None, got {autocast!r}.")
    chosen = promotion_rule(rule, default)
    runner = _Runner(autocast, None if dtype is None else parse_dtype(dtype), policy, chosen, default)
    return derive(expression, default, rule, runner, runner.words())


@dataclass(slots=True)
class _Runner:
    """Explains calls of functions; the `Runner` of torch_promote.reference.derivation.step_writer."""

    autocast: str | None
    dtype: torch.dtype | None
    policy: Policy | str | os.PathLike[str] | None
    rule: PromotionRule
    default_dtype: torch.dtype

    @property
    def takes_operators(self) -> bool:
        return self.autocast is not None

    def words(self) -> str | None:
        """The region in words."""
        if self.autocast is None:
            return None
        with self._around():
            dtype = torch.get_autocast_dtype(self.autocast)
            enabled = torch.is_autocast_enabled(self.autocast)
        asked = self.dtype
        if not enabled and asked is None:
            return "without autocast"
        if not enabled and asked is not None:
            refused = f"does not support {dtype_name(asked)}: the region warns and is disabled"
            return f"under autocast on {self.autocast}, which {refused}"
        given = f" and the policy {self.policy}" if isinstance(self.policy, str | os.PathLike) else ""
        return f"under autocast on {self.autocast} with {dtype_name(dtype)}{given}"

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """The regions that the expression runs in."""
        before = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            if before is not self.default_dtype:
                torch.set_default_dtype(self.default_dtype)
                stack.callback(torch.set_default_dtype, before)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            level = _FAKE_TENSORS.level
            _FAKE_TENSORS.setLevel(logging.CRITICAL)  # they log a traceback for each error
            stack.callback(_FAKE_TENSORS.setLevel, level)
            if self.autocast is not None:
                if self.autocast == "cuda":
                    stack.enter_context(pretend_cuda())
                stack.enter_context(my_autocast(self.autocast, dtype=self.dtype, policy=self.policy))
            if self.rule.name != "torch":
                stack.enter_context(promotion(self.rule))
            yield

    def run(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: Mapping[int, str],
        steps: list[str],
    ) -> Any:
        called = function if callable(function) else find_function(function, args)
        given = _with_list(function, list(args))
        mode = FakeTensorMode()
        mode.cache_enabled = False  # the cache makes tensors by ops that the call does not run
        device = self.autocast or "cpu"
        makes: dict[int, torch.Tensor] = {}

        def fake(operand: Operand) -> torch.Tensor:
            with mode:
                made = torch.empty(operand.shape, dtype=operand.dtype, device=device)
            makes[id(operand)] = made
            return made

        fakes, fake_kwargs = _replaced(given, fake), _replaced(dict(kwargs), fake)
        observer = CallObserver()
        result, error = None, None
        with self._around(), torch.no_grad():
            try:
                with observe_dispatch(observer), mode:
                    result = called(*fakes, **fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                result, error = self._on_real_tensors(called, given, kwargs)
            except PromotionRuleError:
                self._write(observer, names, makes, steps)
                raise
            except Exception as raised:  # what PyTorch raises for the call
                if isinstance(function, str) and not observer.calls and isinstance(raised, TypeError):
                    raise ExpressionError(f"PyTorch does not take these arguments: {_one_line(raised)}") from None
                error = raised
        refused = self._refusal(called, given, kwargs, observer) if error is None else _one_line(error)
        with self._around(), torch.no_grad():
            self._write(observer, names, makes, steps, refused is not None)
        if refused is not None:
            raise PromotionError(refused)
        return _described(result)

    def _write(
        self,
        observer: CallObserver,
        names: Mapping[int, str],
        makes: Mapping[int, torch.Tensor],
        steps: list[str],
        raises: bool = False,
    ) -> None:
        spelled = {id(made): names[number] for number, made in makes.items() if number in names}
        writer = CallWriter(self.rule, self.default_dtype, spelled, steps, raises)
        writer.write_all(observer.calls)

    def _refusal(self, function: Callable[..., Any], args: Any, kwargs: Any, observer: CallObserver) -> str | None:
        """Why PyTorch refuses the operands' dtypes, where fake tensors take them. None if it does not.

        The kernels of the CPU say so. If they cannot be tried, the reference does.
        """
        result, error = (None, None) if self.autocast == "cuda" else self._on_real_tensors(function, args, kwargs)
        if error is not None:
            return _one_line(error) if _ABOUT_DTYPES.search(str(error)) else None
        return observer.error() if result is None else None

    def _on_real_tensors(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
        count = 0

        def real(operand: Operand) -> torch.Tensor:
            nonlocal count
            size = 1
            for length in operand.shape:
                size *= length
            count += size
            if count > _SMALL:
                raise _TooLargeError
            zeros = torch.zeros(operand.shape, dtype=torch.uint8)
            return zeros.add_(1).to(operand.dtype)

        try:
            reals, real_kwargs = _replaced(args, real), _replaced(dict(kwargs), real)
        except (_TooLargeError, RuntimeError):
            return None, None
        with torch.random.fork_rng(devices=[]), self._around(), torch.no_grad():
            try:
                return function(*reals, **real_kwargs), None
            except Exception as error:
                return None, error


class _TooLargeError(Exception):
    """The tensors of an expression are too large to be allocated."""


def _with_list(function: str | Callable[..., Any], args: list[Any]) -> list[Any]:
    """Makes `cat(x, y)` `cat([x, y])`: functions on lists take tensors one by one, too."""
    name = function.rpartition(".")[2] if isinstance(function, str) else ""
    tensors = [arg for arg in args if isinstance(arg, Operand)]
    if not tensors or args[: len(tensors)] != tensors or not hasattr(torch.ops.aten, name):
        return args
    packet = getattr(torch.ops.aten, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    first = {str(schema.arguments[0].real_type) for schema in schemas if schema.arguments}
    return [tensors, *args[len(tensors) :]] if first == {"List[Tensor]"} else args


def _replaced(value: Any, make: Callable[[Operand], torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return make(value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(one, make) for one in value)
    if isinstance(value, dict):
        return {name: _replaced(one, make) for name, one in value.items()}
    return value


def _described(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return Operand(result.dtype, tuple(int(size) for size in result.shape))
    if isinstance(result, list | tuple):
        return tuple(_described(one) for one in result)
    return result


def _one_line(error: Exception) -> str:
    """An error of PyTorch as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0]
    text = text.partition(" - got")[0] if "invalid combination of arguments" in text else text
    return f"{text.rstrip('. ')}."
