"""Statements that compute losses and gradients."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fuzz.ops import LINEAR
from fuzz.rules import State, Unfit
from fuzz.tree import Kind, Values, kind

__all__ = ["LOSSES", "draw_linear"]

LOSSES = {
    "square": "{h}.float().square().mean()",
    "mse": "F.mse_loss({h}, x)",
    "smooth_l1": "F.smooth_l1_loss({h}, x)",
    "cross_entropy": "F.cross_entropy({h}, torch.tensor([0, 3, 1, 7], device=x.device))",
    "bce": "F.binary_cross_entropy_with_logits({h}, (x > 0).float())",
}


def draw_linear(draw: random.Random, state: State) -> int:
    """A layer with a matrix."""
    found = state.of(*LINEAR)
    if not found:
        raise Unfit
    return draw.choice(found)


@kind("loss")
class Loss(Kind):
    """Keeps a loss, and starts anew."""

    weight = 8

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"loss": draw.choice(list(LOSSES)), "scale": draw.choice((1, 1, 2, 3))}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.pending += 1
        state.restart()
        scaled = f"x * {values['scale']}" if values["scale"] > 1 else "x"
        return [f"losses.append({LOSSES[values['loss']].format(h=state.h)})", f"h = {scaled}"]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["loss"] != "square":
            yield {**values, "loss": "square"}
        if values["scale"] != 1:
            yield {**values, "scale": 1}


@kind("penalty")
class Penalty(Kind):
    """A loss of a weight itself."""

    weight = 0.7

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"layer": draw_linear(draw, state)}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.use(values["layer"], "direct")
        return [f"losses.append(m[{values['layer']}].weight.float().square().mean())"]


@kind("backward")
class Backward(Kind):
    """The backward of all losses."""

    weight = 5

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"how": draw.choice(("sum", "sum", "each", "again", "scaled"))}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need_not_in("no_grad")
        state.need(not (state.inside["step_each"] and state.frames))
        state.need(state.pending > 0)
        state.recompute()
        state.pending = 0
        each = {
            "sum": ["if any(loss.requires_grad for loss in losses):", "    sum(losses).backward()"],
            "scaled": ["if any(loss.requires_grad for loss in losses):", "    (sum(losses) * 1024).backward()"],
            "each": [
                "for loss in losses:",
                "    if loss.requires_grad:",
                "        loss.backward(retain_graph=True)",
                "loss = None",  # it would keep its graph until after a capture
            ],
            "again": [
                "if any(loss.requires_grad for loss in losses):",
                "    sum(losses).backward(retain_graph=True)",
                "    sum(losses).backward()",
            ],
        }[values["how"]]
        return [*each, "note(*losses, *(p.grad for p in m.parameters()))", "losses.clear()"]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["how"] != "sum":
            yield {"how": "sum"}


class Line(Kind):
    """A statement without a choice."""

    source: tuple[str, ...] = ()

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        if self.source[0].startswith("h ="):
            state.restart()
        return list(self.source)


kind("note", source=("note(h)",), weight=2)(Line)
kind("restart", source=("h = x",), weight=0.5)(Line)
kind("leaf", source=("h = (x * 1.0).requires_grad_()",), weight=0.5)(Line)


@kind("transform")
class Transform(Kind):
    """Transforms of torch.func."""

    weight = 0.7

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"layer": draw_linear(draw, state), "which": draw.choice(("grad", "vmap", "jvp"))}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need_not_in("hooks")
        at = values["layer"]
        state.need(state.layers[at] in LINEAR and at not in state.policies)
        state.use(at, "cast")
        h = f"{state.h}.detach()"
        if values["which"] == "vmap":
            return [f"note(torch.vmap(m[{at}])({h}))"]
        if values["which"] == "jvp":
            return [f"note(*torch.func.jvp(m[{at}], ({h},), (torch.ones_like({h}),)))"]
        return [
            "def call(weights, a):",
            f"    return torch.func.functional_call(m[{at}], weights, (a,)).float().square().mean()",
            f"note(*torch.func.grad(call)(dict(m[{at}].named_parameters()), {h}).values())",
        ]
