"""Eleven models, each written twice: a reference, and a port of it in which a bug can be planted; and the demo's GPT.

A comment `#: eps, scale` marks the line of a call that these bugs change, in the port, and the line of the reference
that computes the same.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

import port_gpt
from gpt.model import GPT

__all__ = ["BUGS", "PORTS", "Port", "guilty_lines"]

D, H, T, N = 32, 4, 12, 3  # width, heads, length, batch
BUGS = (
    *("eps", "base", "activation", "norm_order", "scale", "mask", "transposed", "swapped", "bias", "island"),
    *("dropout", "biased"),
)


#: How bugs spoil a weight: its squares are transposed, its halves swapped, its elements in another order.
SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda one: one.reshape(-1, one.shape[-1], one.shape[-1]).mT.reshape(one.shape),
    "swapped": lambda one: one.roll(len(one) // 2, 0),
    "bias": lambda one: one.flip(0),
}


class Ported(nn.Module):
    """A module that knows which bug is planted in it."""

    #: Its names and those of the reference, "*" for the number of a layer: "qkv=q,k,v" (joined), "a=b:T" (transposed),
    #: "k=qkv:1" (the second third). And the weights that bugs spoil.
    names: ClassVar[str]
    spoiled: ClassVar[str]

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug

    def pick(self, bug: str, right: object, wrong: object) -> object:
        return wrong if self.bug == bug else right

    def load(self, known: dict[str, Tensor]) -> None:
        """Loads the weights of the reference."""
        names, spoiled = (dict(one.split("=") for one in table.split()) for table in (self.names, self.spoiled))
        found = {}
        for name, weight in self.state_dict().items():
            layer = re.search(r"\.(\d)\.", name)
            starred = name if layer is None else name.replace(layer[0], ".*.", 1)
            module, _, end = starred.rpartition(".")
            key, end = (starred, "") if starred in names else (module, f".{end}")
            parts = []
            for source in names[key].replace("*", layer[1] if layer else "").split(","):
                path, _, how = source.partition(":")
                one = known[path + end]
                parts.append(one.mT if how == "T" else one.chunk(3)[int(how)] if how else one)
            found[name] = torch.cat(parts).reshape(weight.shape)
            if name in (at := spoiled.get(self.bug, ""), f"{at}.weight", f"{at}.bias"):
                found[name] = SPOILED[self.bug](found[name])
        self.load_state_dict(found)


class Stack(Ported):
    """An embedding, and two layers, which get what `context` makes of the inputs; a bug is in the second."""

    def __init__(self, embed: nn.Module, layers: Iterable[nn.Module], last: nn.Module, bug: str = "") -> None:
        super().__init__(bug)
        self.embed, self.layers, self.last = embed, nn.ModuleList(layers), last

    def start(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def context(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs[1:]

    def forward(self, *inputs: Tensor) -> Tensor:
        x, context = self.start(inputs[0]), self.context(*inputs)
        for layer in self.layers:
            x = layer(x, *context)
        return self.last(x)


def linear(inputs: int = D, outputs: int = D, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def in_bfloat16(layer: nn.Module, x: Tensor) -> Tensor:
    return layer.to(torch.bfloat16)(x.bfloat16()).float()  #: island


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], H, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


class RMSNorm(nn.Module):
    """The norm of Llama and T5, as transformers has it."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(D)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)  #: eps, biased
        return self.weight * x  #: eps, biased


class NormByHand(Ported):
    """A layer norm in steps, in which bugs can be planted."""

    def __init__(self, bug: str, eps: float = 1e-5, wrong_eps: float = 1e-3) -> None:
        super().__init__(bug)
        self.weight, self.bias = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))
        self.eps = self.pick("eps", eps, wrong_eps)

    def forward(self, x: Tensor) -> Tensor:
        c = x - x.mean(-1, keepdim=True)
        variance = c.var(-1, keepdim=True, unbiased=self.bug == "biased")  #: biased
        return c * (variance + self.eps).rsqrt() * self.weight + self.bias  #: eps, biased, norm_order


# --- Llama: the norm, rotary embedding and attention of transformers; the port is fused, with F.rms_norm


