"""Small versions of typical programs: training steps, evaluation and generation, each with its own regions.

    Llama-like    the stack of benchmarks/models.py: with an optimizer, with several batches to a step, with
                  checkpoints, with adapters on frozen weights (LoRA), with an average of the weights that is evaluated
                  (EMA); its generation with a cache of keys and values
    growing slices  one weight; each step of a generation uses a longer slice of it
    conv net, LSTM  the models of benchmarks/models.py
    HF            Llama and BERT of transformers, from small configurations, if transformers is installed

The sizes are the smallest that show the behaviour, because the suite measures kernels and bytes.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks import models
from benchmarks.cases import Settings
from benchmarks.models import Region, Step

__all__ = ["PROGRAMS", "Program", "missing", "program"]


@dataclass(frozen=True, slots=True)
class Program:
    """A program, ready to run.

    Attributes:
        step: Returns a step of the program in a given kind of region. A step frees all memory that it allocates.
        weights: All weights.
    """

    step: Callable[[Region], Step]
    weights: Sequence[Tensor]


_Maker = Callable[[Settings], Program]


def program(name: str, settings: Settings) -> Program:
    """Makes a program of `PROGRAMS`. Every call returns the same values.

    Args:
        name: A key of `PROGRAMS`.
        settings: The device, and whether the program is tiny.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PROGRAMS[name](settings)


def missing() -> list[str]:
    """Returns the names of the programs that cannot run, because transformers is not installed."""
    return [] if importlib.util.find_spec("transformers") else [name for name in PROGRAMS if name.startswith("HF ")]


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


def _shape(settings: Settings) -> models.LlamaShape:
    layers, width = (2, 32) if settings.tiny else (4, 64)
    return models.LlamaShape(layers, width, heads=4, hidden=width * 11 // 4, batch=2, tokens=16)


def _llama(settings: Settings) -> tuple[models.Llama, Tensor]:
    shape = _shape(settings)
    net = models.Llama(shape).to(settings.device)
    return net, torch.randn(shape.batch, shape.tokens, shape.width).to(settings.device)


def _llama_training(settings: Settings, batches: int = 1) -> Program:
    return _training(*_llama(settings), batches=batches)


def _checkpointed(settings: Settings, reentrant: bool) -> Program:
    net, x = _llama(settings)
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
    net, x = _llama(settings)
    net.requires_grad_(False)
    for module in net.modules():
        if isinstance(module, models.Attention):
            module.q, module.v = _Adapted(module.q), _Adapted(module.v)  # type: ignore[arg-type]
    return _training(net.to(settings.device), x)


def _ema(settings: Settings) -> Program:
    net, x = _llama(settings)
    average = copy.deepcopy(net).requires_grad_(False)

    def after(region: Region) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 0.1)
            with region():
                average(x)

    made = _training(net, x, after=after)
    return Program(made.step, [*made.weights, *average.parameters()])


def _conv_net(settings: Settings) -> tuple[models.ConvNet, Tensor]:
    width, side = (8, 16) if settings.tiny else (16, 32)
    return models.ConvNet(width).to(settings.device), torch.randn(4, 3, side, side).to(settings.device)


def _lstm(settings: Settings) -> Program:
    width = 16 if settings.tiny else 32
    return _training(models.LSTM(width).to(settings.device), torch.randn(4, 8, width).to(settings.device))


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


def _evaluation(settings: Settings, make: Callable[[Settings], tuple[nn.Module, Tensor]], mode: Any) -> Program:
    net, x = make(settings)
    return _without_gradients(net.eval(), lambda: net(x), mode)


class _CachedAttention(models.Attention):
    """Attention for one token at a time, with cached keys and values."""

    past: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        if self.past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.past, (k, v), strict=True))
        self.past = k, v
        return self.join(functional.scaled_dot_product_attention(q, k, v))


class _CachedBlock(models.Block):
    attention = _CachedAttention


class _Decoder(models.Llama):
    block = _CachedBlock


def _generation(settings: Settings) -> Program:
    shape = _shape(settings)
    net, x = _Decoder(shape).to(settings.device), torch.randn(1, 1, shape.width).to(settings.device)
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


# Transformers


def _of_transformers(kind: str, settings: Settings) -> Any:
    transformers = importlib.import_module("transformers")
    width = 32 if settings.tiny else 64
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **sizes)
    name = "LlamaForCausalLM" if kind == "Llama" else "BertForMaskedLM"
    return getattr(transformers, name)(config).to(settings.device)


def _tokens(settings: Settings) -> Tensor:
    return torch.arange(32).reshape(2, 16).to(settings.device)


def _hf_training(kind: str, settings: Settings) -> Program:
    net, tokens = _of_transformers(kind, settings), _tokens(settings)
    return _training(net.train(), tokens, lambda ids: net(input_ids=ids).logits)


def _hf_generation(settings: Settings) -> Program:
    net, tokens = _of_transformers("Llama", settings).eval(), _tokens(settings)
    generate = partial(net.generate, tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0)
    return _without_gradients(net, partial(generate, max_new_tokens=4, min_new_tokens=4))


#: The programs by name.
PROGRAMS: Mapping[str, _Maker] = {
    "Llama-like, training": _llama_training,
    "Llama-like, four batches to a step": partial(_llama_training, batches=4),
    "Llama-like, checkpoints": partial(_checkpointed, reentrant=False),
    "Llama-like, reentrant checkpoints": partial(_checkpointed, reentrant=True),
    "Llama-like, LoRA": _lora,
    "Llama-like, EMA": _ema,
    "Llama-like, no_grad": partial(_evaluation, make=_llama, mode=torch.no_grad),
    "Llama-like, inference mode": partial(_evaluation, make=_llama, mode=torch.inference_mode),
    "Llama-like, generation with cached keys": _generation,
    "growing slices": _growing_slices,
    "conv net, training": lambda settings: _training(*_conv_net(settings)),
    "conv net, no_grad": partial(_evaluation, make=_conv_net, mode=torch.no_grad),
    "LSTM, training": _lstm,
    "HF Llama, training": partial(_hf_training, "Llama"),
    "HF BERT, training": partial(_hf_training, "Bert"),
    "HF Llama, generation": _hf_generation,
}
