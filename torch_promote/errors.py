"""The errors of this package. Each text names the input, what is legal and what to do.

Each error is a `TorchPromoteError` and the built-in error that fits it, so that code that catches a ValueError,
TypeError, RuntimeError or ImportError catches it, too.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

__all__ = [
    "ArgumentError",
    "CrosscheckError",
    "DecoratorError",
    "DeviceTypeError",
    "DispatchObserverError",
    "DtypeError",
    "ExpressionError",
    "ExtensionError",
    "FlagError",
    "Fp32FailsError",
    "MissingPackageError",
    "NoiseFloorError",
    "NonfiniteError",
    "OptionError",
    "PolicyError",
    "PolicyMismatchError",
    "PromotionLintError",
    "PromotionRuleError",
    "PromotionWarning",
    "PromotionWriteError",
    "RegionError",
    "RuleDefinitionError",
    "StaleCastError",
    "StepError",
    "TorchPromoteError",
    "TuningError",
    "UnsupportedDeviceError",
    "UnusedOverrideWarning",
]


class TorchPromoteError(Exception):
    """Base class of the errors of this package.

    Errors contain names of files, ops and modules. `str` escapes control characters in them, so that they cannot change
    what a terminal shows, and shortens a very long line.

    Example:
        >>> len(str(TorchPromoteError("x" * 1_000_000)))
        150
    """

    def __str__(self) -> str:
        return printable(_shortened(super().__str__()))


#: The lengths from which words, and lines, are shortened, in characters.
_LONG_WORD, _LONG_LINE = 1_000, 4_000


def _shortened(text: str) -> str:
    text = re.sub(rf"\S{{{_LONG_WORD},}}", lambda word: _without_middle(word[0], 120), text)
    lines = text.split("\n")
    return "\n".join(line if len(line) < _LONG_LINE else _without_middle(line, _LONG_LINE) for line in lines)


def _without_middle(text: str, length: int) -> str:
    return f"{text[: length - 20]}[... {len(text):,} characters ...]{text[-20:]}"


def printable(text: str) -> str:
    """Returns a text in which everything but printable characters, tabs and ends of lines is escaped, as in a repr."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\t\n" else repr(one)[1:-1] for one in text)


#: What a message contains for the reader to copy.
_TO_COPY = re.compile(r"`[^`\n]*`|(?:TORCH_PROMOTE_\S+ )?torch-promote [a-z].*")


def say(text: str) -> None:
    """Prints a message to stderr: as lines of whole words and commands if that is a terminal, otherwise as it is."""
    text, width = printable(text), 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a terminal, closed, or None
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        width = int(os.environ.get("COLUMNS") or width)
    if width > 0:
        # printable() has left no \0. Indented lines are code.
        lines = _TO_COPY.sub(lambda match: match[0].replace(" ", "\0"), text).split("\n")
        options: Any = {"break_long_words": False, "break_on_hyphens": False}
        lines = [line if line.startswith(" ") else textwrap.fill(line, width, **options) for line in lines]
        text = "\n".join(lines).replace("\0", " ")
    if sys.stderr is not None:
        with contextlib.suppress(BrokenPipeError):
            print(text, file=sys.stderr, flush=True)


class ExtensionError(TorchPromoteError, ImportError):
    """The extension is missing or was built with another PyTorch, or another library uses its dispatch key."""


class MissingPackageError(TorchPromoteError, ImportError):
    """A package that a feature needs is not installed."""


class DeviceTypeError(TorchPromoteError, ValueError):
    """An invalid device type argument: not a str, or an empty sequence or one with duplicates."""


class UnsupportedDeviceError(TorchPromoteError, RuntimeError):
    """A device type that this package does not support, or that does not support the request."""


class DtypeError(TorchPromoteError, TypeError):
    """An autocast dtype that is not a floating torch.dtype."""


class DecoratorError(TorchPromoteError, TypeError):
    """The decorated object is not callable, or suspends, as a coroutine does, where the block cannot be suspended."""


class PolicyError(TorchPromoteError, ValueError):
    """An unknown op or cast policy, or a policy that is not legal for an op."""


