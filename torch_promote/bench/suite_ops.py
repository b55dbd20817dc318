"""The suite `ops`: single calls, in an open region. What they cast, and with which cast policy, differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torch_promote as tp
from torch_promote.bench.cases import ALREADY_CAST, HAND, LOW, OURS, PLAIN, STOCK, Case, Prepared, Settings
from torch_promote.bench.suite_overrides import prepare_overridden
from torch_promote.bench.timing import stopwatch

__all__ = ["cases"]

_SIZES = (4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call and what stands for it without autocast, as source.

    Attributes:
        statement: What runs in the region.
        hand: The same with the casts written out.
        already_cast: The same on inputs that need no cast.
        plain: The call in float32 where that is something else.
        device: The device type that the case is about; "": any.
    """

    statement: str
    hand: str = ""
    already_cast: str = ""
    plain: str = ""
    device: str = ""


def _same(statement: str, device: str = "") -> _Call:
    """A call with nothing to cast: without autocast it is the same call."""
    return _Call(statement, plain=statement, device=device)


_NOTHING_TO_CAST = {
    "mm, nothing to cast": _same("torch.mm(low, low)"),
    "linear, nothing to cast": _same("linear(low, low)"),
    "cat, nothing to cast": _same("torch.cat((low, low))"),
    "mse_loss (fp32), nothing to cast": _same("torch.ops.aten.mse_loss(single, single)"),
    "exp, a row of CUDA only": _same("torch.exp(single)", "cpu"),
    "trace, a row of the CPU only": _same("torch.trace(single)", "cuda"),
}

_WEIGHTS = {
    "mm, a weight from the cache": _Call(
        "torch.mm(low, weight)", "torch.mm(low, weight.to(dtype))", "torch.mm(low, low_weight)"
    ),
    "mm, an activation cast and a weight from the cache": _Call(
        "torch.mm(single, weight)", "torch.mm(single.to(dtype), weight.to(dtype))", "torch.mm(low, low_weight)"
    ),
}

# A call for each cast policy that has work to do.
_POLICIES = {
    "lower_precision_fp (linear), three casts": _Call(
        "linear(single, other, bias)",
        "linear(single.to(dtype), other.to(dtype), bias.to(dtype))",
        "linear(low, low_other, low_bias)",
        "linear(single, other, bias)",
    ),
    "fp32 (mse_loss), two casts": _Call(
        "mse(low, low_other)", "mse(low.float(), low_other.float())", "mse(single, other)", "mse(single, other)"
    ),
    "promote (cat), one cast": _Call(
        "torch.cat((low, single))",
        "torch.cat((low.float(), single))",
        "torch.cat((single, single))",
        "torch.cat((single, single))",
        device="cpu",
    ),
    "promote (addcmul), one cast": _Call(
        "torch.addcmul(low, single, other)",
        "torch.addcmul(low.float(), single, other)",
        "torch.addcmul(single, single, other)",
        "torch.addcmul(single, single, other)",
        device="cuda",
    ),
    "fp32_set_opt_dtype (sum)": _Call(
        "torch.sum(low)", "torch.sum(low, dtype=torch.float32)", plain="torch.sum(single)", device="cuda"
    ),
    "fp32_append_dtype (norm)": _Call(
        "aten.norm.Scalar(low, 2)",
        "aten.norm.ScalarOpt_dtype(low, 2, dtype=torch.float32)",
        plain="aten.norm.Scalar(single, 2)",
        device="cuda",
    ),
    "fallthrough (abs)": _same("torch.abs(low)"),
}

_MM = _Call("torch.mm(a, b)", "torch.mm(a.to(dtype), b.to(dtype))", "torch.mm(low_a, low_b)", "torch.mm(a, b)")
_BACKWARD = _Call(
    "grad(torch.mm(a, b), (a, b), low_g)",
    "grad(torch.mm(a.to(dtype), b.to(dtype)), (a, b), low_g)",
    "grad(torch.mm(low_a, low_b), (low_a, low_b), low_g)",
    "grad(torch.mm(a, b), (a, b), g)",
)
_ACTIVATIONS = {"without grad": (_MM, False), "with grad": (_MM, True), "with grad, and backward": (_BACKWARD, True)}


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite on a device."""
    policies = {f"policy {name}": call for name, call in _POLICIES.items()}
    for name, call in {**_NOTHING_TO_CAST, **_WEIGHTS, **policies}.items():
        if call.device in ("", settings.device):
            yield Case("ops", name, partial(_prepare_small, call))
    name = "boxed by an override (sigmoid as fp32), one cast"
    boxed = partial(prepare_overridden, "torch.sigmoid(low)", "torch.sigmoid(low.float())")
    yield Case("ops", name, boxed)
    for how, (call, grad) in _ACTIVATIONS.items():
        for size in _SIZES:
            name = f"mm, two activations cast, {size} x {size}, {how}"
            yield Case("ops", name, partial(_prepare_activations, call, size, grad))


def _prepare_small(call: _Call, settings: Settings) -> Prepared:
    single, other, bias, weight = (
        torch.randn(shape, device=settings.device) for shape in ((4, 4), (4, 4), (4,), (4, 4))
    )
    names = {
        "aten": torch.ops.aten,
        "linear": torch.nn.functional.linear,
        "mse": torch.ops.aten.mse_loss,
        "single": single,
        "other": other,
        "bias": bias,
        "weight": weight.requires_grad_(),
        "low": single.to(LOW),
        "low_other": other.to(LOW),
        "low_bias": bias.to(LOW),
        "low_weight": weight.detach().to(LOW).requires_grad_(),
    }
    return _prepare(call, names, settings)


def _prepare_activations(call: _Call, size: int, grad: bool, settings: Settings) -> Prepared:
    # Activations: no leaves, whose casts would be cached.
    a, b, low_a, low_b = (
        torch.randn(size, size, device=settings.device, dtype=dtype, requires_grad=grad) * 1
        for dtype in (torch.float32, torch.float32, LOW, LOW)
    )
    g = torch.randn(size, size, device=settings.device)
    names = {"a": a, "b": b, "low_a": low_a, "low_b": low_b, "g": g, "low_g": g.to(LOW), "grad": torch.autograd.grad}
    return _prepare(call, names, settings)


def _prepare(call: _Call, names: Mapping[str, Any], settings: Settings) -> Prepared:
    names = {"torch": torch, "dtype": LOW, **names}
    contenders: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
        STOCK: (call.statement, partial(torch.autocast, settings.device, LOW)),
        OURS: (call.statement, partial(tp.my_autocast, settings.device, LOW)),
        HAND: (call.hand, nullcontext),
        ALREADY_CAST: (call.already_cast, nullcontext),
        PLAIN: (call.plain, nullcontext),
    }
    timers = {
        contender: stopwatch(statement, names, settings, region)
        for contender, (statement, region) in contenders.items()
        if statement
    }
    bases = (HAND, ALREADY_CAST) if call.hand else (PLAIN,)
    return Prepared(timers, bases)
