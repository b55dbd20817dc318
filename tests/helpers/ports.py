"""Eleven models, each written twice: a reference, and a port of it in which a bug can be planted; and the demo's GPT.

A comment `#: eps, scale` marks the line of a call that these bugs change, in the port, and the line of the reference
that computes the same.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


class Ported(nn.Module):
    """A module that knows which bug is planted in it."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug

    def pick(self, bug: str, right: object, wrong: object) -> object:
        return wrong if self.bug == bug else right


def linear(inputs: int = D, outputs: int = D, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def in_bfloat16(layer: nn.Module, x: Tensor) -> Tensor:
    return layer.to(torch.bfloat16)(x.bfloat16()).float()  #: island


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], H, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def load(port: nn.Module, values: dict[str, Tensor], bug: str, at: str, square: str = "") -> None:
    """Loads a port's weights; the bugs of weights are planted in the weight `at`, or the square one."""
    if bug == "transposed":
        values[square or at] = values[square or at].t().contiguous()
    if bug == "swapped":
        values[at] = values[at].roll(values[at].shape[0] // 2, 0)
    if bug == "bias":
        name = at.replace("weight", "bias")
        values[name] = values[name].flip(0)
    port.load_state_dict(values)


# --- Llama: the norm, rotary embedding and attention of transformers; the port is fused, with F.rms_norm


class LlamaNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-5)  #: eps
        return self.weight * x  #: eps