class PolicyMismatchError(TorchPromoteError, RuntimeError):
    """The ranks of a distributed job have different policies; see `check_ranks`.

    Attributes:
        found: Maps each rank to what is in force there.

    Example:
        >>> fp32 = {"aten::mm on cpu": "fp32"}
        >>> print(PolicyMismatchError({0: {}, 1: fp32, 2: fp32}))
        ranks of this job have different policies:
          rank 0: aten::mm on cpu: not set
          ranks 1, 2: aten::mm on cpu: fp32
        Give all ranks the same policies: otherwise they train one model in different precisions. If the difference is
        intended, as between the stages of a pipeline, compare ranks of one group: check_ranks(group=...).
    """

    def __init__(self, found: Mapping[int, Mapping[str, str]]) -> None:
        self.found: dict[int, dict[str, str]] = {rank: dict(settings) for rank, settings in found.items()}
        super().__init__(self.found)

    def __str__(self) -> str:
        entries = sorted({entry for settings in self.found.values() for entry in settings})
        values = {entry: [settings.get(entry, "not set") for settings in self.found.values()] for entry in entries}
        differing = [entry for entry in entries if len(set(values[entry])) > 1]
        shown = differing[:_ENTRIES_SHOWN]
        more = f", and {len(differing) - len(shown)} more" if differing[len(shown) :] else ""
        alike: dict[tuple[str, ...], list[int]] = {}
        for at, rank in enumerate(self.found):
            alike.setdefault(tuple(values[entry][at] for entry in differing), []).append(rank)
        lines = [
            f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: "
            f"{', '.join(f'{entry}: {value}' for entry, value in zip(shown, settings, strict=False))}{more}\n"
            for settings, ranks in alike.items()
        ]
        return printable(
            _shortened(
                f"ranks of this job have different policies:\n{''.join(lines)}"
                "Give all ranks the same policies: otherwise they train one model in different precisions. If the "
                "difference is\nintended, as between the stages of a pipeline, compare ranks of one group: "
                "check_ranks(group=...)."
            )
        )


#: The maximum number of entries that a `PolicyMismatchError` shows.
_ENTRIES_SHOWN = 4


class OptionError(TorchPromoteError, ValueError):
    """An unknown option, or an illegal value of one."""


class ArgumentError(TorchPromoteError, TypeError):
    """An argument that a function does not have, one that is missing, or one that has to be given by its name."""


class FlagError(OptionError, TypeError):
    """A value that is not a bool where one is needed, such as the str "False", which counts as true."""


class RegionError(TorchPromoteError, RuntimeError):
    """Invalid use of a region, such as leaving one that is not open, or exporting one with overrides."""


class PromotionRuleError(TorchPromoteError, RuntimeError):
    """Operands without a common dtype under a promotion rule.

    It is a RuntimeError, like PyTorch's own: in `x + y`, PyTorch would treat a TypeError as "not implemented".

    Attributes:
        rule: The rule's name.
        operands: Descriptions of the operands, such as "int32[3]" and "5.5 (a Python float)".
        reason: Why the rule forbids them, as a clause.
        remedy: What to write instead, as a sentence.
        op: The op that was called, or None if unknown.

    Example:
        >>> print(PromotionRuleError("strict", ["int8[3]", "int16[3]"], "the two differ", "Cast one.", "add"))
        add: the promotion rule "strict" has no common dtype for int8[3] and int16[3]: the two differ. Cast one.
    """

    def __init__(self, rule: str, operands: Iterable[str], reason: str, remedy: str, op: str | None = None) -> None:
        self.rule: str = rule
        self.operands: tuple[str, ...] = tuple(operands)
        self.reason: str = reason
        self.remedy: str = remedy
        self.op: str | None = op
        super().__init__(rule, self.operands, reason, remedy, op)  # pickle recreates the error from these arguments

    def __str__(self) -> str:
        words = f"{', '.join(self.operands[:-1])} and {self.operands[-1]}" if self.operands[1:] else self.operands[0]
        called = f"{self.op}: the" if self.op else "the"
        return f'{called} promotion rule "{self.rule}" has no common dtype for {words}: {self.reason}. {self.remedy}'


class PromotionWriteError(PromotionRuleError):
    """An in-place or out= op whose result dtype the promotion rule does not allow to be written.

    Example:
        >>> operands = ["int8[3]", "float32[3]"]
        >>> print(PromotionWriteError("jax", operands, "float32 is not written to int8", "Cast.", "add_"))
        add_ of int8[3] and float32[3] under the promotion rule "jax": float32 is not written to int8. Cast.
    """

    def __str__(self) -> str:
        called = self.op or "an op that writes"
        words = " and ".join(self.operands)
        return f'{called} of {words} under the promotion rule "{self.rule}": {self.reason}. {self.remedy}'


class PromotionLintError(TorchPromoteError, RuntimeError):
    """A silent promotion in a region of `promotion(..., on_promotion="raise")`."""


class PromotionWarning(UserWarning):
    """A silent promotion in a region of `promotion(..., on_promotion="warn")`."""


class UnusedOverrideWarning(UserWarning):
    """An override of an op that other ops call with autocast off, as `mm` in `linear`, and of none of these."""


