"""The models that are timed, their steps, and small versions of typical programs, each with its own regions.

Each model represents a kind of cost: an MLP of many small layers for casts of weights; a Llama-like stack for
activations with several consumers (q, k, v; gate, up); an LSTM for ops that take many weights; a conv net for casts of
images. The programs train them with an optimizer, with several batches to a step, with checkpoints, with adapters on
frozen weights (LoRA), with an average of the weights that is evaluated (EMA), and generate with cached keys and values.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from benchmarks.cases import LOW, Settings

#: Makes the region of a forward.
Region = Callable[[], AbstractContextManager[Any]]
Step = Callable[[], Any]


class MLP(nn.Module):
    """Linear layers with ReLU between them, all of one width."""

    def __init__(self, layers: int = 20, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class RMSNorm(nn.Module):
    """Llama's norm, in the dtype of its input. The residual stream stays float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Attention with separate projections of queries, keys and values, which are rotated by position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        head = width // heads
        angles = torch.outer(torch.arange(tokens), 10000.0 ** -(torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        return self.join(functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True))

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values: [batch, tokens, width] to [batch, heads, tokens, width / heads]."""
        q, k, v = (projection(x).unflatten(-1, (self.heads, -1)) for projection in (self.q, self.k, self.v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates queries or keys by position, in the dtype of the angles."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def join(self, x: Tensor) -> Tensor:
        """Concatenates the outputs of the heads and projects them."""
        return self.o(x.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and a gated feed-forward part, each with a norm before it and a residual connection."""

    attention: type[Attention] = Attention

    def __init__(self, width: int, hidden: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = RMSNorm(width), RMSNorm(width)
        self.attend = self.attention(width, heads, tokens)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before_attention(x))
        y = self.before_feed_forward(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A stack of blocks on hidden states, with a norm and a projection at the end."""

    block: type[Block] = Block

    def __init__(self, layers: int, width: int, hidden: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block(width, hidden, heads, tokens) for _ in range(layers)))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


@cache
def _onednn_refuses_lstm() -> bool:
    """Whether oneDNN has no LSTM in the low dtype for this processor, as without AVX-512."""
    try:
        with torch.random.fork_rng(devices=[]), tp.stock_autocast("cpu", LOW):
            nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        return True
    return False


class LSTM(nn.Module):
    """An LSTM with two layers, of PyTorch's own ops where oneDNN has none. Returns the output of the last one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.refused = _onednn_refuses_lstm()

    def forward(self, x: Tensor) -> Tensor:
        was_on = torch._C._get_mkldnn_enabled()
        if self.refused:
            torch._C._set_mkldnn_enabled(False)
        try:
            return self.lstm(x)[0]  # type: ignore[no-any-return]
        finally:
            torch._C._set_mkldnn_enabled(was_on)


class ConvNet(nn.Module):
    """Convolutions with batch norm and ReLU, then a linear layer on the mean over all pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 2 * width)
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for outputs in widths[1:])
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Any:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class _CastBefore(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).to(LOW)

    def forward(self, x: Tensor) -> Any:
        return self.net(x.to(LOW))


def cast_before(net: nn.Module) -> nn.Module:
    """Returns a copy of a model in low precision, which casts only its input."""
    return _CastBefore(net)


# Models with their inputs


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its input and its target."""

    net: nn.Module
    x: Tensor
    target: Tensor


def _llama(settings: Settings, kind: type[Llama] = Llama) -> tuple[Llama, Tensor]:
    layers, width, hidden, heads, batch, tokens = 4, 128, 344, 4, 2, 32
    if settings.tiny:
        layers, width, hidden, tokens = 2, 32, 88, 16
    elif settings.counted:  # the stand-in is slow
        width, hidden, tokens = 64, 176, 16
    elif settings.device == "cuda":
        width, hidden, heads, batch, tokens = 1024, 2816, 16, 4, 512
    return kind(layers, width, hidden, heads, tokens), torch.randn(batch, tokens, width)


def _lstm(settings: Settings) -> tuple[nn.Module, Tensor]:
    width = 8 if settings.tiny else 64
    return LSTM(width), torch.randn(4, 16, width)


def _conv_net(settings: Settings) -> tuple[nn.Module, Tensor]:
    width, side = (4, 8) if settings.tiny else (16, 32)
    return ConvNet(width), torch.randn(4, 3, side, side)


#: The models by name. Each function returns a model and an input.
MODELS: Mapping[str, Callable[[Settings], tuple[nn.Module, Tensor]]] = {
    "MLP": lambda settings: (MLP(3 if settings.tiny else 20), torch.randn(32, 32)),
    "Llama-like": _llama,
    "LSTM": _lstm,
    "conv net": _conv_net,
}


def subject(name: str, settings: Settings) -> Subject:
    """Makes a model of `MODELS` and its inputs. Every call returns the same values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, x = MODELS[name](settings)
        state = copy.deepcopy(net.state_dict())
        with torch.no_grad():
            target = torch.randn_like(net(x))
        net.load_state_dict(state)  # the forward has updated the running means of batch norm
    device = settings.device
    return Subject(net.to(device), x.to(device), target.to(device))


# Steps


def forward(net: Callable[[Tensor], Tensor], x: Tensor, region: Region = nullcontext, graph: bool = False) -> Step:
    """Returns a forward in its own region, without gradients, or with a graph that the step drops."""

    def step() -> Tensor:
        with torch.set_grad_enabled(graph), region():
            return net(x)

    return step


def train(subject: Subject, region: Region = nullcontext) -> Step:
    """Returns a training step without the optimizer: forward, loss, backward. It then frees the gradients."""
    net, x, target = subject.net, subject.x, subject.target

    def step() -> None:
        with region():
            # The cast of the loss is written out; autocast computes mse_loss in float32 too.
            loss = functional.mse_loss(net(x).float(), target)
        loss.backward()
        net.zero_grad(set_to_none=True)

    return step


def evaluate(net: Callable[[Tensor], Tensor], x: Tensor, region: Region = nullcontext) -> Step:
    """Returns an evaluation loop without gradients that enters a region for each of eight batches."""
    one = forward(net, x, region)
    return lambda: [one() for _ in range(8)]


@dataclass(frozen=True, slots=True)
class Program:
    """A program, ready to run.

    Attributes:
        step: Returns a step of the program in a given kind of region. A step frees all memory that it allocates.
        weights: All weights.
    """

    step: Callable[[Region], Step]
    weights: Sequence[Tensor]


def program(name: str, settings: Settings) -> Program:
    """Makes a program of `PROGRAMS`. Every call returns the same values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PROGRAMS[name](settings)


def _model(settings: Settings, name: str = "Llama-like") -> tuple[Any, Tensor]:
    net, x = MODELS[name](settings)
    return net.to(settings.device), x.to(settings.device)


# Training


def _training(
    net: nn.Module,
    x: Tensor,
    forward: Callable[[Tensor], Tensor] | None = None,
    batches: int = 1,
    after: Callable[[Region], Any] | None = None,
) -> Program:
    """A training step with a stateless optimizer, so that the first step is like the others."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)

    def one(region: Region) -> None:
        for _ in range(batches):
            with region():
                loss = (forward or net)(x).float().square().mean()
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(region)

    return Program(lambda region: partial(one, region), list(net.parameters()))


def _checkpointed(settings: Settings, reentrant: bool) -> Program:
    net, x = _model(settings)
    x.requires_grad_(reentrant)

    def forward(x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return net.head(net.norm(x))  # type: ignore[no-any-return]

    return _training(net, x, forward)


class _Adapted(nn.Module):
    """A frozen layer and a trained low-rank layer in parallel."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def _lora(settings: Settings) -> Program:
    net, x = _model(settings)
    net.requires_grad_(False)
    for module in net.modules():
        if isinstance(module, Attention):
            module.q, module.v = _Adapted(module.q), _Adapted(module.v)  # type: ignore[assignment]
    return _training(net.to(settings.device), x)


def _ema(settings: Settings) -> Program:
    net, x = _model(settings)
    average = copy.deepcopy(net).requires_grad_(False)

    def after(region: Region) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 0.1)
            with region():
                average(x)

    made = _training(net, x, after=after)
    return Program(made.step, [*made.weights, *average.parameters()])


# Evaluation and generation


def _without_gradients(
    net: nn.Module, run: Callable[[], Any], no_gradients: Callable[[], AbstractContextManager[Any]] = torch.no_grad
) -> Program:
    """Three runs, each in its own region."""

    def step(region: Region) -> None:
        with no_gradients():
            for _ in range(3):
                with region():
                    run()

    return Program(lambda region: partial(step, region), list(net.parameters()))


def _evaluation(settings: Settings, name: str, mode: Any) -> Program:
    net, x = _model(settings, name)
    return _without_gradients(net.eval(), lambda: net(x), mode)


class _CachedAttention(Attention):
    """Attention for one token at a time, with cached keys and values."""

    past: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        if self.past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.past, (k, v), strict=True))
        self.past = k, v
        return self.join(functional.scaled_dot_product_attention(q, k, v))


