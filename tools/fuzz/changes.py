"""Statements that change weights and caches."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fuzz.gradients import draw_linear
from fuzz.ops import LINEAR
from fuzz.rules import State, Unfit
from fuzz.tree import Kind, Values, kind

__all__ = ["OPTIMIZERS", "WRITES"]

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(m.parameters(), lr=0.05, foreach=False)",
    "sgd_foreach": "torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=True)",
    "sgd_fused": "torch.optim.SGD(m.parameters(), lr=0.05, fused=True)",
    "adamw": "torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False)",
    "adamw_foreach": "torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)",
    "adamw_fused": "torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)",
}


# --- optimizers


@kind("step")
class Step(Kind):
    """A step between regions."""

    weight = 5

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"zero": draw.choice(("none", "zero", ""))}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_outside()
        state.write_to_all()
        zero = {"none": ["optimizer.zero_grad()"], "zero": ["optimizer.zero_grad(set_to_none=False)"], "": []}
        return ["optimizer.step()", *zero[values["zero"]]]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["zero"]:
            yield {"zero": ""}


@kind("step_inside")
class StepInside(Kind):
    """Writes to all weights in a region, which stock does not see: docs/differences.md, row 1."""

    weight = 3

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"how": draw.choice(("step", "step", "mul", "data"))}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need_not_in("suspended", "no_grad")
        state.need(bool(state.frames) and all(frame.ours for frame in state.frames) and not state.saved)
        state.need(not (state.graphs and values["how"] == "data"))
        state.casts.clear()
        how = {
            "step": [
                "for p in m.parameters():",
                "    p.grad = torch.zeros_like(p) if p.grad is None else p.grad",
                "optimizer.step()",
            ],
            "mul": ["with torch.no_grad():", "    torch._foreach_mul_(list(m.parameters()), 0.9)"],
            "data": ["for p in m.parameters():", "    p.data = p.detach() * 0.9"],
        }[values["how"]]
        return [*how, "autocast.weights_were_written()"]


@kind("optimizer")
class NewOptimizer(Kind):
    """Another optimizer."""

    weight = 0.7

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"optimizer": draw.choice(list(OPTIMIZERS))}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need_not_in("thread")
        return [f"optimizer = {OPTIMIZERS[values['optimizer']]}"]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["optimizer"] != "sgd":
            yield {"optimizer": "sgd"}


# --- writes

_W = "m[{0}].weight"
#: The source, and where it may be: "inside" of regions, "outside" only, and whether it "moves" the weight's memory.
WRITES: dict[str, tuple[str, str]] = {
    "mul": (f"{_W}.mul_(0.9)", "inside"),
    "data_mul": (f"{_W}.data.mul_(0.9)", "inside"),
    "data": (f"{_W}.data = {_W} * 0.9", "inside moves"),
    "clamp": (f"{_W}.data.clamp_(-0.2, 0.2)", "inside"),
    "detach": (f"{_W}.detach().mul_(0.75)", "inside"),
    "init": (f"nn.init.constant_({_W}, 0.03)", "inside"),
    "foreach": (f"torch._foreach_mul_([{_W}], 0.9)", "inside"),
    "there_and_back": (
        f"old = {_W}.data; {_W}.data = torch.zeros_like({_W}); {_W}.data = old.mul_(0.9); del old",
        "outside moves",
    ),
    "set": (f"{_W}.set_({_W}.clone() * 0.9)", "outside moves"),
    "resize": (
        f"values = {_W}.clone() * 0.9; storage = {_W}.untyped_storage(); size = storage.size(); storage.resize_(0); "
        f"storage.resize_(size); {_W}.copy_(values); del storage",
        "outside moves cpu",
    ),
    "numpy": (f"{_W}.detach().numpy()[:] *= 0.9", "outside cpu"),
    "dlpack": (f"torch.from_dlpack({_W}.detach()).mul_(0.9)", "outside cpu"),
    "row": (f"{_W}[0].mul_(0.5)", "inside"),
    "new": (f"m[{{0}}].weight = nn.Parameter({_W} * 0.9)", "outside moves new"),
}


@kind("write")
class Write(Kind):
    """A write to a weight that no cast in stock's cache depends on."""

    weight = 5

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"layer": draw_linear(draw, state), "how": draw.choice(list(WRITES))}

    def open(self, values: Values, state: State) -> list[str]:
        at, (source, where) = values["layer"], WRITES[values["how"]]
        state.need_top()
        state.need_not_in("function", "suspended")
        state.need(state.layers[at] in LINEAR)
        state.need(not state.frames or "inside" in where)
        state.need(state.device == "cpu" or "cpu" not in where)
        state.need(not (at in state.half and ("cpu" in where or values["how"] == "fused")))
        state.need(not (state.graphs and "moves" in where))
        state.write(at)
        if "new" in where:
            state.need_not_in("thread")
            state.need(not state.recomputed)
            state.need(not state.inside["step_each"])
            state.weights[at] = state.next_weight
            state.next_weight += 1
            state.frozen.discard(at)
        parts = source.format(at).split("; ")
        grad = [f"m[{at}].weight.requires_grad_()", "optimizer = " + OPTIMIZERS["sgd"]] if "new" in where else []
        return ["with torch.no_grad():", *(f"    {part}" for part in parts), *grad]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["how"] != "mul":
            yield {**values, "how": "mul"}