class RuleDefinitionError(TorchPromoteError, ValueError):
    """An invalid promotion rule: a pair without a result, two results for one pair, an unknown name."""


class StaleCastError(TorchPromoteError, RuntimeError):
    """A cast that the cache would have reused although its source has changed; see `check_casts`.

    Attributes:
        weight: The source: its name if a module has it, its shape and dtype.
        dtype: The dtype of the cast.
        mode: The cache mode in force.
        first_line: The line of Python that made the cast.
        this_line: The line that would have used it.
        difference: How the cast differs from a fresh one.

    Example:
        >>> where = {"first_line": "train.py:3 in step: y = model(x)", "this_line": "train.py:5 in step: y = model(x)"}
        >>> name = "layers.0.weight (Parameter, 4 x 4, float32)"
        >>> print(StaleCastError(name, "bfloat16", "weights", **where, difference="1 of 16 elements differ"))
        the cast of layers.0.weight (Parameter, 4 x 4, float32) to bfloat16 has stale data: 1 of 16 elements differ.
          cache mode: weights
          first cast: train.py:3 in step: y = model(x)
          this use:   train.py:5 in step: y = model(x)
        Something wrote to the tensor in between and did not change its _version. After such a write (through
        weight.data, a NumPy array, a raw kernel) call torch_promote.clear_cache(), or write in place under
        torch.no_grad(), or open the region with cache="none". Without torch_promote, both need
        torch.clear_autocast_cache(). See "Limits" in docs/casts.md.
    """

    def __init__(self, weight: str, dtype: str, mode: str, first_line: str, this_line: str, difference: str) -> None:
        self.weight: str = weight
        self.dtype: str = dtype
        self.mode: str = mode
        self.first_line: str = first_line
        self.this_line: str = this_line
        self.difference: str = difference
        # pickle recreates the error from these arguments
        super().__init__(weight, dtype, mode, first_line, this_line, difference)

    def __str__(self) -> str:
        return (
            f"the cast of {self.weight} to {self.dtype} has stale data: {self.difference}.\n"
            f"  cache mode: {self.mode}\n"
            f"  first cast: {self.first_line}\n"
            f"  this use:   {self.this_line}\n"
            "Something wrote to the tensor in between and did not change its _version. After such a write (through\n"
            "weight.data, a NumPy array, a raw kernel) call torch_promote.clear_cache(), or write in place under\n"
            'torch.no_grad(), or open the region with cache="none". Without torch_promote, both need\n'
            'torch.clear_autocast_cache(). See "Limits" in docs/casts.md.'
        )


#: No op, policy, module or option has a longer name, in characters. A longer one is not compared with those that exist.
LONGEST_NAME = 1_000


def shown(value: object) -> str:
    """Returns the first line of a value's repr for an error, or its type: of a tensor, and if it cannot be printed."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor | torch.nn.Module):
        return f"{type(value).__name__}(...)"
    try:
        lines = repr(value).splitlines() or [""]
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be printed"
    return lines[0] + " ..." * (len(lines) > 1)


def did_you_mean(name: str, known: Iterable[str], count: int = 3) -> str:
    """Returns a hint with the known names closest to a misspelt one, " Closest: a, b."; "" if none is close."""
    if len(name) > LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6 if len(name) > 2 else 0.75)
    return f" Closest: {', '.join(close)}." if close else ""


def raise_no_attribute(module: str, names: Iterable[str], name: str) -> NoReturn:
    """Raises the error of a module that has no attribute of a name, with the closest of its names."""
    # Dunders and the like are what tools ask any module for.
    hint = "" if name.startswith("_") else f".{did_you_mean(name, names)}".rstrip(".")  # Python adds one
    raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


# By globals(): type checkers, which see a `__getattr__`, would accept every name.
globals()["__getattr__"] = functools.partial(raise_no_attribute, __name__, __all__)


def check_flag(name: str, value: object) -> bool:
    """Returns the value of an argument that has to be a bool, or raises FlagError."""
    if not isinstance(value, bool):
        remedy = "Compare the str with the words that mean True" if isinstance(value, str) else f"Pass bool({name})"
        raise FlagError(
            f"{name} is a bool, got {shown(value)} of type {type(value).__name__}. Legal: True, False. {remedy}."
        )
    return value


_P = ParamSpec("_P")
_R = TypeVar("_R")


def explains_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function, of which a call with arguments that it does not take raises `ArgumentError`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:  # the function has not begun
                refuse_arguments(function, args, kwargs)
            raise

    return call


def refuse_arguments(function: Callable[..., Any], args: Sequence[object], given: Iterable[str]) -> NoReturn:
    """Raises `ArgumentError` for a call whose arguments do not fit a function's, with what is legal."""
    name = function.__qualname__.removesuffix(".__init__")
    parameters = [
        one
        for position, one in enumerate(inspect.signature(function).parameters.values())
        if one.kind is not one.VAR_KEYWORD and (position or one.name not in ("self", "cls"))
    ]
    names = [one.name for one in parameters]
    legal = f"Legal: {', '.join(names)}." if names else f"Write {name}()."
    unknown = [one for one in given if one not in names]
    if unknown:
        raise ArgumentError(f"{name}() has no argument {unknown[0]!r}.{did_you_mean(unknown[0], names, 1)} {legal}")
    placed = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    needed = [one.name for one in parameters if one.default is one.empty]
    args = args[1:] if "." in function.__qualname__ else args  # without self
    written = ", ".join(one if one in placed else f"{one}=..." for one in needed)
    usage = f"Write {name}({written})." if needed else legal
    if len(args) > len(placed):
        got = ", ".join(type(one).__name__ for one in args)
        takes = f"{' and '.join(placed) or 'no argument'} by position"
        by_name = "Give the others by name. " if len(placed) < len(names) else ""
        raise ArgumentError(f"{name}() takes {takes}, got {len(args)}: {got}. {by_name}{usage}")
    twice = [one for one in placed[: len(args)] if one in given]
    if twice:
        raise ArgumentError(f"{name}() got {twice[0]} twice, by position and by name. Give it once. {usage}")
    missing = [one for one in needed if one not in given and one not in placed[: len(args)]]
    raise ArgumentError(f"{name}() needs {' and '.join(missing)}, too. {usage}")