class _CachedBlock(Block):
    attention = _CachedAttention


class _Decoder(Llama):
    block = _CachedBlock


def _generation(settings: Settings) -> Program:
    decoder, x = _llama(settings, _Decoder)
    net, x = decoder.to(settings.device), x[:1, :1].to(settings.device)
    attentions = [module for module in net.modules() if isinstance(module, _CachedAttention)]

    def run() -> None:
        token = x
        for _ in range(4 if settings.tiny else 8):
            token = net(token).float()
        for attention in attentions:
            attention.past = None

    return _without_gradients(net, run)


class _Slices(nn.Module):
    """A weight of which each position uses the slice of the positions before it."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        for length in range(1, len(self.weight) + 1):
            x = x + (x @ self.weight[:length].t()).float() @ self.weight[:length]
        return x


def _growing_slices(settings: Settings) -> Program:
    length, width = (12, 32) if settings.tiny else (32, 64)
    net, x = _Slices(length, width).to(settings.device), torch.randn(2, width).to(settings.device)
    return _without_gradients(net, lambda: net(x))


#: The programs by name.
PROGRAMS: Mapping[str, Callable[[Settings], Program]] = {
    "Llama-like, training": lambda settings: _training(*_model(settings)),
    "Llama-like, four batches to a step": lambda settings: _training(*_model(settings), batches=4),
    "Llama-like, checkpoints": partial(_checkpointed, reentrant=False),
    "Llama-like, reentrant checkpoints": partial(_checkpointed, reentrant=True),
    "Llama-like, LoRA": _lora,
    "Llama-like, EMA": _ema,
    "Llama-like, no_grad": partial(_evaluation, name="Llama-like", mode=torch.no_grad),
    "Llama-like, inference mode": partial(_evaluation, name="Llama-like", mode=torch.inference_mode),
    "Llama-like, generation with cached keys": _generation,
    "growing slices": _growing_slices,
    "conv net, training": lambda settings: _training(*_model(settings, "conv net")),
    "conv net, no_grad": partial(_evaluation, name="conv net", mode=torch.no_grad),
    "LSTM, training": lambda settings: _training(*_model(settings, "LSTM")),
}
