"""Statements that compute: each makes another `h` of the same shape, 4 by 8."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from fuzz.rules import State, Unfit
from fuzz.tree import KINDS, Kind, Values

#: The kinds of layers: how they are made, how often they are drawn, and how they are called.
LAYERS: dict[str, tuple[str, float]] = {
    "linear": ("nn.Linear(8, 8)", 5),
    "no_bias": ("nn.Linear(8, 8, bias=False)", 4),
    "conv": ("nn.Conv1d(4, 4, 3, padding=1)", 1.5),
    "norm": ("nn.LayerNorm(8)", 1),
    "embedding": ("nn.Embedding(4, 8)", 0.5),
    "gru": ("nn.GRUCell(8, 8)", 0.4),
    "lstm": ("nn.LSTM(8, 8)", 0.2),
    "attention": ("nn.MultiheadAttention(8, 2)", 0.3),
}
LINEAR = ("linear", "no_bias")

#: The policies by which a region may override an op, in the oracle's reach: see calls.CastsByHand.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "softmax": ("lower", "fp32", "float16"),
    "log_softmax": ("lower", "fp32"),
    "tanh": ("lower", "fp32", "bfloat16"),
    "gelu": ("lower", "fp32"),
    "sigmoid": ("lower", "fp32"),
    "cumsum": ("lower", "fp32"),
    "relu": ("fp32", "lower"),
    "exp": ("lower", "fp32"),
    "layer_norm": ("lower", "fp32"),
    "linear": ("fp32",),
    "matmul": ("fp32",),
    "stack": ("fp32", "lower"),
}
#: All sets of overrides that are drawn. They are few, since reading a new one lists all ops of the dispatcher.
OVERRIDE_SETS: tuple[dict[str, str], ...] = (
    *({op: policy} for op, policies in OVERRIDES.items() for policy in policies),
    {"softmax": "lower", "linear": "fp32", "tanh": "fp32"},
    {"tanh": "lower", "gelu": "fp32", "matmul": "fp32"},
    {"sigmoid": "lower", "exp": "lower", "layer_norm": "fp32"},
    {"relu": "fp32", "tanh": "bfloat16", "stack": "lower"},
)


@dataclass(frozen=True, slots=True)
class Op:
    """An op: its source, in which {h} is the activation and {0}, {1} are layers, and how it uses them."""

    source: str
    layers: tuple[tuple[str, ...], ...] = ()
    how: str = "cast"
    weight: float = 1.0
    #: Not while a CUDA graph is captured.
    random: bool = False
    #: Has no second derivative on some device.
    once: bool = False
    #: Not in regions of float16: the CPU has no such kernel.
    bfloat16: bool = False
    #: Only where autocast is on.
    region: bool = False
    #: Autograd saves the weight itself, on some device.
    saves: bool = False
    #: Calls an op that promotes, on some device.
    promotes: bool = False
    #: The dtype of the result, if it does not follow from the region.
    gives: str = ""
    #: Not under overrides: it calls ops that their oracle does not see, or relies on which casts there are.
    composite: bool = False


_ONE = (LINEAR,)
_TWO = (LINEAR, LINEAR)

OPS: dict[str, Op] = {
    # with weights
    "layer": Op("h = {0}({h})", _ONE, weight=6),
    "linear": Op("h = F.linear({h}, {0}.weight)", _ONE, weight=2),
    "transposed": Op("h = {h} @ {0}.weight.t()", _ONE, "view", weight=2),
    "mm": Op("h = torch.mm({h}, {0}.weight)", _ONE, weight=2),
    "addmm": Op("h = torch.addmm({0}.weight[0], {h}, {1}.weight)", _TWO),
    "bmm": Op("h = torch.bmm({h}.unsqueeze(0), {0}.weight.unsqueeze(0)).squeeze(0)", _ONE, "view"),
    "baddbmm": Op("h = torch.baddbmm({h}[None], {h}[None], {0}.weight[None])[0]", _ONE, "view"),
    "einsum": Op("h = torch.einsum('ij,kj->ik', {h}, {0}.weight)", _ONE),
    "slices": Op("h = {h} @ {0}.weight[:4].t() @ {0}.weight[:4]", _ONE, "view"),
    "columns": Op("h = torch.cat([torch.mm({h}, {0}.weight[:, :4]), {h}[:, 4:]], 1)", _ONE, "view", promotes=True),
    "twice": Op("h = {0}(torch.tanh({0}({h})))", _ONE),
    "shared_input": Op("h = {0}({h}) + {1}({h})", _TWO, weight=2),
    "qkv": Op("h = F.scaled_dot_product_attention({0}({h})[None], {1}({h})[None], {0}({h})[None])[0]", _TWO, once=True),
    "direct": Op("h = {h} + 0.1 * {0}.weight[:4]", _ONE, "direct"),
    "sine": Op("h = {h} + {0}.weight.sin()[4:]", _ONE, "direct", weight=0.5),
    "mv": Op("h = {h} * torch.mv({0}.weight, {0}.weight[0])", _ONE, weight=0.5),
    "prelu": Op("h = F.prelu({h}, {0}.weight[0, :1])", _ONE, "view", weight=0.5),
    "multi_dot": Op("h = torch.linalg.multi_dot([{h}.float(), {0}.weight, {1}.weight])", _TWO, weight=0.5),
    "tensordot": Op(
        "h = torch.tensordot({h}.float(), {0}.weight, dims=1)", _ONE, promotes=True, saves=True, weight=0.5
    ),
    "written_input": Op(  # `y` would keep its graph until after a capture
        "h = {h}.float() * 1.0; y = {0}(h); h.mul_(0.5); h = y + {0}(h); del y",
        _ONE,
        region=True,
        composite=True,
        weight=1.5,
    ),
    "conv": Op("h = {0}({h}.unsqueeze(0)).squeeze(0)", (("conv",),), weight=2),
    "norm": Op("h = {0}({h})", (("norm",),), "direct", composite=True),
    "rms_norm": Op("h = F.rms_norm({h}, (8,), {0}.weight)", (("norm",),), "direct"),
    "embedding": Op("h = {h} + {0}(torch.arange(4, device=x.device))", (("embedding",),), "direct"),
    "gru": Op("h = {0}({lower})", (("gru",),), composite=True),
    "lstm": Op("h = {0}({h}.float())[0]", (("lstm",),), composite=True, once=True, bfloat16=True),
    "attention": Op("h = {0}({h}, {h}, {h}, need_weights=False)[0]", (("attention",),), composite=True, once=True),
    # without
    "softmax": Op("h = torch.softmax({h}, -1)"),
    "log_softmax": Op("h = F.log_softmax({h}, -1)"),
    "tanh": Op("h = torch.tanh({h})", weight=2),
    "gelu": Op("h = F.gelu({h})"),
    "relu": Op("h = torch.relu({h})"),
    "sigmoid": Op("h = torch.sigmoid({h})"),
    "exp": Op("h = torch.exp({h}.clamp(-3, 3))"),
    "pow": Op("h = {h}.clamp(-3, 3).pow(2)"),
    "layer_norm": Op("h = F.layer_norm({h}, (8,))"),
    "cumsum": Op("h = torch.cumsum({h}, 1) * 0.2"),
    "gate": Op("h = {h} * {h}.sigmoid()"),
    "cat": Op("h = torch.cat([{h}[:, :4], {h}.float()[:, 4:]], 1)", promotes=True),
    "stack": Op("h = torch.stack([{h}, {h}.float()]).sum(0)", promotes=True),
    "gram": Op("h = {h} @ {h}.t() @ {h} * 0.1"),
    "sdpa": Op("h = F.scaled_dot_product_attention({h}[None], {h}[None], {h}[None])[0]", once=True),
    "residual": Op("h = x + {h}"),
    "where": Op("h = torch.where(x > 0, {h}, x)"),
    "cdist": Op("h = {h} * torch.cdist({h}, {h} + 1).mean()", weight=0.5, once=True),
    "cosine": Op("h = {h} * F.cosine_similarity({h}, {h} + 1, dim=1)[:, None]", weight=0.5, composite=True),
    "normalize": Op("h = {h} / torch.linalg.vector_norm({h}, dim=1, keepdim=True).clamp(min=0.1)", weight=0.5),
    "index_put": Op("h = {h}.clone(); h[1] = h[0] * 2", promotes=True),
    "in_place": Op("h = torch.relu_({h} * 1.0)"),
    "float": Op("h = h.float()"),
    "half": Op("h = h.half()", region=True, gives="float16", weight=0.5),
    "bfloat16": Op("h = h.bfloat16()", region=True, gives="bfloat16", weight=0.5),
    "detach": Op("h = h.detach()", weight=0.3),
    "dropout": Op("h = F.dropout({h}, 0.3)", random=True, weight=0.5),
    "custom_fwd": Op("h = Scaled.apply({h})", weight=0.5, composite=True),
    "custom_fwd_in_half": Op("h = ScaledInHalf.apply({h})", gives="float16", weight=0.5, composite=True),
}


class OpKind(Kind):
    """An op."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.weight = op.weight  # type: ignore[misc]

    def draw(self, draw: random.Random, state: State) -> Values:
        chosen = []
        for kinds in self.op.layers:
            found = state.of(*kinds)
            if not found:
                raise Unfit
            chosen.append(draw.choice(found))
        return {"layers": chosen} if chosen else {}

    def open(self, values: Values, state: State) -> list[str]:
        op = self.op
        state.need(state.enabled or not op.region)
        if state.enabled:
            state.need(not op.promotes or state.lower <= {state.frames[-1].dtype})
            state.lower.add(op.gives or state.frames[-1].dtype)
        if op.random:
            state.need_not_in("capture")
        if op.once:
            state.need_not_in("double")
        if op.bfloat16:
            state.need(not state.enabled or state.frames[-1].dtype == "bfloat16")
        if op.composite:
            state.need_not_in("overriding", "policy_off")
        layers = values.get("layers", [])
        for at, kinds in zip(layers, op.layers, strict=True):
            state.need(at < len(state.layers) and state.layers[at] in kinds)
            state.use(at, op.how, called="{0}(" in op.source)
            if op.saves:
                state.use(at, "direct")
        state.need(not (op.composite and any(at in state.policies for at in layers)))
        h = "h.float()" if any(state.policies.get(at) == "off" for at in layers) else state.h
        lower = f"h.to(torch.{state.frames[-1].dtype})" if state.enabled else h
        return op.source.format(*(f"m[{at}]" for at in layers), h=h, lower=lower).split("; ")

    def simpler(self, values: Values) -> Iterator[Values]:
        for number, at in enumerate(values.get("layers", ())):
            for other in range(at):
                yield {"layers": [other if number == n else v for n, v in enumerate(values["layers"])]}


KINDS.update({name: OpKind(op) for name, op in OPS.items()})
