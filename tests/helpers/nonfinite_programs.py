"""Random programs with a planted fault that makes an inf or a NaN, and the expected report of `find_nonfinite`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import torch_promote as tp

__all__ = ["FAULTS", "Fault", "Program", "make_program"]

_WIDTH = 8
_HALF = torch.float16


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        run: Makes the fault, given a finite tensor of the program; its result has the tensor's shape.
        op: The op to blame; "" if there is no fault.
        kind: The kind.
        phase: "forward" or "backward".
        curable: Whether an override of an op fixes it.
    """

    run: Callable[[Tensor], Tensor]
    op: str = ""
    kind: str = ""
    phase: str = "forward"
    curable: bool = False


def _big(x: Tensor, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((_WIDTH, _WIDTH), value, dtype=dtype, device=x.device)


def _add(x: Tensor, fault: Tensor) -> Tensor:
    return x + fault.float().sum() * 0


def _log_of_zero(x: Tensor) -> Tensor:
    return _add(x, torch.log(x.float() * 0))


def _division(x: Tensor) -> Tensor:
    return _add(x, torch.div(torch.ones(2, 2), torch.zeros(2, 2)))


def _root(x: Tensor) -> Tensor:
    return _add(x, torch.sqrt(x.float().square() * 0 - 1))


def _masked_rows(x: Tensor) -> Tensor:
    return _add(x, torch.softmax(_big(x, -torch.inf), -1))


def _inf_minus_inf(x: Tensor) -> Tensor:
    mask = _big(x, -torch.inf)
    return _add(x, torch.sub(mask, mask))


def _mm(x: Tensor) -> Tensor:
    return _add(x, torch.mm(_big(x, 200.0), _big(x, 200.0)))


def _addmm(x: Tensor) -> Tensor:
    return _add(x, torch.addmm(_big(x, 1.0), _big(x, 200.0), _big(x, 200.0)))


def _linear(x: Tensor) -> Tensor:
    return _add(x, nn.functional.linear(_big(x, 200.0), _big(x, 200.0)))


def _conv(x: Tensor) -> Tensor:
    return _add(x, nn.functional.conv1d(_big(x, 200.0)[None], _big(x, 200.0)[..., None]))


def _mul(x: Tensor) -> Tensor:
    return _add(x, torch.mul(_big(x, 300.0, _HALF), _big(x, 300.0, _HALF)))


def _exp(x: Tensor) -> Tensor:
    return _add(x, torch.exp(_big(x, 12.0, _HALF)))


def _pow(x: Tensor) -> Tensor:
    return _add(x, _big(x, 300.0, _HALF).square())


def _mul_in_place(x: Tensor) -> Tensor:
    return _add(x, _big(x, 300.0, _HALF).mul_(300.0))


def _masked_and_too_large(x: Tensor) -> Tensor:
    scores = torch.where(torch.eye(_WIDTH) > 0, -torch.inf, _big(x, 300.0)).half()
    return _add(x, torch.mul(scores, _big(x, 300.0, _HALF)).relu().clamp(max=1.0))


def _cast_of_autocast(x: Tensor) -> Tensor:
    return _add(x, torch.mm(_big(x, 1e6), _big(x, 1e-6)))


def _half(x: Tensor) -> Tensor:
    return _add(x, _big(x, 1e6).half())


def _to(x: Tensor) -> Tensor:
    return _add(x, _big(x, -1e6).to(_HALF))


def _copy(x: Tensor) -> Tensor:
    return _add(x, _big(x, 0.0, _HALF).copy_(_big(x, 1e6)))


def _backward_of_mm(x: Tensor) -> Tensor:
    weight = _big(x, 10.0).requires_grad_()
    product = torch.mm(weight, weight).float() * 1e4
    return _add(x, torch.autograd.grad(product.sum(), weight)[0])


def _backward_of_root(x: Tensor) -> Tensor:
    zero = torch.zeros(2, requires_grad=True)
    return x + (zero.sqrt() * 0).sum()


def _mask(x: Tensor) -> Tensor:
    scores = x.float().reshape(-1, _WIDTH)[:_WIDTH]
    scores = scores @ scores.t()
    past = torch.ones(scores.shape).tril() > 0
    one = scores.masked_fill(~past, -torch.inf).softmax(-1)
    two = torch.where(past, scores, torch.tensor(-torch.inf)).softmax(-1)
    three = (scores + torch.full(scores.shape, -torch.inf).triu(1)).softmax(-1)
    return x + (one + two + three).sum() * 0


def _lowest(x: Tensor) -> Tensor:
    scores = x.float().reshape(-1, _WIDTH)[:4]
    bias = (torch.ones(4, 4).triu(1) * torch.finfo(torch.float32).min).half()
    return x + ((scores @ scores.t()).half() + bias).softmax(-1).float().sum() * 0


def _attention(x: Tensor) -> Tensor:
    q = x.float().reshape(1, -1, _WIDTH)[:, :4]
    bias = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf)
    attend = nn.functional.scaled_dot_product_attention
    return x + (attend(q, q, q, attn_mask=bias) + attend(q, q, q, attn_mask=bias == 0)).sum() * 0