def check_path(name: str, path: object) -> str:
    """Returns an argument that has to name a file, as a str. Raises ArgumentError, which is a TypeError."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{name} is the name of a file, a str or os.PathLike, got {shown(path)}.")
    return os.fsdecode(path)


def body_of(function: Any) -> Any:
    """Returns what runs when a callable is called: the function itself, or the `__call__` of its class."""
    is_function = inspect.isroutine(function) or isinstance(function, functools.partial)
    return function if is_function else type(function).__call__


def check_decorated(usage: str, function: object, may_suspend: bool = False) -> None:
    """Raises DecoratorError unless a block, written as `usage` says, can be a decorator of an object."""
    # Calling a coroutine or generator function returns before its body runs: a block that cannot suspend would be over.
    name = usage.removeprefix("with ").partition(":")[0].partition(" as ")[0]
    if not callable(function):
        raise DecoratorError(
            f"{name} decorates a callable, got {type(function).__name__}. Decorate a function, or use it as a "
            f"context manager: `{usage}`."
        )
    body = body_of(function)
    kinds = {
        "a coroutine function": inspect.iscoroutinefunction,
        "a generator function": inspect.isgeneratorfunction,
        "an asynchronous generator function": inspect.isasyncgenfunction,
    }
    kind = "" if may_suspend else next((kind for kind, is_one in kinds.items() if is_one(body)), "")
    if kind:
        called = getattr(function, "__qualname__", shown(function))
        raise DecoratorError(
            f"{name} cannot decorate {called}, {kind}: the block would end before its body runs. Write `{usage}` "
            "inside the function, or around the code that runs it to its end."
        )


class StepError(TorchPromoteError, RuntimeError):
    """The step of `compare` or `tune` is not usable: it is not repeatable, or returns nothing to compare."""


class TuningError(TorchPromoteError, RuntimeError):
    """`tune` cannot start its search, because of the results of its first runs."""


class NoiseFloorError(TuningError):
    """The tolerance is smaller than the difference between two runs of the reference."""


class Fp32FailsError(TuningError):
    """Even with every candidate in float32, the step does not meet the tolerance."""


class DispatchObserverError(TorchPromoteError, RuntimeError):
    """Ops cannot be observed in this process, or an observer ends in the wrong thread."""


class CrosscheckError(TorchPromoteError, AssertionError):
    """A mismatch, raised under `raise_on_mismatch` or by `CrosscheckReport.raise_for_mismatches`."""


class ExpressionError(TorchPromoteError, ValueError):
    """An invalid expression of `why`."""


class NonfiniteError(TorchPromoteError, ArithmeticError):
    """A call made an inf or a NaN in a block of `find_nonfinite(raise_at_first=True)`.

    Attributes:
        origin: The call that made it, as in `NonfiniteReport.origin`.
    """

    def __init__(self, origin: object) -> None:
        super().__init__(str(origin))
        self.origin = origin