def rotate_half(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(1e-5), RMSNorm(1e-5)
        self.q_proj, self.o_proj = linear(), linear()
        self.k_proj, self.v_proj = linear(D, D // 2), linear(D, D // 2)
        self.gate_proj, self.up_proj, self.down_proj = linear(D, 2 * D), linear(D, 2 * D), linear(2 * D)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        q = self.q_proj(h)  #: bias
        q, k, v = q, self.k_proj(h), self.v_proj(h)
        q, k, v = (one.view(*x.shape[:2], -1, D // H).transpose(1, 2) for one in (q, k, v))
        q = q * cos + rotate_half(q) * sin  #: base
        k = k * cos + rotate_half(k) * sin
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(2, 3) * (D // H) ** -0.5  #: scale
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min).triu(1)
        a = F.dropout((scores + mask).softmax(-1) @ v, 0.1, self.training)  #: mask, dropout, scale
        x = x + self.o_proj(joined(a))  #: transposed, norm_order
        h = self.post_attention_layernorm(x)
        gate, up = self.gate_proj(h), self.up_proj(h)
        h = F.silu(gate) * up  #: activation, swapped
        return x + self.down_proj(h)  #: island


class LlamaPortBlock(Ported):
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.wqkv, self.wo, self.w13, self.w2 = linear(D, 2 * D), linear(), linear(D, 4 * D), linear(2 * D)
        self.scales = nn.ParameterList(torch.empty(D) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = F.rms_norm(x, (D,), self.scales[0], self.pick("eps", 1e-5, 1e-3))  #: eps
        qkv = self.wqkv(h)  #: bias
        q, k, v = qkv.split([D, D // 2, D // 2], -1)
        q, k, v = (one.unflatten(-1, (-1, D // H)).transpose(1, 2) for one in (q, k, v))
        q, k = self.rotated(q, angles), self.rotated(k, angles)
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.pick("mask", 0, 1))
        scale = self.pick("scale", None, 1.0)
        a = F.scaled_dot_product_attention(q, k, v, keep, scale=scale, enable_gqa=True)  #: scale, mask
        a = F.dropout(a, 0.1, self.training and self.bug != "dropout")  #: dropout
        x = self.pick("norm_order", x, h) + self.wo(joined(a))  #: transposed, norm_order
        gate, up = self.w13(F.rms_norm(x, (D,), self.scales[1], 1e-5)).chunk(2, -1)
        h = (F.gelu(gate) if self.bug == "activation" else F.silu(gate)) * up  #: activation, swapped
        return x + (in_bfloat16(self.w2, h) if self.bug == "island" else self.w2(h))  #: island

    @staticmethod
    def rotated(x: Tensor, angles: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)  #: base


class Llama(Stack):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(50, D), (LlamaBlock() for _ in range(2)), RMSNorm(1e-5))

    def context(self, ids: Tensor) -> tuple[Tensor, ...]:
        inverse = 1 / 10000 ** (torch.arange(0, D // H, 2).float() / (D // H))  #: base
        angles = torch.arange(ids.shape[1]).float()[:, None] * inverse  #: base
        angles = torch.cat((angles, angles), -1)  #: base
        return angles.cos(), angles.sin()  #: base

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) @ self.embed.weight.t()


class LlamaPort(Stack):
    names = (
        "embed=embed last=last layers.*.scales.0=layers.*.input_layernorm.weight "
        "layers.*.scales.1=layers.*.post_attention_layernorm.weight layers.*.wo=layers.*.o_proj "
        "layers.*.w2=layers.*.down_proj "
        "layers.*.wqkv=layers.*.q_proj,layers.*.k_proj,layers.*.v_proj layers.*.w13=layers.*.gate_proj,layers.*.up_proj"
    )
    spoiled = "transposed=layers.1.wo.weight swapped=layers.1.w13 bias=layers.1.wqkv.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(nn.Embedding(50, D), map(LlamaPortBlock, ("", bug)), nn.RMSNorm(D, 1e-5), bug)

    def context(self, ids: Tensor) -> tuple[Tensor, ...]:
        powers = self.pick("base", 10000.0, 500.0) ** (-torch.arange(0, D // H, 2) / (D // H))  #: base
        return (torch.outer(torch.arange(ids.shape[1]), powers),)  #: base

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(super().forward(ids), self.embed.weight)


# --- BERT: post-norm with a mask of padding; the port is one module of functions


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (linear() for _ in range(4))
        self.attention_norm, self.output_norm = nn.LayerNorm(D, 1e-12), nn.LayerNorm(D, 1e-12)
        self.intermediate, self.output = linear(D, 2 * D), linear(2 * D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.query(x)  #: bias
        k = self.key(x)  #: swapped
        v = self.value(x)
        scores = heads(q) @ heads(k).transpose(-1, -2) / math.sqrt(D // H)  #: scale, swapped
        a = (scores + mask).softmax(-1)  #: mask
        a = F.dropout(a @ heads(v), 0.1, self.training)  #: dropout, mask, scale
        a = self.dense(joined(a))  #: transposed
        x = self.attention_norm(x + a)  #: norm_order, eps, biased
        h = F.gelu(self.intermediate(x))  #: activation
        return self.output_norm(x + self.output(h))  #: island


class BertPortLayer(Ported):
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.q, self.k, self.v, self.o = (linear() for _ in range(4))
        self.w1, self.w2, self.norm1 = linear(D, 2 * D), linear(2 * D), NormByHand(bug, 1e-12, 1e-2)
        self.norm2 = NormByHand("", 1e-12)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q = heads(self.q(x))  #: bias
        k, v = heads(self.k(x)), heads(self.v(x))  #: swapped
        keep = self.pick("mask", keep, keep.roll(1, -1))
        a = F.scaled_dot_product_attention(q, k, v, keep, scale=self.pick("scale", None, 1.0))  #: scale, mask, swapped
        a = F.dropout(a, 0.1, self.training and self.bug != "dropout")  #: dropout
        a = self.o(joined(a))  #: transposed
        x = x + self.norm1(a) if self.bug == "norm_order" else self.norm1(x + a)  #: norm_order
        h = self.w1(x)
        h = F.relu(h) if self.bug == "activation" else 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))  #: activation
        h = in_bfloat16(self.w2, h) if self.bug == "island" else self.w2(h)  #: island
        return self.norm2(x + h)


class Bert(Stack):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(50, D), (BertLayer() for _ in range(2)), nn.Identity())

    def context(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, ...]:
        return ((1.0 - attention[:, None, None].float()) * torch.finfo(torch.float32).min,)


class BertPort(Stack):
    names = (
        "embed=embed layers.*.q=layers.*.query layers.*.k=layers.*.key layers.*.v=layers.*.value "
        "layers.*.o=layers.*.dense layers.*.w1=layers.*.intermediate layers.*.w2=layers.*.output "
        "layers.*.norm1=layers.*.attention_norm layers.*.norm2=layers.*.output_norm"
    )
    spoiled = "transposed=layers.1.o.weight swapped=layers.1.k.weight bias=layers.1.q.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(nn.Embedding(50, D), map(BertPortLayer, ("", bug)), nn.Identity(), bug)

    def context(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, ...]:
        return (attention[:, None, None].bool(),)


# --- T5: a norm without a mean, relative positions, attention without a scale


class T5Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(bias=False) for _ in range(4))
        self.wi_0, self.wi_1, self.wo = linear(D, 2 * D, False), linear(D, 2 * D, False), linear(2 * D, D, False)
        self.norms = nn.ModuleList((RMSNorm(1e-6), RMSNorm(1e-6)))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = heads(self.q(h)), heads(self.k(h)), heads(self.v(h))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores = scores + bias  #: mask, scale
        a = F.dropout(scores.float().softmax(-1), 0.1, self.training)  #: dropout, mask, scale
        x = x + self.o(joined(torch.matmul(a, v)))  #: transposed, norm_order, dropout
        h = self.norms[1](x)
        gate = F.gelu(self.wi_0(h), approximate="tanh")  #: activation, swapped
        return x + self.wo(gate * self.wi_1(h))  #: island, swapped


class T5PortLayer(Ported):
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.qkv, self.out = linear(D, 3 * D, False), linear(bias=False)
        self.up, self.down = linear(D, 4 * D, False), linear(2 * D, D, False)
        self.scales = nn.Parameter(torch.empty(2, D))

    def normed(self, x: Tensor, at: int) -> Tensor:
        if self.bug == "biased" and at == 0:
            return x * (x.var(-1, keepdim=True) + 1e-6).rsqrt() * self.scales[at]  #: biased
        return F.rms_norm(x, (D,), self.scales[at], 1e-2 if self.bug == "eps" and at == 0 else 1e-6)  #: eps

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.normed(x, 0)
        q, k, v = self.qkv(h).view(N, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        bias = bias.roll(1, -1) if self.bug == "mask" else bias  #: mask
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k)
        logits = logits / math.sqrt(D // H) if self.bug == "scale" else logits  #: scale
        a = torch.softmax(logits + bias, -1)  #: scale, mask
        a = F.dropout(a, 0.1, self.training and self.bug != "dropout")  #: dropout
        a = torch.einsum("bhqk,bhkd->bqhd", a, v)  #: dropout
        x = self.pick("norm_order", x, h) + self.out(a.flatten(2))  #: transposed, norm_order
        gate, up = self.up(self.normed(x, 1)).tensor_split(2, -1)
        gate = F.silu(gate) if self.bug == "activation" else F.gelu(gate, approximate="tanh")  #: activation, swapped
        h = gate * up  #: activation, swapped
        return x + (in_bfloat16(self.down, h) if self.bug == "island" else self.down(h))  #: island


class T5(Stack):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(50, D), (T5Layer() for _ in range(2)), RMSNorm(1e-6))
        self.relative = nn.Embedding(2 * T, H)

    def context(self, ids: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(ids.shape[1])
        return (self.relative(places[None] - places[:, None] + T).permute(2, 0, 1)[None],)  #: base


class T5Port(Stack):
    names = (
        "embed=embed distances=relative.weight last=last layers.*.qkv=layers.*.q,layers.*.k,layers.*.v "
        "layers.*.out=layers.*.o layers.*.up=layers.*.wi_0,layers.*.wi_1 layers.*.down=layers.*.wo "
        "layers.*.scales=layers.*.norms.0.weight,layers.*.norms.1.weight"
    )
    spoiled = "transposed=layers.1.out.weight swapped=layers.1.up.weight"

    def __init__(self, bug: str) -> None:
        super().__init__(nn.Embedding(50, D), map(T5PortLayer, ("", bug)), nn.RMSNorm(D, 1e-6), bug)
        self.distances = nn.Parameter(torch.empty(2 * T, H))

    def context(self, ids: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(ids.shape[1])
        apart = places - places.unsqueeze(1) + self.pick("base", T, T - 1)  #: base
        return (self.distances[apart].movedim(-1, 0),)  #: base


# --- ViT: patches by a convolution; the port cuts them and multiplies


class ViTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D, 1e-6), nn.LayerNorm(D, 1e-6)
        self.qkv, self.proj = linear(D, 3 * D), linear()
        self.fc1, self.fc2 = linear(D, 2 * D), linear(2 * D)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        h = self.norm1(x)  #: eps, biased
        qkv = self.qkv(h)  #: swapped, bias
        q, k, v = qkv.reshape(n, t, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * (D // H) ** -0.5  #: scale, swapped, bias
        a = (q @ k.transpose(-2, -1)).softmax(-1)  #: scale, swapped
        a = F.dropout(a, 0.1, self.training)  #: dropout
        x = x + self.proj((a @ v).transpose(1, 2).reshape(n, t, D))  #: transposed, norm_order
        h = F.gelu(self.fc1(self.norm2(x)))  #: activation
        return x + self.fc2(h)  #: island


class ViTPortBlock(Ported):
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.q, self.k, self.v, self.o, self.a, self.b = (linear(*size) for size in [(D, D)] * 4 + [(D, 64), (64, D)])
        self.n1, self.n2 = NormByHand(bug, 1e-6, 1e-2), nn.LayerNorm(D, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        q = self.q(h)  #: swapped, bias
        q, k, v = heads(q), heads(self.k(h)), heads(self.v(h))
        logits = q @ k.mT * self.pick("scale", (D // H) ** -0.5, D**-0.5)  #: scale, bias, swapped
        a = F.dropout(logits.softmax(-1), 0.1, self.training and self.bug != "dropout")  #: dropout
        x = self.pick("norm_order", x, h) + self.o(joined(a @ v))  #: transposed, norm_order
        h = self.a(self.n2(x))
        h = F.gelu(h, approximate="tanh") if self.bug == "activation" else F.gelu(h)  #: activation
        return x + (in_bfloat16(self.b, h) if self.bug == "island" else self.b(h))  #: island


class ViT(Stack):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, D, 4, 4), (ViTBlock() for _ in range(2)), nn.Identity())
        self.cls_token, self.places = nn.Parameter(torch.empty(1, 1, D)), nn.Parameter(torch.empty(1, 17, D))

    def start(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        return torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.places


class ViTPort(Stack):
    names = (
        "embed=embed first=cls_token places=places layers.*.q=layers.*.qkv:0 layers.*.k=layers.*.qkv:1 "
        "layers.*.v=layers.*.qkv:2 layers.*.o=layers.*.proj layers.*.a=layers.*.fc1 layers.*.b=layers.*.fc2 "
        "layers.*.n1=layers.*.norm1 layers.*.n2=layers.*.norm2"
    )
    spoiled = "transposed=layers.1.o.weight swapped=layers.1.q.weight bias=layers.1.q.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(linear(48), map(ViTPortBlock, ("", bug)), nn.Identity(), bug)
        self.first, self.places = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(17, D))

    def start(self, x: Tensor) -> Tensor:
        x = self.embed(x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 48))
        return torch.cat((self.first.expand(len(x), 1, D), x), 1) + self.places


# --- a convolutional network with batch norm, in training; the port computes the norm by hand


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.fc = nn.Conv2d(16, 16, 1), linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        h = self.conv1(x)  #: swapped, bias
        h = self.bn1(h)  #: eps, biased, bias
        h = F.silu(h)  #: activation
        h = F.dropout(h, 0.1, self.training)  #: dropout
        h = self.conv2(h)  #: transposed, dropout, island
        x = x + h  #: norm_order, island
        return self.fc(F.max_pool2d(x, 2).mean((2, 3)))


class ConvPort(Ported):
    names = "a=stem b=conv1 c=conv2 out=fc norms=bn.weight,bn.bias,bn1.weight,bn1.bias"
    spoiled = "transposed=c.weight swapped=b.weight"

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), linear(16, 16)
        self.norms, self.out = nn.Parameter(torch.empty(4, 16)), linear(16, 10)

    def normed(self, x: Tensor, at: int) -> Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        variance = x.var((0, 2, 3), keepdim=True, unbiased=self.bug == "biased" and at == 2)  #: biased
        x = (x - mean) * torch.rsqrt(variance + (1e-2 if self.bug == "eps" and at == 2 else 1e-5))  #: eps, biased
        return x * self.norms[at][:, None, None] + self.norms[at + 1][:, None, None]  #: eps, biased

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.normed(self.a(x), 0))
        h = self.b(x)  #: swapped, bias
        h = self.normed(h, 2)  #: eps, biased
        h = F.mish(h) if self.bug == "activation" else h * torch.sigmoid(h)  #: activation
        h = F.dropout(h, 0.1, self.training and self.bug != "dropout")  #: dropout
        h = h.permute(0, 2, 3, 1)
        h = in_bfloat16(self.c, h) if self.bug == "island" else self.c(h)  #: island, transposed, dropout
        x = (F.relu(x + 1) if self.bug == "norm_order" else x) + h.permute(0, 3, 1, 2)  #: norm_order
        x = x.reshape(len(x), 16, 4, 2, 4, 2).amax((3, 5))
        return self.out(x.mean((-1, -2)))


# --- a block of a UNet: group norm, an embedding of the time, a skip, upsampling


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)
        self.conv1, self.conv2 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.time, self.skip, self.up = linear(D, 16), nn.Conv2d(16, 16, 1), nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        powers = torch.exp(-math.log(10000) * torch.arange(0, D // 2) / (D // 2))  #: base
        angles = t[:, None] * powers  #: base
        emb = torch.cat((angles.cos(), angles.sin()), -1)  #: base, swapped
        h = self.norm1(x)  #: eps, biased
        h = self.conv1(F.silu(h))  #: activation, bias
        h = h + self.time(emb)[:, :, None, None]  #: bias, swapped, base
        h = F.dropout(F.silu(self.norm2(h)), 0.1, self.training)  #: dropout
        h = self.conv2(h)  #: island, dropout
        h = h + self.skip(x)  #: transposed, norm_order
        h = torch.cat((h, x), 1)
        return self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))


class UNetPort(Ported):
    names = (
        "c1=conv1 c2=conv2 c3=up temporal=time shortcut=skip "
        "w.0=norm1.weight w.1=norm1.bias w.2=norm2.weight w.3=norm2.bias"
    )
    spoiled = "transposed=shortcut.weight bias=c1.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.c1, self.c2, self.c3 = (nn.Conv2d(*size, 3, padding=1) for size in ((16, 16), (16, 16), (32, 8)))
        self.temporal, self.shortcut = linear(D, 16), linear(16, 16)
        self.w = nn.ParameterList(torch.empty(16) for _ in range(4))

    def normed(self, x: Tensor, at: int) -> Tensor:
        g = x.reshape(len(x), 4, -1)
        c = g - g.mean(-1, keepdim=True)
        variance = c.var(-1, keepdim=True, unbiased=self.bug == "biased" and at == 0)  #: biased
        g = c / (variance + (1e-2 if self.bug == "eps" and at == 0 else 1e-5)).sqrt()  #: eps, biased
        return g.view_as(x) * self.w[at].view(-1, 1, 1) + self.w[at + 1].view(-1, 1, 1)  #: eps, biased

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        powers = self.pick("base", 10000.0, 1000.0) ** (-torch.arange(D // 2) * 2 / D)  #: base
        angles = torch.outer(t, powers)  #: base
        parts = (angles.sin(), angles.cos()) if self.bug == "swapped" else (angles.cos(), angles.sin())
        emb = torch.hstack(parts)  #: swapped
        h = self.normed(x, 0)
        h = F.gelu(h) if self.bug == "activation" else F.silu(h)  #: activation
        h = self.c1(h)  #: bias, activation
        h = h + self.temporal(emb).unflatten(1, (16, 1, 1))  #: bias, swapped
        h = F.dropout(F.silu(self.normed(h, 2)), 0.1, self.training and self.bug != "dropout")  #: dropout
        h = in_bfloat16(self.c2, h) if self.bug == "island" else self.c2(h)  #: island, dropout
        skip = self.shortcut(x.movedim(1, -1)).movedim(-1, 1)  #: transposed
        h = (F.silu(h) if self.bug == "norm_order" else h) + skip  #: transposed, norm_order
        h = torch.cat((h, x), 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
        return self.c3(h)


# --- an RNN: nn.LSTM against its gates by hand


class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, D), nn.LSTM(D, D, batch_first=True)
        self.norm, self.out = nn.LayerNorm(D), linear(D, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)  #: swapped, bias, activation, transposed, island, mask
        h, _ = self.lstm(x)  #: swapped, bias, activation, transposed, island, mask
        h = F.dropout(h, 0.1, self.training)  #: dropout
        x = self.norm(x + h)  #: norm_order, eps, biased
        return self.out(x)


class RNNPort(Ported):
    names = (
        "words=embed head=out norm=norm w_x.weight=lstm.weight_ih_l0 w_x.bias=lstm.bias_ih_l0 "
        "w_h.weight=lstm.weight_hh_l0 w_h.bias=lstm.bias_hh_l0"
    )
    spoiled = "transposed=w_x.weight bias=w_x.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.words, self.w_x, self.w_h = nn.Embedding(50, D), linear(D, 4 * D), linear(D, 4 * D)
        self.norm, self.head = NormByHand(bug, wrong_eps=1e-2), linear(D, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        h = c = x.new_zeros(len(ids), D)
        states = []
        for t in range(T):
            gates = self.w_x(x[:, max(0, t - 1) if self.bug == "mask" else t]) + self.w_h(h)  #: bias, transposed, mask
            i, f, g, o = gates.chunk(4, -1)
            i, f = (f, i) if self.bug == "swapped" else (i, f)
            g = F.hardtanh(g) if self.bug == "activation" else g.tanh()  #: activation
            c = f.sigmoid() * c + i.sigmoid() * g  #: swapped, activation
            h = o.sigmoid() * c.tanh()  #: swapped, island
            h = h.bfloat16().float() if self.bug == "island" else h  #: island
            states.append(h)
        h = torch.stack(states, 1)  #: island
        h = F.dropout(h, 0.1, self.training and self.bug != "dropout")  #: dropout
        return self.head(x + self.norm(h) if self.bug == "norm_order" else self.norm(x + h))  #: norm_order


# --- a mixture of experts: a loop over experts against stacked ones


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(D), linear(D, 4, False)
        self.experts = nn.ModuleList(nn.Sequential(linear(D, D), nn.SiLU(), linear(D, D)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)  #: eps, biased
        weights = self.router(h).softmax(-1)  #: scale
        top, chosen = weights.topk(2, -1)
        top = top / top.sum(-1, keepdim=True)  #: norm_order
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            y = expert(h[rows])  #: swapped, activation, bias, island, transposed
            y = y * top[rows, places, None]  #: swapped, bias, norm_order, mask, island, transposed
            out.index_add_(0, rows, y)  #: swapped, bias, norm_order, mask
        out = F.dropout(out, 0.1, self.training)  #: dropout, mask, swapped, bias, transposed, island, activation
        return x + out.view_as(x)  #: dropout


class MoEPort(Ported):
    names = (
        "gate=router norm=norm "
        "up=experts.0.0.weight,experts.1.0.weight,experts.2.0.weight,experts.3.0.weight "
        "up_bias=experts.0.0.bias,experts.1.0.bias,experts.2.0.bias,experts.3.0.bias "
        "down=experts.0.2.weight:T,experts.1.2.weight:T,experts.2.2.weight:T,experts.3.2.weight:T "
        "down_bias=experts.0.2.bias,experts.1.2.bias,experts.2.2.bias,experts.3.2.bias"
    )
    spoiled = "transposed=down bias=up_bias"

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.gate, self.norm = linear(D, 4, False), NormByHand(bug, wrong_eps=1e-2)
        self.up, self.up_bias = nn.Parameter(torch.empty(4, D, D)), nn.Parameter(torch.empty(4, D))
        self.down, self.down_bias = nn.Parameter(torch.empty(4, D, D)), nn.Parameter(torch.empty(4, D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).reshape(-1, D)
        logits = self.gate(h)
        weights = torch.softmax(logits / self.pick("scale", 1.0, 2.0), -1)  #: scale
        top, chosen = weights.topk(2, -1)
        top = top if self.bug == "norm_order" else top / top.sum(-1, keepdim=True)
        dense = torch.zeros_like(weights).scatter(-1, chosen, top)  #: norm_order
        y = torch.einsum("nd,efd->enf", h, self.up) + self.up_bias[:, None]  #: bias
        y = F.gelu(y) if self.bug == "activation" else F.silu(y)  #: activation
        if self.bug == "island":
            y = torch.baddbmm(self.down_bias[:, None].bfloat16(), y.bfloat16(), self.down.bfloat16()).float()  #: island
        else:
            y = torch.baddbmm(self.down_bias[:, None], y, self.down)  #: transposed
        y = y.roll(1, 0) if self.bug == "swapped" else y
        dense = dense.roll(1, 0) if self.bug == "mask" else dense
        out = torch.einsum("enf,ne->nf", y, dense)  #: swapped, mask, norm_order, transposed, bias, activation, island
        out = F.dropout(out, 0.1, self.training and self.bug != "dropout")  #: dropout
        return x + out.view_as(x)  #: dropout


# --- a scan as in Mamba: a loop over time; the port discretizes before it, with another order of axes


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.conv1d = linear(D, 2 * D), nn.Conv1d(D, D, 4, groups=D, padding=3)
        self.x_proj, self.dt_proj, self.out_proj = linear(D, 4 + 2 * 8, False), linear(4, D), linear()
        self.A_log, self.D = nn.Parameter(torch.empty(D, 8)), nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        h, z = self.in_proj(x).chunk(2, -1)  #: swapped, bias
        h = self.conv1d(h.transpose(1, 2))[..., :T]  #: mask, swapped
        h = F.silu(h).transpose(1, 2)  #: activation, mask
        dt, b, c = self.x_proj(h).split([4, 8, 8], -1)
        dt = F.softplus(self.dt_proj(dt))  #: base, scale
        a = -torch.exp(self.A_log)  #: base
        state, ys = h.new_zeros(N, D, 8), []
        for t in range(T):
            decay = torch.exp(dt[:, t, :, None] * a)  #: base, scale
            state = decay * state + dt[:, t, :, None] * b[:, t, None] * h[:, t, :, None]  #: island, eps
            ys.append((state * c[:, t, None]).sum(-1))  #: eps
        y = torch.stack(ys, 1) + h * self.D  #: norm_order, island
        y = F.dropout(y * F.silu(z), 0.1, self.training)  #: dropout, norm_order
        return self.out_proj(y)  #: transposed


class MambaPort(Ported):
    names = (
        "kernel=conv1d.weight kernel_bias=conv1d.bias rates=A_log:T direct=D "
        "params=x_proj inner=in_proj step=dt_proj out=out_proj"
    )
    spoiled = "transposed=out.weight bias=inner.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.inner, self.kernel, self.kernel_bias = linear(D, 2 * D), nn.Parameter(torch.empty(D, 4)), linear(1, D).bias
        self.params, self.step, self.out = linear(D, 20, False), linear(4, D), linear()
        self.rates, self.direct = nn.Parameter(torch.empty(8, D)), nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        xz = self.inner(x)  #: bias, swapped
        h, z = xz[..., :D], xz[..., D:]
        h, z = (z, h) if self.bug == "swapped" else (h, z)
        padded = F.pad(h, (0, 0, 2, 1) if self.bug == "mask" else (0, 0, 3, 0))
        h = torch.einsum("ntdk,dk->ntd", padded.unfold(1, 4, 1), self.kernel) + self.kernel_bias  #: mask, swapped
        h = F.gelu(h) if self.bug == "activation" else F.silu(h)  #: activation, mask
        dt, b, c = torch.split(self.params(h), (4, 8, 8), -1)
        dt = F.softplus(self.step(dt), self.pick("scale", 1.0, 2.0))  #: scale
        rates = -torch.exp2(self.rates) if self.bug == "base" else -self.rates.exp()  #: base
        decay = torch.exp(torch.einsum("ntd,sd->tnsd", dt, rates))  #: base
        drive = torch.einsum("ntd,nts,ntd->tnsd", dt, b, h)
        state, ys = torch.zeros_like(decay[0]), []
        for t in range(T):
            state = torch.addcmul(drive[t], decay[t], state)
            state = state.bfloat16().float() if self.bug == "island" else state  #: island
            ys.append(torch.einsum("nsd,ns->nd", state, c[:, t]))  #: island
        y = torch.stack(ys, 1)  #: norm_order
        skip = self.direct * h
        y = y * F.silu(z) + skip if self.bug == "norm_order" else (y + skip) * F.silu(z)  #: norm_order
        y = F.dropout(y, 0.1, self.training and self.bug != "dropout")  #: dropout, norm_order
        return self.out(y)  #: transposed


# --- a step of a diffusion: the schedule, a model, the next sample


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = linear(2 * D), nn.LayerNorm(D), linear()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        betas = torch.linspace(0.01**0.5, 0.2**0.5, 20) ** 2  #: base
        alphas = torch.cumprod(1.0 - betas, 0)  #: base
        now, before = alphas[t][:, None], alphas[t - 1][:, None]  #: mask
        emb = torch.cat(((t[:, None] * torch.linspace(0.1, 1, D)).sin(), x), -1)  #: swapped
        h = F.silu(self.fc1(emb))  #: activation, swapped, bias
        h = F.dropout(self.norm(h), 0.1, self.training)  #: eps, biased, dropout
        noise = self.fc2(h)  #: transposed, island, norm_order, dropout
        start = (x - (1 - now).sqrt() * noise) / now.sqrt()  #: base, scale, norm_order, island
        return before.sqrt() * start + (1 - before).sqrt() * noise  #: mask, island


class DiffusionPort(Ported):
    names = "first=fc1 last=fc2 norm=norm"
    spoiled = "transposed=last.weight bias=first.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.first, self.last, self.norm = linear(2 * D), linear(), NormByHand(bug)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        roots = torch.linspace(self.pick("base", 0.1, 0.12), math.sqrt(0.2), 20)  #: base
        alphas = (1.0 - roots.square()).log().cumsum(0).exp()  #: base
        now, before = alphas.index_select(0, t)[:, None], alphas[t if self.bug == "mask" else t - 1][:, None]  #: mask
        parts = [torch.sin(torch.outer(t, torch.linspace(0.1, 1, D))), x]
        h = torch.cat(parts[::-1] if self.bug == "swapped" else parts, 1)  #: swapped
        h = self.first(h)  #: bias, swapped
        h = F.gelu(h) if self.bug == "activation" else h * h.sigmoid()  #: activation
        n = self.norm(h)
        n = n + h if self.bug == "norm_order" else n  #: norm_order
        n = F.dropout(n, 0.1, self.training and self.bug != "dropout")  #: dropout
        n = (
            in_bfloat16(self.last, n) if self.bug == "island" else self.last(n)
        )  #: island, transposed, norm_order, dropout
        sigma = (1 - now) if self.bug == "scale" else (1 - now).sqrt()  #: scale
        start = torch.addcmul(x, sigma, n, value=-1) * now.rsqrt()  #: scale
        return start * before.sqrt() + n * (1 - before).sqrt()  #: mask


# --- losses on the logits of a linear model


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.LayerNorm(D), linear(), linear(D, 50)

    def forward(self, x: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        h = self.norm(x)  #: eps, biased
        h = self.body(h)  #: transposed, bias
        h = F.dropout(F.gelu(h), 0.1, self.training)  #: activation, dropout
        logits = self.head(h)  #: island, dropout, norm_order
        logs = F.log_softmax(logits / 2.0, -1)  #: scale, norm_order
        kl = (teacher.softmax(-1) * (teacher.log_softmax(-1) - logs)).sum(-1)  #: swapped
        ce = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)  #: base, mask
        focal = (1 - logits.softmax(-1).gather(1, targets[:, None]))[:, 0] ** 2 * ce
        return kl + ce + focal  #: base, mask


class LossesPort(Ported):
    names = "inner=body out=head norm=norm"
    spoiled = "transposed=inner.weight bias=inner.bias"

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.inner, self.out, self.norm = linear(), linear(D, 50), NormByHand(bug)

    def forward(self, x: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.inner(h)  #: transposed, bias
        h = F.gelu(h, approximate="tanh") if self.bug == "activation" else F.gelu(h)  #: activation
        h = F.dropout(h, 0.1, self.training and self.bug != "dropout")  #: dropout
        logits = in_bfloat16(self.out, h) if self.bug == "island" else self.out(h)  #: island, dropout
        logits = logits.tanh() if self.bug == "norm_order" else logits  #: norm_order
        logs = torch.log_softmax(logits * self.pick("scale", 0.5, 1.0), -1)  #: scale
        known = teacher.log_softmax(-1)
        kl = logs.exp() * (logs - known) if self.bug == "swapped" else known.exp() * (known - logs)  #: swapped
        kl = kl.sum(-1)  #: swapped
        full = logits - logits.logsumexp(-1, keepdim=True)
        smooth = self.pick("base", 0.1, 0.05)
        picked = full.gather(1, (targets.roll(1) if self.bug == "mask" else targets)[:, None])[:, 0]  #: mask
        ce = -(1 - smooth) * picked - smooth * full.mean(-1)  #: base, mask
        focal = ce * (1 - picked.exp()).square()  #: base, mask
        return kl + ce + focal  #: base


# --- the table


@dataclass(frozen=True)
class Port:
    """A model that is written twice.

    Attributes:
        reference: Makes the reference.
        port: Makes the port, with a bug; "" for none. The demo has its own.
        inputs: Makes the arguments of both.
        bugs: Those that can be planted.
        trains: Whether it is run in training mode, with the same random numbers in both.
    """

    reference: Callable[[], nn.Module]
    port: type[Ported] | None
    inputs: Callable[[], tuple[Tensor, ...]]
    bugs: tuple[str, ...]
    trains: tuple[str, ...] = ("dropout",)

    def models(self, bug: str) -> tuple[nn.Module, nn.Module]:
        """The reference with random weights, and its port."""
        torch.manual_seed(0)
        reference = self.reference()
        with torch.no_grad():
            for name, weight in reference.named_parameters():
                is_scale = weight.dim() == 1 and name.endswith("weight")
                weight.normal_(1.0 if is_scale else 0.0, 0.2 if weight.dim() == 1 else 1.0 / weight[0].numel() ** 0.5)
        if self.port is None:
            port: nn.Module = port_gpt.ported(reference, bug or "none")
        else:
            port = self.port(bug)
            port.load(reference.state_dict())
        for model in (reference, port):
            model.train(bug in self.trains)
        return reference, port


def ids(*more: Tensor) -> tuple[Tensor, ...]:
    return torch.randint(0, 50, (N, T), generator=torch.Generator().manual_seed(1)), *more


def words() -> tuple[Tensor, ...]:
    return ids((torch.arange(T) < torch.tensor([T, T - 3, T - 5])[:, None]).long())


def normal(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def all_but(*bugs: str) -> tuple[str, ...]:
    return tuple(bug for bug in BUGS if bug not in bugs)


def samples() -> tuple[Tensor, ...]:
    return (normal(N, T, D),)


PORTS = {
    "gpt": Port(lambda: GPT(port_gpt.CONFIG), None, ids, tuple(port_gpt.BUGS)),
    "llama": Port(Llama, LlamaPort, ids, all_but("biased")),
    "bert": Port(Bert, BertPort, words, all_but("base")),
    "t5": Port(T5, T5Port, ids, all_but("bias")),
    "vit": Port(ViT, ViTPort, lambda: (normal(N, 3, 16, 16),), all_but("base", "mask")),
    "conv": Port(Conv, ConvPort, lambda: (normal(N, 3, 8, 8),), all_but("base", "mask", "scale", "bias"), ("", *BUGS)),
    "unet": Port(UNet, UNetPort, lambda: (normal(N, 16, 8, 8), torch.tensor([1.0, 5, 9])), all_but("mask", "scale")),
    "rnn": Port(RNN, RNNPort, ids, all_but("base", "scale")),
    "moe": Port(MoE, MoEPort, samples, all_but("base")),
    "mamba": Port(Mamba, MambaPort, samples, all_but("eps", "biased")),
    "diffusion": Port(Diffusion, DiffusionPort, lambda: (normal(N, D), torch.tensor([3, 7, 12])), BUGS),
    "losses": Port(Losses, LossesPort, lambda: (normal(36, D), torch.arange(36), normal(36, 50, seed=3)), BUGS),
}


@functools.cache
def guilty_lines(bug: str) -> set[tuple[str, int]]:
    """The lines, of this file and of the demo, that compute what a bug changes."""
    found = set()
    for file in (__file__, port_gpt.__file__):
        for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
            marked = re.search(r"#: ([a-z_, ]+)$", line)
            if marked and bug in marked[1].split(", "):
                found.add((Path(file).name, number))
    return found
