"""The models of torch_promote/bench/nets.py with the casts written in the code: the lower limit for autocast.

The weights are float32 master weights. Each is cast once per step, at its use. An activation is cast once for all its
consumers, before the first one, where autocast would cast it. So the outputs have the same bits as under autocast.
Everything else (the layers, the calls of modules) costs the same as in the models without casts.

`cast_before` returns a model whose weights are cast in advance, so that a step only casts activations.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_promote.bench import nets
from torch_promote.bench.cases import LOW

__all__ = ["LSTM", "MLP", "ConvNet", "Llama", "cast_before"]


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(LOW)
        return functional.linear(x, self.weight.to(LOW), bias)


class _Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight.to(LOW), None, self.stride, self.padding)


def _projection(self: Any, inputs: int, outputs: int) -> nn.Module:
    return _Linear(inputs, outputs, bias=False)


class MLP(nets.MLP):
    """Casts the input; everything after it is in low precision."""

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Makes a layer that casts its weights."""
        return _Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return super().forward(x.to(LOW))


class _Attention(nets.Attention):
    linear = _projection

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(LOW)
        q, k, v = (self.split(projection(x)) for projection in (self.q, self.k, self.v))
        if self.rotary:
            q, k = self.rotate(q).to(LOW), self.rotate(k).to(LOW)
        return self.join(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class _FeedForward(nets.FeedForward):
    linear = _projection

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(LOW))


class _Block(nets.Block):
    attention = _Attention
    feed_forward = _FeedForward


class Llama(nets.Llama):
    """Casts the input of q, k and v once, the input of gate and up once, and rotated queries and keys."""

    block = _Block
    linear = _projection

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.head(self.norm(self.blocks(x)).to(LOW))  # type: ignore[no-any-return]


class LSTM(nets.LSTM):
    """Casts the input and the weights; the initial state is in low precision."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        lstm = self.lstm
        state = torch.zeros(lstm.num_layers, x.shape[0], lstm.hidden_size, dtype=LOW, device=x.device)
        weights = [weight.to(LOW) for weight in lstm._flat_weights if weight is not None]
        output: Tensor = torch._VF.lstm(  # type: ignore[attr-defined]
            x.to(LOW), (state, state), weights, True, lstm.num_layers, 0.0, self.training, False, True
        )[0]
        return output


class ConvNet(nets.ConvNet):
    """Casts the images. Batch norm takes low-precision input with float32 weights, as under autocast."""

    def conv(self, inputs: int, outputs: int) -> nn.Module:
        """Makes a convolution that casts its weight."""
        return _Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Makes a layer that casts its weights."""
        return _Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Any:  # noqa: D102
        return super().forward(x.to(LOW))


def cast_before(net: nn.Module) -> nn.Module:
    """Returns a copy of a model with the weights that autocast casts already cast.

    Args:
        net: A model of this file.
    """
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LSTM):
            module.to(LOW)
        if isinstance(module, _Linear):  # avoids calls of `to` that do nothing but take time
            module.forward = types.MethodType(nn.Linear.forward, module)  # type: ignore[method-assign]
        elif isinstance(module, _Conv2d):
            module.forward = types.MethodType(nn.Conv2d.forward, module)  # type: ignore[method-assign]
    return net