FAULTS: dict[str, Fault] = {
    "log": Fault(_log_of_zero, "aten::log", "mathematics"),
    "division": Fault(_division, "aten::div", "mathematics"),
    "root": Fault(_root, "aten::sqrt", "mathematics"),
    "masked rows": Fault(_masked_rows, "aten::softmax", "mathematics"),
    "inf - inf": Fault(_inf_minus_inf, "aten::sub", "mathematics"),
    "mm": Fault(_mm, "aten::mm", "overflow in the op", curable=True),
    "addmm": Fault(_addmm, "aten::addmm", "overflow in the op", curable=True),
    "linear": Fault(_linear, "aten::linear", "overflow in the op", curable=True),
    "conv": Fault(_conv, "aten::conv1d", "overflow in the op", curable=True),
    "mul": Fault(_mul, "aten::mul", "overflow in the op", curable=True),
    "exp": Fault(_exp, "aten::exp", "overflow in the op", curable=True),
    "square": Fault(_pow, "aten::square", "overflow in the op", curable=True),
    "mul_": Fault(_mul_in_place, "aten::mul_", "overflow in the op"),
    "masked": Fault(_masked_and_too_large, "aten::mul", "overflow in the op", curable=True),
    "cast of autocast": Fault(_cast_of_autocast, "aten::mm", "overflow in a cast", curable=True),
    "half": Fault(_half, "aten::to", "overflow in a cast"),
    "to": Fault(_to, "aten::to", "overflow in a cast"),
    "copy_": Fault(_copy, "aten::copy_", "overflow in a cast"),
    "backward of mm": Fault(_backward_of_mm, "aten::mm", "overflow in the op", "backward", curable=True),
    "backward of root": Fault(_backward_of_root, "aten::div", "mathematics", "backward"),
    "mask": Fault(_mask),
    "lowest": Fault(_lowest),
    "attention": Fault(_attention),
}


class _Planted(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return self.fault.run(x)


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        model: The model.
        step: Runs its forward in a region, and its backward.
        fault: The planted fault.
        path: The path of the module in which it is.
    """

    model: nn.Module
    step: Callable[[], Tensor]
    fault: Fault
    path: str


def make_program(seed: int, name: str | None = None) -> Program:
    """Makes a program: a tree of modules with a fault at a random depth, under a region of ours or PyTorch's.

    Args:
        seed: The seed of the program.
        name: The fault, a key of FAULTS. None: a random one.
    """
    choose = random.Random(seed)
    torch.manual_seed(seed)
    fault = FAULTS[name or choose.choice(list(FAULTS))]
    planted = _Planted(fault)
    model: nn.Module = planted
    for _ in range(choose.randint(1, 4)):
        kind = choose.randrange(3)
        if kind == 0:
            model = _Residual(model)
        else:
            around = [_layer(choose) for _ in range(choose.randint(0, 3))]
            around.insert(choose.randint(0, len(around)), model)
            model = nn.Sequential(*around)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), model, nn.LayerNorm(_WIDTH))
    path = next(name for name, module in model.named_modules() if module is planted)
    x = torch.randn(2, 5, _WIDTH)
    region = choose.choice([tp.my_autocast, torch.autocast])
    needs_half = fault.kind.startswith("overflow") or choose.random() < 0.5
    dtype = _HALF if needs_half else torch.bfloat16

    def step() -> Tensor:
        with region("cpu", dtype):
            loss: Tensor = model(x).float().pow(2).mean()
        loss.backward()
        return loss.detach()

    return Program(model, step, fault, path)


def _layer(choose: random.Random) -> nn.Module:
    return choose.choice(
        [
            lambda: nn.Linear(_WIDTH, _WIDTH),
            nn.GELU,
            nn.ReLU,
            lambda: nn.LayerNorm(_WIDTH),
            lambda: nn.Softmax(-1),
            lambda: nn.Dropout(0.2),
            lambda: _Residual(nn.Linear(_WIDTH, _WIDTH)),
        ]
    )()
