"""Statements for CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fuzz.blocks import draw_region, frame_of, region, simpler_region
from fuzz.ops import LINEAR
from fuzz.rules import State
from fuzz.tree import Kind, Values, kind

#: Frees the graphs of autograd, which must not refer to weights while a CUDA graph uses them.
DROP = ("h = x", "losses.clear()")


@kind("capture")
class Capture(Kind):
    """Captures an inference or a training step, with writes to weights before, between and after."""

    weight = 6
    has_body = True
    indent = 3
    devices = ("cuda",)

    def draw(self, draw: random.Random, state: State) -> Values:
        linear = state.of(*LINEAR)
        return {
            **draw_region(draw, state),
            "enabled": True,
            "learns": draw.random() < 0.5,
            "writes": [draw.choice(linear) for _ in range(draw.choice((0, 0, 1, 2)))] if linear else [],
            "through_data": draw.random() < 0.5,
            "again": draw.random() < 0.3,
            "warm_up": draw.randint(0, 2),
            "reuse": draw.random() < 0.2,
        }

    def open(self, values: Values, state: State) -> list[str]:
        state.need_outside()
        state.need_not_in("suspended", "thread", "step_each", "hooks", "anomaly", "profile", "stream", "no_grad")
        state.need(state.graphs < 3 and not state.held)
        state.need(all(state.layers[at] in LINEAR for at in values["writes"]))
        state.drop_graphs_of_autograd()
        values["name"] = state.name("captured")
        state.push(frame_of(values, state))
        state.inside["capture"] += 1
        state.inside["function"] += 1
        grad = "" if values["learns"] else "torch.no_grad(), "
        return [
            *DROP,
            f"def {values['name']}():",
            "    def forward(h):",
            f"        with {grad}{region(values, state)}:",
        ]

    def close(self, values: Values, state: State) -> list[str]:
        state.pop()
        state.saved.clear()
        state.inside["capture"] -= 1
        state.inside["function"] -= 1
        state.graphs += 1
        data = ".data" if values["through_data"] else ""
        write = ["    with torch.no_grad():"] if values["writes"] else []
        write += [f"        m[{at}].weight{data}.mul_(0.95)" for at in values["writes"]]
        learn = ["    if loss.requires_grad:", "        loss.backward()"] if values["learns"] else []
        again = ["    loss = loss + forward(x)"] if values["again"] and not values["learns"] else []
        return [
            "            return h.float().square().mean()",
            "    loss = forward(x)",
            *learn,
            *write,
            *again,
            "    return loss.detach()",
            f"capture({values['name']}, m, graphs, warm_up={values['warm_up']}, reuse={values['reuse']})",
        ]

    def simpler(self, values: Values) -> Iterator[Values]:
        for name, plain in (("writes", []), ("again", False), ("reuse", False), ("warm_up", 0), ("learns", False)):
            if values[name] != plain:
                yield {**values, name: plain}
        yield from simpler_region(values)


@kind("replay")
class Replay(Kind):
    """Replays all graphs. Inside a region before it uses weights, since a graph may write to them."""

    weight = 8
    devices = ("cuda",)

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"times": draw.randint(1, 2), "on_a_stream": draw.random() < 0.3}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need_not_in("suspended", "step_each")
        state.need(state.graphs > 0)
        state.need(not state.casts)
        state.drop_graphs_of_autograd()
        return [
            *DROP,
            f"replay(graphs, note, times={values['times']}, on_a_stream={values['on_a_stream']})",
            "note(*m.parameters())",
        ]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["times"] > 1:
            yield {**values, "times": 1}
        if values["on_a_stream"]:
            yield {**values, "on_a_stream": False}


@kind("drop_graph")
class DropGraph(Kind):
    """Frees a graph. The rules for weights stay, since others may be there."""

    weight = 2
    devices = ("cuda",)

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"reset": draw.random() < 0.5}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need(state.graphs > 0)
        return [f"drop_graph(graphs, reset={values['reset']})"]