@kind("swap")
class Swap(Kind):
    """Exchanges two layers, or their data."""

    weight = 2

    def draw(self, draw: random.Random, state: State) -> Values:
        found = state.of("linear")
        if len(found) < 2:
            raise Unfit
        return {"layers": draw.sample(found, 2), "how": draw.choice(("data", "modules", "tensors"))}

    def open(self, values: Values, state: State) -> list[str]:
        one, other = values["layers"]
        state.need_outside()
        state.need(not state.graphs and not state.saved and not state.pending)
        state.need_not_in("suspended", "step_each")
        state.need(state.layers[one] == state.layers[other])
        state.need(not {one, other} & {*state.half, *state.policies, *state.frozen})
        first, second = f"m[{one}].weight", f"m[{other}].weight"
        if values["how"] == "data":
            return [f"{first}.data, {second}.data = {second}.data, {first}.data"]
        if values["how"] == "modules":
            state.weights[one], state.weights[other] = state.weights[other], state.weights[one]
            return [f"m[{one}], m[{other}] = m[{other}], m[{one}]"]
        return [
            "h = x",
            "optimizer.zero_grad()",
            f"swap({first}, {second})",
        ]


@kind("tie")
class Tie(Kind):
    """Two layers share a weight."""

    weight = 1.5

    def draw(self, draw: random.Random, state: State) -> Values:
        found = state.of(*LINEAR)
        if len(found) < 2:
            raise Unfit
        return {"layers": draw.sample(found, 2)}

    def open(self, values: Values, state: State) -> list[str]:
        one, other = values["layers"]
        state.need_outside()
        state.need(state.layers[one] in LINEAR and state.layers[other] in LINEAR)
        state.need(not state.graphs)
        state.need_not_in("suspended", "step_each")
        state.need(not state.recomputed)
        state.need(not {one, other} & {*state.half, *state.policies, *state.frozen})
        state.weights[one] = state.weights[other]
        return [f"m[{one}].weight = m[{other}].weight"]


@kind("load")
class Load(Kind):
    """load_state_dict."""

    def open(self, values: Values, state: State) -> list[str]:
        state.need_outside()
        state.write_to_all()
        return ["m.load_state_dict({k: v * 0.9 + 0.01 for k, v in m.state_dict().items()})"]


HELD = ("m.state_dict()", "copy.deepcopy(m)", "[p.detach() for p in m.parameters()]", "h", "")


@kind("hold")
class Hold(Kind):
    """Something else refers to the weights, or a copy of them is made."""

    weight = 0.7

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"what": draw.choice(HELD)}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need(not (values["what"].startswith("copy") and (state.inside["step_each"] or state.policies)))
        state.held = values["what"] == "h" or (state.held and values["what"] != "")
        return [f"held.append({values['what']})" if values["what"] else "held.clear()"]


@kind("freeze")
class Freeze(Kind):
    """Freezes a layer, or lets it learn again."""

    weight = 1.5

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"layer": draw.randrange(len(state.layers)), "frozen": draw.random() < 0.6}

    def open(self, values: Values, state: State) -> list[str]:
        at = values["layer"]
        state.need_top()
        state.need_not_in("step_each")
        state.need(at < len(state.layers) and state.weights.count(state.weights[at]) == 1)
        state.frozen.add(at) if values["frozen"] else state.frozen.discard(at)
        return [f"m[{at}].requires_grad_({not values['frozen']})"]


@kind("cast_layer")
class CastLayer(Kind):
    """A layer with weights in half precision."""

    weight = 1.2

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"layer": draw_linear(draw, state), "dtype": draw.choice(("bfloat16", "float16"))}

    def open(self, values: Values, state: State) -> list[str]:
        at = values["layer"]
        state.need_outside()
        state.need_not_in("suspended", "step_each")
        state.need(state.layers[at] in LINEAR and state.weights.count(state.weights[at]) == 1)
        state.need(not state.graphs and not state.saved and not state.pending and at not in state.policies)
        state.half[at] = values["dtype"]
        return ["optimizer.zero_grad()", "h = x", f"m[{at}].to(torch.{values['dtype']})"]


# --- caches


@kind("clear")
class Clear(Kind):
    """Clears caches."""

    weight = 1

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"all": draw.random() < 0.3}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need_not_in("suspended")
        state.need(not values["all"] or not state.frames)
        state.casts.clear()
        return ["tp.clear_cache()" if values["all"] else "torch.clear_autocast_cache()"]


@kind("module_policy")
class ModulePolicy(Kind):
    """A policy of a layer, from here on. Stock's run casts by hand."""

    weight = 1.2

    def draw(self, draw: random.Random, state: State) -> Values:
        policy = draw.choice(('"fp32"', '"off"', '{"linear": "fp32"}'))
        return {"layer": draw_linear(draw, state), "policy": policy}

    def open(self, values: Values, state: State) -> list[str]:
        at = values["layer"]
        state.need_outside()
        state.need_not_in("suspended")
        state.need(state.layers[at] in LINEAR and at not in state.half and at not in state.policies)
        state.policies[at] = values["policy"].strip('"')
        return [f'autocast.set_module_policy(m, "{at}", {values["policy"]})']
