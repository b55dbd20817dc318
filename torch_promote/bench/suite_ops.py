"""The suite `ops`: single calls in an open region, with different casts and cast policies."""

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

__all__ = ["Call", "Names", "activations", "calls", "cases", "prepare_call", "small_tensors"]

_SIZES = (4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and its equivalents without autocast, as source.

    Attributes:
        statement: The call in the region.
        hand: The same with casts in the code.
        already_cast: The same on inputs that need no cast.
        plain: The call in float32, if that differs.
        device: The device type of the case; "" for any.
        setup: Code that runs before the call, in the region.
    """

    statement: str
    hand: str = ""
    already_cast: str = ""
    plain: str = ""
    device: str = ""
    setup: str = "pass"


def _same(statement: str, device: str = "") -> Call:
    """A call with nothing to cast, which is the same without autocast."""
    return Call(statement, plain=statement, device=device)


_NOTHING_TO_CAST = {
    "mm, nothing to cast": _same("torch.mm(low, low)"),
    "linear, nothing to cast": _same("linear(low, low)"),
    "cat, nothing to cast": _same("torch.cat((low, low))"),
    "mse_loss (fp32), nothing to cast": _same("torch.ops.aten.mse_loss(single, single)"),
    "exp, a row of CUDA only": _same("torch.exp(single)", "cpu"),
    "trace, a row of the CPU only": _same("torch.trace(single)", "cuda"),
}

_WEIGHTS = {
    "mm, a weight from the cache": Call(
        "torch.mm(low, weight)", "torch.mm(low, weight.to(dtype))", "torch.mm(low, low_weight)"
    ),
    "mm, an activation cast and a weight from the cache": Call(
        "torch.mm(single, weight)", "torch.mm(single.to(dtype), weight.to(dtype))", "torch.mm(low, low_weight)"
    ),
}

# A call for each cast policy that casts something.
_POLICIES = {
    "lower_precision_fp (linear), three casts": Call(
        "linear(single, other, bias)",
        "linear(single.to(dtype), other.to(dtype), bias.to(dtype))",
        "linear(low, low_other, low_bias)",
        "linear(single, other, bias)",
    ),
    "fp32 (mse_loss), two casts": Call(
        "mse(low, low_other)", "mse(low.float(), low_other.float())", "mse(raised, raised_other)", "mse(single, other)"
    ),
    "promote (cat), one cast": Call(
        "torch.cat((low, single))",
        "torch.cat((low.float(), single))",
        "torch.cat((raised, single))",
        "torch.cat((single, single))",
        device="cpu",
    ),
    "promote (addcmul), one cast": Call(
        "torch.addcmul(low, single, other)",
        "torch.addcmul(low.float(), single, other)",
        "torch.addcmul(raised, single, other)",
        "torch.addcmul(single, single, other)",
        device="cuda",
    ),
    "fp32_set_opt_dtype (sum)": Call(
        "torch.sum(low)", "torch.sum(low, dtype=torch.float32)", plain="torch.sum(single)", device="cuda"
    ),
    "fp32_append_dtype (norm)": Call(
        "aten.norm.Scalar(low, 2)",
        "aten.norm.ScalarOpt_dtype(low, 2, dtype=torch.float32)",
        plain="aten.norm.Scalar(single, 2)",
        device="cuda",
    ),
    "fallthrough (abs)": _same("torch.abs(low)"),
}

_MM = Call("torch.mm(a, b)", "torch.mm(a.to(dtype), b.to(dtype))", "torch.mm(low_a, low_b)", "torch.mm(a, b)")
_BACKWARD = Call(
    "grad(torch.mm(a, b), (a, b), low_g)",
    "grad(torch.mm(a.to(dtype), b.to(dtype)), (a, b), low_g)",
    "grad(torch.mm(low_a, low_b), (low_a, low_b), low_g)",
    "grad(torch.mm(a, b), (a, b), g)",
)
_ACTIVATIONS = {"without grad": (_MM, False), "with grad": (_MM, True), "with grad, and backward": (_BACKWARD, True)}

#: Makes the names that a call can use.
Names = Callable[[Settings], Mapping[str, Any]]


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite on a device."""
    for name, (call, names) in calls(settings).items():
        yield Case("ops", name, partial(prepare_call, call, names))
    name = "boxed by an override (sigmoid as fp32), one cast"
    yield Case("ops", name, partial(prepare_overridden, "torch.sigmoid(low)", "torch.sigmoid(low.float())"))


def calls(settings: Settings) -> dict[str, tuple[Call, Names]]:
    """Returns the calls for a device, by the names of their cases, each with the function that makes its names.

    Args:
        settings: The device.
    """
    policies = {f"policy {name}": call for name, call in _POLICIES.items()}
    small = {**_NOTHING_TO_CAST, **_WEIGHTS, **policies}
    found: dict[str, tuple[Call, Names]] = {
        name: (call, small_tensors) for name, call in small.items() if call.device in ("", settings.device)
    }
    for how, (call, grad) in _ACTIVATIONS.items():
        for size in _SIZES:
            found[f"mm, two activations cast, {size} x {size}, {how}"] = (call, partial(activations, size, grad))
    return found


def small_tensors(settings: Settings) -> dict[str, Any]:
    """Makes the names that most calls use."""
    single, other, bias, weight = (
        torch.randn(shape, device=settings.device) for shape in ((4, 4), (4, 4), (4,), (4, 4))
    )
    return {
        "torch": torch,
        "dtype": LOW,
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
        "raised": single.to(LOW).float(),
        "raised_other": other.to(LOW).float(),
        "low_weight": weight.detach().to(LOW).requires_grad_(),
    }


def activations(size: int, grad: bool, settings: Settings) -> dict[str, Any]:
    """Makes the names of calls with two activations of size x size."""
    a, b, g = (torch.randn(size, size, device=settings.device) for _ in range(3))
    operands = {"a": a, "b": b, "low_a": a.to(LOW), "low_b": b.to(LOW)}
    # Not leaves: autocast would cache their casts.
    activations = {name: operand.requires_grad_(grad) * 1 for name, operand in operands.items()}
    return {"torch": torch, "dtype": LOW, "grad": torch.autograd.grad, "g": g, "low_g": g.to(LOW), **activations}


def prepare_call(call: Call, make_names: Names, settings: Settings) -> Prepared:
    """Prepares a call and its equivalents, with the names of `make_names`."""
    names = make_names(settings)
    contenders: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
        STOCK: (call.statement, partial(tp.stock_autocast, settings.device, LOW)),
        OURS: (call.statement, partial(tp.my_autocast, settings.device, LOW)),
        HAND: (call.hand, nullcontext),
        ALREADY_CAST: (call.already_cast, nullcontext),
        PLAIN: (call.plain, nullcontext),
    }
    timers = {
        contender: stopwatch(statement, names, settings, region, call.setup if contender in (STOCK, OURS) else "pass")
        for contender, (statement, region) in contenders.items()
        if statement
    }
    bases = (HAND, ALREADY_CAST) if call.hand else (PLAIN,)
    return Prepared(timers, bases)
