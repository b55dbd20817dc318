"""Eleven models, each written twice: a reference, and a port of it in which a bug can be planted; and the demo's GPT.

A comment `#: eps, scale` marks the line of a call that these bugs change, in the port, and the line of the reference
that computes the same.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
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


def layer_of(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The linear layer, convolution or norm that has these weights."""
    if weight.dim() == 1:
        one: nn.Module = nn.LayerNorm(len(weight))
    elif weight.dim() == 2:
        one = nn.Linear(*weight.shape[::-1], bias=bias is not None)
    else:
        one = nn.Conv2d(weight.shape[1], len(weight), weight.shape[2], padding=weight.shape[2] // 2)
    one.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return one


class Ported(nn.Module):
    """A module with the weights of the reference, and perhaps with a bug."""

    #: Its weights and layers, and what they have of the reference: "qkv=q,k,v" (joined), "a=b:T" (transposed), "a=b:F"
    #: (flattened), "k=qkv:1" (the second third). And the weights that bugs spoil.
    names: ClassVar[str]
    spoiled: ClassVar[str] = ""

    def __init__(self, known: Mapping[str, Tensor], bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        spoiled = dict(one.split("=") for one in self.spoiled.split()).get(bug)
        for name, sources in (one.split("=") for one in self.names.split()):
            found = {}
            for end in ("", ".weight", ".bias"):
                parts = [self._part(known, *source.partition(":")[::2], end) for source in sources.split(",")]
                if parts[0] is not None:
                    found[end] = torch.cat(parts)
                    if spoiled in (name, name + end):
                        found[end] = SPOILED[bug](found[end])
            whole = nn.Parameter(found[""]) if "" in found else layer_of(found[".weight"], found.get(".bias"))
            setattr(self, name, whole)

    @staticmethod
    def _part(known: Mapping[str, Tensor], path: str, how: str, end: str) -> Tensor | None:
        one = known.get(path + end)
        if one is None or not how or (how == "F" and one.dim() == 1):
            return one
        return one.mT if how == "T" else one.flatten(1) if how == "F" else one.chunk(3)[int(how)]

    def pick(self, bug: str, right: object, wrong: object) -> object:
        return wrong if self.bug == bug else right

    def normed(self, x: Tensor, by: nn.Module, eps: float = 1e-5, wrong_eps: float = 1e-3) -> Tensor:
        """A layer norm in steps."""
        c = x - x.mean(-1, keepdim=True)
        variance = c.var(-1, keepdim=True, unbiased=self.bug == "biased")  #: biased
        scale = (variance + self.pick("eps", eps, wrong_eps)).rsqrt() * by.weight  #: eps, biased
        return c * scale + by.bias  #: eps, biased, norm_order


class Stack(nn.Module):
    """An embedding, and two layers, which get what `context` makes of the inputs."""

    def start(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def context(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs[1:]

    def end(self, x: Tensor) -> Tensor:
        return x

    def forward(self, *inputs: Tensor) -> Tensor:
        x, context = self.start(inputs[0]), self.context(*inputs)
        for layer in self.layers:
            x = layer(x, *context)
        return self.end(x)


class PortedStack(Ported, Stack):
    """A port of a stack; a bug of a layer is in the second."""

    layer: ClassVar[type[Ported]]

    def __init__(self, known: Mapping[str, Tensor], bug: str) -> None:
        super().__init__(known, bug)
        parts = [{name.removeprefix(f"layers.{i}."): one for name, one in known.items()} for i in range(2)]
        self.layers = nn.ModuleList(self.layer(part, bug * i) for i, part in enumerate(parts))

    def start(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.embed)


def embedded(layer: type[nn.Module]) -> tuple[nn.Embedding, nn.ModuleList]:
    return nn.Embedding(50, D), nn.ModuleList(layer() for _ in range(2))


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
    names = (
        "norm1=input_layernorm.weight norm2=post_attention_layernorm.weight wqkv=q_proj,k_proj,v_proj wo=o_proj "
        "w13=gate_proj,up_proj w2=down_proj"
    )
    spoiled = "transposed=wo.weight swapped=w13 bias=wqkv.bias"

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = F.rms_norm(x, (D,), self.norm1, self.pick("eps", 1e-5, 1e-3))  #: eps
        qkv = self.wqkv(h)  #: bias
        q, k, v = qkv.split([D, D // 2, D // 2], -1)
        q, k, v = (one.unflatten(-1, (-1, D // H)).transpose(1, 2) for one in (q, k, v))
        q, k = self.rotated(q, angles), self.rotated(k, angles)
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.pick("mask", 0, 1))
        scale = self.pick("scale", None, 1.0)
        a = F.scaled_dot_product_attention(q, k, v, keep, scale=scale, enable_gqa=True)  #: scale, mask
        a = F.dropout(a, 0.1, self.training and self.bug != "dropout")  #: dropout
        x = self.pick("norm_order", x, h) + self.wo(joined(a))  #: transposed, norm_order
        gate, up = self.w13(F.rms_norm(x, (D,), self.norm2, 1e-5)).chunk(2, -1)
        h = (F.gelu(gate) if self.bug == "activation" else F.silu(gate)) * up  #: activation, swapped
        return x + (in_bfloat16(self.w2, h) if self.bug == "island" else self.w2(h))  #: island

    @staticmethod
    def rotated(x: Tensor, angles: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)  #: base


class Llama(Stack):
    def __init__(self) -> None:
        super().__init__()
        (self.embed, self.layers), self.last = embedded(LlamaBlock), RMSNorm(1e-5)

    def context(self, ids: Tensor) -> tuple[Tensor, ...]:
        inverse = 1 / 10000 ** (torch.arange(0, D // H, 2).float() / (D // H))  #: base
        angles = torch.arange(ids.shape[1]).float()[:, None] * inverse  #: base
        angles = torch.cat((angles, angles), -1)  #: base
        return angles.cos(), angles.sin()  #: base

    def end(self, x: Tensor) -> Tensor:
        return self.last(x) @ self.embed.weight.t()


class LlamaPort(PortedStack):
    names = "embed=embed.weight last=last.weight"
    layer = LlamaPortBlock

    def context(self, ids: Tensor) -> tuple[Tensor, ...]:
        powers = self.pick("base", 10000.0, 500.0) ** (-torch.arange(0, D // H, 2) / (D // H))  #: base
        return (torch.outer(torch.arange(ids.shape[1]), powers),)  #: base

    def end(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (D,), self.last, 1e-5), self.embed)


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
    names = (
        "q=query k=key v=value o=dense w1=intermediate w2=output norm1=attention_norm "
        "scale=output_norm.weight shift=output_norm.bias"
    )
    spoiled = "transposed=o.weight swapped=k.weight bias=q.bias"

    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x, self.norm1, 1e-12, 1e-2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q = heads(self.q(x))  #: bias
        k, v = heads(self.k(x)), heads(self.v(x))  #: swapped
        keep = self.pick("mask", keep, keep.roll(1, -1))
        a = F.scaled_dot_product_attention(q, k, v, keep, scale=self.pick("scale", None, 1.0))  #: scale, mask, swapped
        a = F.dropout(a, 0.1, self.training and self.bug != "dropout")  #: dropout
        a = self.o(joined(a))  #: transposed
        x = x + self.normed(a) if self.bug == "norm_order" else self.normed(x + a)  #: norm_order
        h = self.w1(x)
        h = F.relu(h) if self.bug == "activation" else 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))  #: activation
        h = in_bfloat16(self.w2, h) if self.bug == "island" else self.w2(h)  #: island
        return F.layer_norm(x + h, (D,), self.scale, self.shift, 1e-12)


class Bert(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = embedded(BertLayer)

    def context(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, ...]:
        return ((1.0 - attention[:, None, None].float()) * torch.finfo(torch.float32).min,)


class BertPort(PortedStack):
    names = "embed=embed.weight"
    layer = BertPortLayer

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
    names = "qkv=q,k,v out=o up=wi_0,wi_1 down=wo scales=norms.0.weight,norms.1.weight"
    spoiled = "transposed=out.weight swapped=up.weight"

    def normed(self, x: Tensor, at: int) -> Tensor:
        scale = self.scales.chunk(2)[at]
        if self.bug == "biased" and at == 0:
            return x * (x.var(-1, keepdim=True) + 1e-6).rsqrt() * scale  #: biased
        return F.rms_norm(x, (D,), scale, 1e-2 if self.bug == "eps" and at == 0 else 1e-6)  #: eps

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
        super().__init__()
        (self.embed, self.layers), self.last, self.relative = embedded(T5Layer), RMSNorm(1e-6), nn.Embedding(2 * T, H)

    def end(self, x: Tensor) -> Tensor:
        return self.last(x)

    def context(self, ids: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(ids.shape[1])
        return (self.relative(places[None] - places[:, None] + T).permute(2, 0, 1)[None],)  #: base


class T5Port(PortedStack):
    names = "embed=embed.weight distances=relative.weight last=last.weight"
    layer = T5PortLayer

    def end(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (D,), self.last, 1e-6)

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
    names = "q=qkv:0 k=qkv:1 v=qkv:2 o=proj a=fc1 b=fc2 n1=norm1 n2=norm2"
    spoiled = "transposed=o.weight swapped=q.weight bias=q.bias"

    def forward(self, x: Tensor) -> Tensor:
        h = self.normed(x, self.n1, 1e-6, 1e-2)
        q = self.q(h)  #: swapped, bias
        q, k, v = heads(q), heads(self.k(h)), heads(self.v(h))
        logits = q @ k.mT * self.pick("scale", (D // H) ** -0.5, D**-0.5)  #: scale, bias, swapped
        a = F.dropout(logits.softmax(-1), 0.1, self.training and self.bug != "dropout")  #: dropout
        x = self.pick("norm_order", x, h) + self.o(joined(a @ v))  #: transposed, norm_order
        h = self.a(F.layer_norm(x, (D,), self.n2.weight, self.n2.bias, 1e-6))
        h = F.gelu(h, approximate="tanh") if self.bug == "activation" else F.gelu(h)  #: activation
        return x + (in_bfloat16(self.b, h) if self.bug == "island" else self.b(h))  #: island


class ViT(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Conv2d(3, D, 4, 4), embedded(ViTBlock)[1]
        self.cls_token, self.places = nn.Parameter(torch.empty(1, 1, D)), nn.Parameter(torch.empty(1, 17, D))

    def start(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        return torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.places


class ViTPort(PortedStack):
    names = "embed=embed:F first=cls_token places=places"
    layer = ViTPortBlock

    def start(self, x: Tensor) -> Tensor:
        x = self.embed(x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 48))
        return torch.cat((self.first[0].expand(len(x), 1, D), x), 1) + self.places[0]


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
    names = "a=stem b=conv1 c=conv2:F out=fc norms=bn.weight,bn.bias,bn1.weight,bn1.bias"
    spoiled = "transposed=c.weight swapped=b.weight"

    def normed(self, x: Tensor, at: int) -> Tensor:
        scale, shift = self.norms.view(4, 16, 1, 1)[at : at + 2]
        mean = x.mean((0, 2, 3), keepdim=True)
        variance = x.var((0, 2, 3), keepdim=True, unbiased=self.bug == "biased" and at == 2)  #: biased
        x = (x - mean) * torch.rsqrt(variance + (1e-2 if self.bug == "eps" and at == 2 else 1e-5))  #: eps, biased
        return x * scale + shift  #: eps, biased

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
    names = "c1=conv1 c2=conv2 c3=up temporal=time shortcut=skip:F n1=norm1 n2=norm2"
    spoiled = "transposed=shortcut.weight bias=c1.bias"

    def normed(self, x: Tensor, by: nn.Module) -> Tensor:
        g, is_first = x.reshape(len(x), 4, -1), by is self.n1
        c = g - g.mean(-1, keepdim=True)
        variance = c.var(-1, keepdim=True, unbiased=self.bug == "biased" and is_first)  #: biased
        g = c / (variance + (1e-2 if self.bug == "eps" and is_first else 1e-5)).sqrt()  #: eps, biased
        return g.view_as(x) * by.weight.view(-1, 1, 1) + by.bias.view(-1, 1, 1)  #: eps, biased

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        powers = self.pick("base", 10000.0, 1000.0) ** (-torch.arange(D // 2) * 2 / D)  #: base
        angles = torch.outer(t, powers)  #: base
        parts = (angles.sin(), angles.cos()) if self.bug == "swapped" else (angles.cos(), angles.sin())
        emb = torch.hstack(parts)  #: swapped
        h = self.normed(x, self.n1)
        h = F.gelu(h) if self.bug == "activation" else F.silu(h)  #: activation
        h = self.c1(h)  #: bias, activation
        h = h + self.temporal(emb).unflatten(1, (16, 1, 1))  #: bias, swapped
        h = F.dropout(F.silu(self.normed(h, self.n2)), 0.1, self.training and self.bug != "dropout")  #: dropout
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
        "words=embed.weight head=out norm=norm w_x=lstm.weight_ih_l0 b_x=lstm.bias_ih_l0 w_h=lstm.weight_hh_l0 "
        "b_h=lstm.bias_hh_l0"
    )
    spoiled = "transposed=w_x bias=b_x"

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.words)
        h = c = x.new_zeros(len(ids), D)
        states = []
        for t in range(T):
            now = x[:, max(0, t - 1) if self.bug == "mask" else t]
            gates = F.linear(now, self.w_x, self.b_x)  #: bias, transposed, mask
            gates = gates + F.linear(h, self.w_h, self.b_h)  #: bias, transposed, mask
            i, f, g, o = gates.chunk(4, -1)
            i, f = (f, i) if self.bug == "swapped" else (i, f)
            g = F.hardtanh(g) if self.bug == "activation" else g.tanh()  #: activation
            c = f.sigmoid() * c + i.sigmoid() * g  #: swapped, activation
            h = o.sigmoid() * c.tanh()  #: swapped, island
            h = h.bfloat16().float() if self.bug == "island" else h  #: island
            states.append(h)
        h = torch.stack(states, 1)  #: island
        h = F.dropout(h, 0.1, self.training and self.bug != "dropout")  #: dropout
        x = x + self.norm_of(h) if self.bug == "norm_order" else self.norm_of(x + h)  #: norm_order
        return self.head(x)  #: norm_order

    def norm_of(self, x: Tensor) -> Tensor:
        return self.normed(x, self.norm, wrong_eps=1e-2)


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
        "gate=router norm=norm up=experts.0.0,experts.1.0,experts.2.0,experts.3.0 "
        "down=experts.0.2.weight:T,experts.1.2.weight:T,experts.2.2.weight:T,experts.3.2.weight:T "
        "down_bias=experts.0.2.bias,experts.1.2.bias,experts.2.2.bias,experts.3.2.bias"
    )
    spoiled = "transposed=down bias=up.bias"

    def forward(self, x: Tensor) -> Tensor:
        h, down, down_bias = (
            self.normed(x, self.norm, wrong_eps=1e-2).reshape(-1, D),
            self.down.view(4, D, D),
            self.down_bias.view(4, 1, D),
        )
        logits = self.gate(h)
        weights = torch.softmax(logits / self.pick("scale", 1.0, 2.0), -1)  #: scale
        top, chosen = weights.topk(2, -1)
        top = top if self.bug == "norm_order" else top / top.sum(-1, keepdim=True)
        dense = torch.zeros_like(weights).scatter(-1, chosen, top)  #: norm_order
        y = torch.einsum("nd,efd->enf", h, self.up.weight.view(4, D, D)) + self.up.bias.view(4, 1, D)  #: bias
        y = F.gelu(y) if self.bug == "activation" else F.silu(y)  #: activation
        if self.bug == "island":
            y = torch.baddbmm(down_bias.bfloat16(), y.bfloat16(), down.bfloat16()).float()  #: island
        else:
            y = torch.baddbmm(down_bias, y, down)  #: transposed
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
        "kernel=conv1d.weight:F kernel_bias=conv1d.bias rates=A_log:T direct=D params=x_proj inner=in_proj "
        "step=dt_proj out=out_proj"
    )
    spoiled = "transposed=out.weight bias=inner.bias"

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

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        roots = torch.linspace(self.pick("base", 0.1, 0.12), math.sqrt(0.2), 20)  #: base
        alphas = (1.0 - roots.square()).log().cumsum(0).exp()  #: base
        now, before = alphas.index_select(0, t)[:, None], alphas[t if self.bug == "mask" else t - 1][:, None]  #: mask
        parts = [torch.sin(torch.outer(t, torch.linspace(0.1, 1, D))), x]
        h = torch.cat(parts[::-1] if self.bug == "swapped" else parts, 1)  #: swapped
        h = self.first(h)  #: bias, swapped
        h = F.gelu(h) if self.bug == "activation" else h * h.sigmoid()  #: activation
        n = self.normed(h, self.norm)
        n = n + h if self.bug == "norm_order" else n  #: norm_order
        n = F.dropout(n, 0.1, self.training and self.bug != "dropout")  #: dropout
        last = functools.partial(in_bfloat16, self.last) if self.bug == "island" else self.last
        n = last(n)  #: island, transposed, norm_order, dropout
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

    def forward(self, x: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        h = self.normed(x, self.norm)
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
            port = self.port(reference.state_dict(), bug)
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