def rotate_half(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = LlamaNorm(), LlamaNorm()
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


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, D)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(2))
        self.norm = LlamaNorm()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        inverse = 1 / 10000 ** (torch.arange(0, D // H, 2).float() / (D // H))  #: base
        angles = torch.arange(ids.shape[1]).float()[:, None] * inverse  #: base
        angles = torch.cat((angles, angles), -1)  #: base
        cos, sin = angles.cos(), angles.sin()  #: base
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x) @ self.embed_tokens.weight.t()


class LlamaPort(Ported):
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.embedding, self.scale = nn.Embedding(50, D), nn.Parameter(torch.empty(D))
        self.blocks = nn.ModuleList([LlamaPortBlock(""), LlamaPortBlock(bug)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        powers = self.pick("base", 10000.0, 500.0) ** (-torch.arange(0, D // H, 2) / (D // H))  #: base
        angles = torch.outer(torch.arange(ids.shape[1]), powers)  #: base
        for block in self.blocks:
            x = block(x, angles)
        return F.linear(F.rms_norm(x, (D,), self.scale, 1e-5), self.embedding.weight)


def port_llama(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"embedding.weight": known["embed_tokens.weight"], "scale": known["norm.weight"]}
    for i in range(2):
        old, new = f"layers.{i}.", f"blocks.{i}."
        for end in ("weight", "bias"):
            values[f"{new}wqkv.{end}"] = torch.cat([known[f"{old}{one}_proj.{end}"] for one in "qkv"])
            values[f"{new}w13.{end}"] = torch.cat([known[f"{old}{one}_proj.{end}"] for one in ("gate", "up")])
            values |= {f"{new}wo.{end}": known[f"{old}o_proj.{end}"], f"{new}w2.{end}": known[f"{old}down_proj.{end}"]}
        for number, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            values[f"{new}scales.{number}"] = known[f"{old}{name}.weight"]
    if bug == "swapped":
        for end in ("weight", "bias"):
            values[f"blocks.1.w13.{end}"] = values[f"blocks.1.w13.{end}"].roll(2 * D, 0)
    model = LlamaPort(bug)
    load(model, values, "" if bug == "swapped" else bug, "blocks.1.wqkv.weight", "blocks.1.wo.weight")
    return model


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
        self.norms = nn.ParameterList(torch.empty(D) for _ in range(4))
        self.w1, self.w2 = linear(D, 2 * D), linear(2 * D)

    def normed(self, x: Tensor, at: int, eps: float) -> Tensor:
        c = x - x.mean(-1, keepdim=True)
        variance = c.var(-1, keepdim=True, unbiased=self.bug == "biased" and at == 0)  #: biased
        return c * (variance + eps).rsqrt() * self.norms[at] + self.norms[at + 1]  #: eps

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q = heads(self.q(x))  #: bias
        k, v = heads(self.k(x)), heads(self.v(x))  #: swapped
        keep = self.pick("mask", keep, keep.roll(1, -1))
        a = F.scaled_dot_product_attention(q, k, v, keep, scale=self.pick("scale", None, 1.0))  #: scale, mask, swapped
        a = F.dropout(a, 0.1, self.training and self.bug != "dropout")  #: dropout
        a = self.o(joined(a))  #: transposed
        if self.bug == "norm_order":
            x = x + self.normed(a, 0, 1e-12)  #: norm_order
        else:
            x = self.normed(x + a, 0, self.pick("eps", 1e-12, 1e-2))
        h = self.w1(x)
        h = F.relu(h) if self.bug == "activation" else 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))  #: activation
        h = in_bfloat16(self.w2, h) if self.bug == "island" else self.w2(h)  #: island
        return self.normed(x + h, 2, 1e-12)


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(50, D)
        self.layer = nn.ModuleList(BertLayer() for _ in range(2))

    def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
        mask = (1.0 - attention[:, None, None].float()) * torch.finfo(torch.float32).min
        x = self.embeddings(ids)
        for layer in self.layer:
            x = layer(x, mask)
        return x


class BertPort(nn.Module):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.words = nn.Embedding(50, D)
        self.stack = nn.ModuleList([BertPortLayer(""), BertPortLayer(bug)])

    def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
        keep = attention[:, None, None].bool()
        x = self.words(ids)
        for layer in self.stack:
            x = layer(x, keep)
        return x


def port_bert(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"words.weight": known["embeddings.weight"]}
    names = ("query", "q"), ("key", "k"), ("value", "v"), ("dense", "o"), ("intermediate", "w1"), ("output", "w2")
    for i in range(2):
        for end in ("weight", "bias"):
            values |= {f"stack.{i}.{new}.{end}": known[f"layer.{i}.{old}.{end}"] for old, new in names}
        for number, name in enumerate(("attention_norm", "output_norm")):
            values[f"stack.{i}.norms.{2 * number}"] = known[f"layer.{i}.{name}.weight"]
            values[f"stack.{i}.norms.{2 * number + 1}"] = known[f"layer.{i}.{name}.bias"]
    model = BertPort(bug)
    at = "stack.1.k.weight" if bug == "swapped" else "stack.1.q.weight"
    load(model, values, bug, at, "stack.1.o.weight")
    return model


# --- T5: a norm without a mean, relative positions, attention without a scale


class T5Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  #: eps, biased
        return self.weight * x  #: eps, biased


class T5Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(bias=False) for _ in range(4))
        self.wi_0, self.wi_1, self.wo = linear(D, 2 * D, False), linear(D, 2 * D, False), linear(2 * D, D, False)
        self.norms = nn.ModuleList((T5Norm(), T5Norm()))

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
        if self.bug == "mask":
            bias = bias.roll(1, -1)  #: mask
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k)
        if self.bug == "scale":
            logits = logits / math.sqrt(D // H)  #: scale
        a = torch.softmax(logits + bias, -1)  #: scale, mask
        a = F.dropout(a, 0.1, self.training and self.bug != "dropout")  #: dropout
        a = torch.einsum("bhqk,bhkd->bqhd", a, v)  #: dropout
        x = self.pick("norm_order", x, h) + self.out(a.flatten(2))  #: transposed, norm_order
        gate, up = self.up(self.normed(x, 1)).tensor_split(2, -1)
        gate = F.silu(gate) if self.bug == "activation" else F.gelu(gate, approximate="tanh")  #: activation, swapped
        h = gate * up  #: activation, swapped
        return x + (in_bfloat16(self.down, h) if self.bug == "island" else self.down(h))  #: island


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.relative = nn.Embedding(50, D), nn.Embedding(2 * T, H)
        self.block = nn.ModuleList(T5Layer() for _ in range(2))
        self.final = T5Norm()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        bias = self.relative(places[None] - places[:, None] + T).permute(2, 0, 1)[None]  #: base
        x = self.shared(ids)
        for block in self.block:
            x = block(x, bias)
        return self.final(x)


class T5Port(Ported):
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.words, self.distances = nn.Embedding(50, D), nn.Parameter(torch.empty(2 * T, H))
        self.layers = nn.ModuleList([T5PortLayer(""), T5PortLayer(bug)])
        self.scale = nn.Parameter(torch.empty(D))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        apart = places - places.unsqueeze(1) + self.pick("base", T, T - 1)  #: base
        bias = self.distances[apart].movedim(-1, 0)  #: base
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, bias)
        return F.rms_norm(x, (D,), self.scale, 1e-6)


def port_t5(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"words.weight": known["shared.weight"], "distances": known["relative.weight"]}
    values["scale"] = known["final.weight"]
    for i in range(2):
        old, new = f"block.{i}.", f"layers.{i}."
        values[f"{new}qkv.weight"] = torch.cat([known[f"{old}{one}.weight"] for one in "qkv"])
        up = torch.cat([known[f"{old}wi_{one}.weight"] for one in range(2)])
        values[f"{new}up.weight"] = up.roll(2 * D, 0) if bug == "swapped" and i else up
        values |= {f"{new}out.weight": known[f"{old}o.weight"], f"{new}down.weight": known[f"{old}wo.weight"]}
        values[f"{new}scales"] = torch.stack([known[f"{old}norms.{one}.weight"] for one in range(2)])
    model = T5Port(bug)
    load(model, values, bug if bug == "transposed" else "", "layers.1.out.weight")
    return model


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
        self.n1, self.n2 = nn.LayerNorm(D, 1e-2 if bug == "eps" else 1e-6), nn.LayerNorm(D, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "biased":
            h = (x - x.mean(-1, keepdim=True)) / (
                x.std(-1, keepdim=True) + 1e-6
            ) * self.n1.weight + self.n1.bias  #: biased
        else:
            h = self.n1(x)  #: eps
        q = self.q(h)  #: swapped, bias
        q, k, v = heads(q), heads(self.k(h)), heads(self.v(h))
        logits = q @ k.mT * self.pick("scale", (D // H) ** -0.5, D**-0.5)  #: scale, bias, swapped
        a = F.dropout(logits.softmax(-1), 0.1, self.training and self.bug != "dropout")  #: dropout
        x = self.pick("norm_order", x, h) + self.o(joined(a @ v))  #: transposed, norm_order
        h = self.a(self.n2(x))
        h = F.gelu(h, approximate="tanh") if self.bug == "activation" else F.gelu(h)  #: activation
        return x + (in_bfloat16(self.b, h) if self.bug == "island" else self.b(h))  #: island


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls_token = nn.Conv2d(3, D, 4, 4), nn.Parameter(torch.empty(1, 1, D))
        self.pos_embed = nn.Parameter(torch.empty(1, 17, D))
        self.blocks = nn.ModuleList(ViTBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return x


class ViTPort(nn.Module):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.embed, self.first, self.places = linear(48), nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(17, D))
        self.stack = nn.ModuleList([ViTPortBlock(""), ViTPortBlock(bug)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 48))
        x = torch.cat((self.first.expand(len(x), 1, D), x), 1) + self.places
        for block in self.stack:
            x = block(x)
        return x


def port_vit(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"embed.weight": known["patch.weight"].flatten(1), "embed.bias": known["patch.bias"]}
    values |= {"first": known["cls_token"].flatten(), "places": known["pos_embed"][0]}
    for i in range(2):
        old, new = f"blocks.{i}.", f"stack.{i}."
        for end in ("weight", "bias"):
            for name, part in zip("qkv", known[f"{old}qkv.{end}"].chunk(3), strict=True):
                values[f"{new}{name}.{end}"] = part
            for a, b in (("proj", "o"), ("fc1", "a"), ("fc2", "b"), ("norm1", "n1"), ("norm2", "n2")):
                values[f"{new}{b}.{end}"] = known[f"{old}{a}.{end}"]
    model = ViTPort(bug)
    load(model, values, bug, "stack.1.q.weight", "stack.1.o.weight")
    return model


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
        h = (
            in_bfloat16(self.c, h.permute(0, 2, 3, 1)) if self.bug == "island" else self.c(h.permute(0, 2, 3, 1))
        )  #: island, transposed, dropout
        x = (F.relu(x + 1) if self.bug == "norm_order" else x) + h.permute(0, 3, 1, 2)  #: norm_order
        x = x.reshape(len(x), 16, 4, 2, 4, 2).amax((3, 5))
        return self.out(x.mean((-1, -2)))


def port_conv(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"norms": torch.stack([known[f"{name}.{end}"] for name in ("bn", "bn1") for end in ("weight", "bias")])}
    for end in ("weight", "bias"):
        for a, b in (("stem", "a"), ("conv1", "b"), ("conv2", "c"), ("fc", "out")):
            values[f"{b}.{end}"] = (
                known[f"{a}.{end}"].flatten(1) if (a, end) == ("conv2", "weight") else known[f"{a}.{end}"]
            )
    model = ConvPort(bug)
    load(model, values, bug, "b.weight", "c.weight")
    return model


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


def port_unet(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {}
    for end in ("weight", "bias"):
        for a, b in (("conv1", "c1"), ("conv2", "c2"), ("up", "c3"), ("time", "temporal"), ("skip", "shortcut")):
            values[f"{b}.{end}"] = (
                known[f"{a}.{end}"].flatten(1) if (a, end) == ("skip", "weight") else known[f"{a}.{end}"]
            )
    for number, name in enumerate(("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")):
        values[f"w.{number}"] = known[name]
    model = UNetPort(bug)
    load(model, values, "" if bug == "swapped" else bug, "c1.weight", "shortcut.weight")
    return model


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
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.words, self.w_x, self.w_h = nn.Embedding(50, D), linear(D, 4 * D), linear(D, 4 * D)
        self.scale, self.shift, self.head = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D)), linear(D, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        h = c = x.new_zeros(len(ids), D)
        states = []
        for t in range(T):
            gates = self.w_x(x[:, max(0, t - 1) if self.bug == "mask" else t]) + self.w_h(h)  #: bias, transposed, mask
            i, f, g, o = gates.chunk(4, -1)
            if self.bug == "swapped":
                i, f = f, i
            g = F.hardtanh(g) if self.bug == "activation" else g.tanh()  #: activation
            c = f.sigmoid() * c + i.sigmoid() * g  #: swapped, activation
            h = o.sigmoid() * c.tanh()  #: swapped, island
            if self.bug == "island":
                h = h.bfloat16().float()  #: island
            states.append(h)
        h = torch.stack(states, 1)  #: island
        h = F.dropout(h, 0.1, self.training and self.bug != "dropout")  #: dropout
        if self.bug == "norm_order":
            return self.head(x + self.normed(h))  #: norm_order
        return self.head(self.normed(x + h))

    def normed(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(
            x, -1, correction=int(self.bug == "biased"), keepdim=True
        )  #: biased, norm_order
        x = (x - mean) / (variance + self.pick("eps", 1e-5, 1e-2)).sqrt()  #: eps, biased, norm_order
        return x * self.scale + self.shift  #: eps, biased, norm_order


def port_rnn(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"words.weight": known["embed.weight"], "scale": known["norm.weight"], "shift": known["norm.bias"]}
    for end in ("weight", "bias"):
        values |= {f"w_x.{end}": known[f"lstm.{end}_ih_l0"], f"w_h.{end}": known[f"lstm.{end}_hh_l0"]}
        values[f"head.{end}"] = known[f"out.{end}"]
    if bug == "transposed":
        values["w_x.weight"] = torch.cat([one.t() for one in values["w_x.weight"].chunk(4)])
    model = RNNPort(bug)
    load(model, values, bug if bug == "bias" else "", "w_x.weight")
    return model


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
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.gate, self.scale, self.shift = (
            linear(D, 4, False),
            nn.Parameter(torch.empty(D)),
            nn.Parameter(torch.empty(D)),
        )
        self.up, self.up_bias = nn.Parameter(torch.empty(4, D, D)), nn.Parameter(torch.empty(4, D))
        self.down, self.down_bias = nn.Parameter(torch.empty(4, D, D)), nn.Parameter(torch.empty(4, D))

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "biased":
            h = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * self.scale + self.shift  #: biased
        else:
            h = F.layer_norm(x, (D,), self.scale, self.shift, self.pick("eps", 1e-5, 1e-2))  #: eps
        h = h.reshape(-1, D)
        logits = self.gate(h)
        weights = torch.softmax(logits / self.pick("scale", 1.0, 2.0), -1)  #: scale
        top, chosen = weights.topk(2, -1)
        if self.bug != "norm_order":
            top = top / top.sum(-1, keepdim=True)
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


def port_moe(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"gate.weight": known["router.weight"], "scale": known["norm.weight"], "shift": known["norm.bias"]}
    for place, name in ((0, "up"), (2, "down")):
        weights = torch.stack([known[f"experts.{e}.{place}.weight"] for e in range(4)])
        values[name] = weights.mT.contiguous() if name == "down" and bug != "transposed" else weights
        values[f"{name}_bias"] = torch.stack([known[f"experts.{e}.{place}.bias"] for e in range(4)])
    if bug == "bias":
        values["up_bias"] = values["up_bias"].roll(1, 0)
    model = MoEPort(bug)
    load(model, values, "", "")
    return model


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
            if self.bug == "island":
                state = state.bfloat16().float()  #: island
            ys.append(torch.einsum("nsd,ns->nd", state, c[:, t]))  #: island
        y = torch.stack(ys, 1)  #: norm_order
        skip = self.direct * h
        y = y * F.silu(z) + skip if self.bug == "norm_order" else (y + skip) * F.silu(z)  #: norm_order
        y = F.dropout(y, 0.1, self.training and self.bug != "dropout")  #: dropout, norm_order
        return self.out(y)  #: transposed


def port_mamba(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"kernel": known["conv1d.weight"][:, 0], "kernel_bias": known["conv1d.bias"]}
    values |= {"params.weight": known["x_proj.weight"], "rates": known["A_log"].t().contiguous(), "direct": known["D"]}
    for end in ("weight", "bias"):
        for a, b in (("in_proj", "inner"), ("dt_proj", "step"), ("out_proj", "out")):
            values[f"{b}.{end}"] = known[f"{a}.{end}"]
    model = MambaPort(bug)
    load(model, values, "" if bug == "swapped" else bug, "inner.weight", "out.weight")
    return model


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
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.first, self.last = linear(2 * D), linear()
        self.scale, self.shift = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        roots = torch.linspace(self.pick("base", 0.1, 0.12), math.sqrt(0.2), 20)  #: base
        alphas = (1.0 - roots.square()).log().cumsum(0).exp()  #: base
        now, before = alphas.index_select(0, t)[:, None], alphas[t if self.bug == "mask" else t - 1][:, None]  #: mask
        parts = [torch.sin(torch.outer(t, torch.linspace(0.1, 1, D))), x]
        h = torch.cat(parts[::-1] if self.bug == "swapped" else parts, 1)  #: swapped
        h = self.first(h)  #: bias, swapped
        h = F.gelu(h) if self.bug == "activation" else h * h.sigmoid()  #: activation
        c = h - h.mean(-1, keepdim=True)
        variance = c.var(-1, keepdim=True, correction=int(self.bug == "biased"))  #: biased
        n = c / (variance + self.pick("eps", 1e-5, 1e-3)).sqrt() * self.scale + self.shift  #: eps, biased
        n = n + h if self.bug == "norm_order" else n  #: norm_order
        n = F.dropout(n, 0.1, self.training and self.bug != "dropout")  #: dropout
        noise = (
            in_bfloat16(self.last, n) if self.bug == "island" else self.last(n)
        )  #: island, transposed, norm_order, dropout
        sigma = (1 - now) if self.bug == "scale" else (1 - now).sqrt()  #: scale
        start = torch.addcmul(x, sigma, noise, value=-1) * now.rsqrt()  #: scale
        return start * before.sqrt() + noise * (1 - before).sqrt()  #: mask


def port_diffusion(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"scale": known["norm.weight"], "shift": known["norm.bias"]}
    for end in ("weight", "bias"):
        values |= {f"first.{end}": known[f"fc1.{end}"], f"last.{end}": known[f"fc2.{end}"]}
    model = DiffusionPort(bug)
    load(model, values, "" if bug == "swapped" else bug, "first.weight", "last.weight")
    return model


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
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.inner, self.out = linear(), linear(D, 50)
        self.scale, self.shift = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        c = x - x.mean(-1, keepdim=True)
        variance = c.var(-1, keepdim=True, unbiased=self.bug == "biased")  #: biased
        h = c / (variance + self.pick("eps", 1e-5, 1e-3)).sqrt() * self.scale + self.shift  #: eps, biased
        h = self.inner(h)  #: transposed, bias
        h = F.gelu(h, approximate="tanh") if self.bug == "activation" else F.gelu(h)  #: activation
        h = F.dropout(h, 0.1, self.training and self.bug != "dropout")  #: dropout
        logits = in_bfloat16(self.out, h) if self.bug == "island" else self.out(h)  #: island, dropout
        logits = logits.tanh() if self.bug == "norm_order" else logits  #: norm_order
        logs = torch.log_softmax(logits * self.pick("scale", 0.5, 1.0), -1)  #: scale
        known = teacher.log_softmax(-1)
        kl = (logs.exp() * (logs - known) if self.bug == "swapped" else known.exp() * (known - logs)).sum(
            -1
        )  #: swapped
        full = logits - logits.logsumexp(-1, keepdim=True)
        smooth = self.pick("base", 0.1, 0.05)
        picked = full.gather(1, (targets.roll(1) if self.bug == "mask" else targets)[:, None])[:, 0]  #: mask
        ce = -(1 - smooth) * picked - smooth * full.mean(-1)  #: base, mask
        focal = ce * (1 - picked.exp()).square()  #: base, mask
        return kl + ce + focal  #: base


def port_losses(reference: nn.Module, bug: str) -> nn.Module:
    known = reference.state_dict()
    values = {"scale": known["norm.weight"], "shift": known["norm.bias"]}
    for end in ("weight", "bias"):
        values |= {f"inner.{end}": known[f"body.{end}"], f"out.{end}": known[f"head.{end}"]}
    model = LossesPort(bug)
    load(model, values, "" if bug == "swapped" else bug, "inner.weight")
    return model


# --- the table


@dataclass(frozen=True)
class Port:
    """A model that is written twice.

    Attributes:
        reference: Makes the reference.
        port: Makes the port from the reference, with a bug; "" for none.
        inputs: Makes the arguments of both.
        bugs: Those that can be planted.
        trains: Whether it is run in training mode, with the same random numbers in both.
    """

    reference: Callable[[], nn.Module]
    port: Callable[[nn.Module, str], nn.Module]
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
        port = self.port(reference, bug)
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


PORTS = {
    "gpt": Port(
        lambda: GPT(port_gpt.CONFIG),
        lambda reference, bug: port_gpt.ported(reference, bug or "none"),
        ids,
        tuple(port_gpt.BUGS),
    ),
    "llama": Port(Llama, port_llama, ids, all_but("biased")),
    "bert": Port(Bert, port_bert, words, all_but("base")),
    "t5": Port(T5, port_t5, ids, all_but("bias")),
    "vit": Port(ViT, port_vit, lambda: (normal(N, 3, 16, 16),), all_but("base", "mask")),
    "conv": Port(Conv, port_conv, lambda: (normal(N, 3, 8, 8),), all_but("base", "mask", "scale", "bias"), ("", *BUGS)),
    "unet": Port(
        UNet, port_unet, lambda: (normal(N, 16, 8, 8), torch.tensor([1.0, 5.0, 9.0])), all_but("mask", "scale")
    ),
    "rnn": Port(RNN, port_rnn, ids, all_but("base", "scale")),
    "moe": Port(MoE, port_moe, lambda: (normal(N, T, D),), all_but("base")),
    "mamba": Port(Mamba, port_mamba, lambda: (normal(N, T, D),), all_but("eps", "biased")),
    "diffusion": Port(Diffusion, port_diffusion, lambda: (normal(N, D), torch.tensor([3, 7, 12])), BUGS),
    "losses": Port(
        Losses,
        port_losses,
        lambda: (normal(N * T, D), torch.arange(N * T) % 50, normal(N * T, 50, seed=3)),
        BUGS,
    ),
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
