"""Runs a program under stock and under ours, and compares all bits."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from fuzz import calls
from fuzz.drawing import function_of
from fuzz.tree import Program
from torch_promote import _C

#: What is noted of a tensor: dtype, shape, strides, whether it requires a gradient, and its bytes.
Bits = tuple[torch.dtype, torch.Size, tuple[int, ...], bool, bytes]
Maker = Callable[[str], Any]
#: Errors of stock where ours has a result: rows 7 and 2 of docs/differences.md. `rules` keeps most of them out.
DOCUMENTED = (
    "Unexpected floating ScalarType",
    "BFloat16 != c10::Half", "Half != c10::BFloat16", "got BFloat16 and Half", "got Half and BFloat16",
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What a program noted, and the error that ended it."""

    notes: list[Bits | None] = field(default_factory=list)
    error: str = ""
    #: What the program left behind in the thread.
    left: str = ""

    def note(self, *tensors: Tensor | None) -> None:
        """Keeps the bits of tensors."""
        for tensor in tensors:
            if tensor is None:
                self.notes.append(None)
                continue
            whole = tensor.detach()
            if whole.is_cuda and not _in_host_memory:
                whole = whole.cpu()
            whole = whole.contiguous()
            content = ctypes.string_at(whole.data_ptr(), whole.nbytes)
            self.notes.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, content))


@dataclass(slots=True)
class Verdict:
    """How a program ran: "same", "same error", "documented" (only stock raises, as `DOCUMENTED` says) or "differs"."""

    what: str
    compared: int = 0
    #: How many of the results that were compared are losses.
    losses: int = 0
    detail: str = ""

    @property
    def found(self) -> bool:
        """Whether ours differs from stock."""
        return self.what == "differs"


_in_host_memory = False


def computes_in_host_memory(yes: bool) -> None:
    """Says that device "cuda" is the stand-in."""
    global _in_host_memory
    _in_host_memory = yes


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, in one thread."""
    torch.set_num_threads(1)
    calls.use_up_sequence_numbers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_functions: dict[str, Any] = {}


def namespace(device: str) -> dict[str, Any]:
    """The names that programs use."""
    if device not in _functions:
        _functions[device] = calls.custom_functions(device)
    scaled, scaled_in_half = _functions[device]
    return {
        **vars(calls), "torch": torch, "nn": nn, "F": functional, "tp": tp, "copy": copy, "contextlib": contextlib,
        "checkpoint": checkpoint, "Scaled": scaled, "ScaledInHalf": scaled_in_half,
    }  # fmt: skip


def check(program: Program, ours: Maker = calls.Ours) -> Verdict:
    """Runs a program under both. Raises `Unfit` if it is not correct under stock."""
    return check_function(compiled(program), program.device, ours)


def compiled(program: Program) -> Any:
    """Returns a program as a function of the autocast to use and of what notes its losses."""
    names = namespace(program.device)
    exec(compile(function_of(program), "<program>", "exec"), names)
    return names["program"]


def check_function(function: Any, device: str, ours: Maker = calls.Ours) -> Verdict:
    """Runs a program that is compiled."""
    expected = outcome_of(function, calls.Stock(device), device)
    got = outcome_of(function, ours(device), device)
    verdict = _compared(expected, got)
    verdict.losses = sum(1 for bits in got.notes[: verdict.compared] if bits is not None and not bits[1])
    return verdict


def _reset_nesting() -> int:
    """Returns how many regions PyTorch counts as open, and makes it none. Errors under stock leave a wrong count."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    for _ in range(nesting):
        torch.autocast_decrement_nesting()
    for _ in range(-nesting):
        torch.autocast_increment_nesting()
    return nesting


def outcome_of(function: Any, autocast: Any, device: str) -> Outcome:
    """Runs a program that is compiled under an autocast."""
    outcome = Outcome()
    try:
        with getattr(autocast, "around", contextlib.nullcontext)():
            function(autocast, outcome.note)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}".split("\n")[0].replace("CastBackward", "ToCopyBackward")
        # Autograd's thread may hold the error a moment longer, and with the frames a generator suspended in a region.
        error.__traceback__ = None
    del function
    if _C.depth() or torch.is_autocast_enabled(device) or torch.is_autocast_enabled("cpu"):
        outcome.left = "an open region"
        while _C.depth():
            _C.suspend_regions(0)
        torch.set_autocast_enabled(device, False)
    elif entries := tp.cache_info()["entries"]:
        outcome.left = f"{entries} casts after the last region"
    if nesting := _reset_nesting():
        outcome.left = f"a nesting of {nesting}"
    torch.clear_autocast_cache()
    tp.clear_cache()
    return outcome


def _compared(expected: Outcome, got: Outcome) -> Verdict:
    compared = 0
    for number, (one, other) in enumerate(zip(got.notes, expected.notes, strict=False)):
        if one != other:
            return Verdict("differs", compared, detail=f"result {number}: {_difference(one, other)}")
        compared += one is not None
    if got.error != expected.error and any(text in expected.error for text in DOCUMENTED):
        return Verdict("documented", compared, detail=expected.error)
    if got.error != expected.error:
        return Verdict(
            "differs", compared, detail=f"stock: {expected.error or 'no error'}; ours: {got.error or 'no error'}"
        )
    if len(got.notes) != len(expected.notes):
        return Verdict(
            "differs", compared, detail=f"{len(expected.notes)} results under stock, {len(got.notes)} under ours"
        )
    if got.left:
        return Verdict("differs", compared, detail=f"ours left {got.left}")
    return Verdict("same error" if got.error else "same", compared, detail=got.error)


def _difference(one: Bits | None, other: Bits | None) -> str:
    if one is None or other is None:
        return f"stock has {'none' if other is None else 'a tensor'}, ours {'none' if one is None else 'a tensor'}"
    for name, mine, stocks in zip(("dtype", "shape", "strides", "requires_grad"), one, other, strict=False):
        if mine != stocks:
            return f"{name} {stocks} under stock, {mine} under ours"
    mine, stocks = (torch.frombuffer(bytearray(bits[4]), dtype=bits[0]) for bits in (one, other))
    unlike = mine != stocks
    at = int(unlike.to(torch.uint8).argmax())
    where = f"{int(unlike.sum())} of {mine.numel()} values of {one[0]} differ; value {at}"
    return f"{where} is {stocks[at].item()} under stock, {mine[at].item()} under ours"
