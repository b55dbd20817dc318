"""Statements with a body."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fuzz.ops import LINEAR, OVERRIDE_SETS
from fuzz.rules import Frame, State, Unfit
from fuzz.tree import Kind, Values, kind

MODES = ("weights", "persistent", "all", "none")
DTYPES = ("bfloat16", "bfloat16", "float16")


# --- regions


def draw_region(draw: random.Random, state: State) -> Values:
    """The values of a region. A nested one mostly has the dtype of the region around it."""
    same = state.frames and state.frames[-1].dtype and draw.random() < 0.8
    return {
        "dtype": state.frames[-1].dtype if same else draw.choice(DTYPES),
        "enabled": draw.random() < 0.85 or not state.frames,
        "cache": draw.choice(("mode", "mode", "mode", "mode", "inherit", "off")),
        "which": draw.choice(MODES),
    }


def region(values: Values, state: State, extra: str = "") -> str:
    """The call that makes a region."""
    arguments = [f"dtype=torch.{values['dtype']}"]
    if not values["enabled"]:
        arguments.append("enabled=False")
    if values["cache"] == "off":
        arguments.append("cache_enabled=False")
    elif values["cache"] == "mode":
        arguments.append(f'cache="{values["which"] if state.mode == "mixed" else state.mode}"')
    return f"autocast({', '.join(arguments)}{extra})"


def frame_of(values: Values, state: State, ours: bool = True) -> Frame:
    """The frame of a region."""
    around = state.frames[-1].cached if state.frames else True
    mode = values["which"] if state.mode == "mixed" else state.mode
    cached = {"mode": mode != "none", "inherit": around, "off": False}[values["cache"]]
    return Frame(ours, values["enabled"], values["dtype"], cached)


def simpler_region(values: Values) -> Iterator[Values]:
    """A plain region."""
    for name, plain in (("dtype", "bfloat16"), ("cache", "mode"), ("enabled", True)):
        if values[name] != plain:
            yield {**values, name: plain}


class Region(Kind):
    """A region."""

    weight = 12
    has_body = True

    def draw(self, draw: random.Random, state: State) -> Values:
        return draw_region(draw, state)

    def enter(self, values: Values, state: State, ours: bool = True) -> None:
        """Checks whether a region may be here, and opens it."""
        state.need_not_in("overriding", "policy_off")
        state.need(not state.inside["checkpoint"] or state.frames[0].dtype == "")
        state.push(frame_of(values, state, ours))

    def open(self, values: Values, state: State) -> list[str]:
        self.enter(values, state)
        return [f"with {region(values, state)}:"]

    def close(self, values: Values, state: State) -> list[str]:
        state.pop()
        return []

    def simpler(self, values: Values) -> Iterator[Values]:
        yield from simpler_region(values)


kind("region")(Region)


@kind("stock_region")
class StockRegion(Region):
    """A region that is stock's in both runs."""

    weight = 1.5

    def open(self, values: Values, state: State) -> list[str]:
        if values["cache"] != "off":
            values = {**values, "cache": "inherit"}
        self.enter(values, state, ours=False)
        call = region(values, state).replace("autocast(", f'tp.stock_autocast("{state.device}", ')
        return [f"with {call}:"]


@kind("policy_off")
class PolicyOff(Region):
    """A region with the policy "off": stock's is disabled."""

    weight = 0.7

    def draw(self, draw: random.Random, state: State) -> Values:
        return {**draw_region(draw, state), "enabled": True}

    def open(self, values: Values, state: State) -> list[str]:
        self.enter({**values, "enabled": False}, state)
        state.inside["policy_off"] += 1
        call = region(values, state, ', policy="off"')
        return [f"with {call}:"]

    def close(self, values: Values, state: State) -> list[str]:
        state.inside["policy_off"] -= 1
        return super().close(values, state)


@kind("overriding")
class Overriding(Region):
    """A region with overrides: stock's run casts by hand."""

    weight = 2

    def draw(self, draw: random.Random, state: State) -> Values:
        return {**draw_region(draw, state), "enabled": True, "overrides": draw.choice(OVERRIDE_SETS)}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_not_in("suspended")
        self.enter(values, state)
        state.inside["overriding"] += 1
        state.lower |= {"float16", "bfloat16"} & set(values["overrides"].values())
        call = region(values, state, f", overrides={values['overrides']}")
        return [f"with {call}:"]

    def close(self, values: Values, state: State) -> list[str]:
        state.inside["overriding"] -= 1
        return super().close(values, state)

    def simpler(self, values: Values) -> Iterator[Values]:
        overrides = values["overrides"]
        for op in overrides if len(overrides) > 1 else ():
            yield {**values, "overrides": {k: v for k, v in overrides.items() if k != op}}
        yield from simpler_region(values)


@kind("failing")
class Failing(Region):
    """A region that an exception ends."""

    weight = 1.5
    indent = 2

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        self.enter(values, state)
        return ["try:", f"    with {region(values, state)}:"]

    def close(self, values: Values, state: State) -> list[str]:
        super().close(values, state)
        return ["        raise ZeroDivisionError", "except ZeroDivisionError:", "    pass"]


@kind("decorated")
class Decorated(Region):
    """A decorated function."""

    weight = 1.5

    def open(self, values: Values, state: State) -> list[str]:
        self.enter(values, state)
        state.inside["function"] += 1
        return [f"@{region(values, state)}", "def decorated(h):"]

    def close(self, values: Values, state: State) -> list[str]:
        super().close(values, state)
        state.inside["function"] -= 1
        return ["    return h", "h = decorated(h)"]


@kind("suspended")
class Suspended(Region):
    """A generator that is suspended in a region, while the program goes on. The region stays open meanwhile."""

    weight = 1
    indent = 0

    def draw(self, draw: random.Random, state: State) -> Values:
        layers = state.of(*LINEAR)
        if not layers:
            raise Unfit
        chosen = draw.choices(layers, k=3)
        return {**draw_region(draw, state), "enabled": True, "layers": chosen, "steps": draw.randint(1, 3)}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        self.enter(values, state)
        for at in values["layers"]:
            state.need(state.layers[at] in LINEAR and state.policies.get(at) != "off")
            state.use(at, "cast")
        name = state.name("running")
        values["name"] = name
        state.inside["suspended"] += 1
        return [
            "def generator(h):",
            f"    with {region(values, state)}:",
            f"        for layer in {[f'm[{at}]' for at in values['layers']]}:".replace("'", ""),
            "            h = layer(h)",
            "            yield h",
            f"{name} = generator(x)",
            f"note(next({name}))",
        ]

    def close(self, values: Values, state: State) -> list[str]:
        state.inside["suspended"] -= 1
        super().close(values, state)
        name = values["name"]
        return [*([f"note(next({name}))"] * (values["steps"] - 1)), f"{name}.close()"]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["steps"] > 1:
            yield {**values, "steps": 1}
        yield from simpler_region(values)


# --- other blocks


class Plain(Kind):
    """A block of one `with` statement."""

    has_body = True
    head = ""
    #: The name under which `State.inside` counts it.
    named = ""
    top = True
    tail: tuple[str, ...] = ()

    def open(self, values: Values, state: State) -> list[str]:
        if self.top:
            state.need_top()
        if self.named:
            state.need(state.inside[self.named] < 2)
            state.inside[self.named] += 1
        return [self.head.format(device=state.device)]

    def close(self, values: Values, state: State) -> list[str]:
        if self.named:
            state.inside[self.named] -= 1
        return list(self.tail)


_HOOKS = 'with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to("cpu", copy=True), lambda t: t.to("{device}")):'
kind("no_grad", head="with torch.no_grad():", named="no_grad", weight=2, tail=("note(h)",))(Plain)
kind("inference", head="with torch.inference_mode():", named="inference", weight=2, tail=("note(h)", "h = x"))(Plain)
kind("hooks", head=_HOOKS, named="hooks", weight=0.7)(Plain)
kind("anomaly", head="with torch.autograd.detect_anomaly(check_nan=False):", named="anomaly", weight=0.2)(Plain)
kind("profile", head="with torch.profiler.profile():", named="profile", weight=0.15)(Plain)
kind("deterministic", head="with deterministic():", named="deterministic", weight=0.2)(Plain)
kind("stream", head="with side_stream():", named="stream", devices=("cuda",))(Plain)


@kind("checkpoint")
class Checkpoint(Kind):
    """A checkpointed function."""

    weight = 2.5
    has_body = True

    def draw(self, draw: random.Random, state: State) -> Values:
        return {"reentrant": draw.random() < 0.4}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_not_in("overriding", "policy_off", "inference", "capture", "failing")
        state.need(state.inside["checkpoint"] == 0)
        state.need(not (values["reentrant"] and state.inside["double"]))
        state.need(not (values["reentrant"] and state.inside["hooks"]))
        values["alone"] = not state.frames
        if values["alone"]:  # the recomputation has a region around it
            state.push(Frame(ours=False, enabled=False, dtype="", cached=True))
        state.inside["checkpoint"] += 1
        state.inside["function"] += 1
        return ["def block(h):"]

    def close(self, values: Values, state: State) -> list[str]:
        if values["alone"]:
            state.pop()
        state.inside["checkpoint"] -= 1
        state.inside["function"] -= 1
        call = f"checkpoint(block, (h * 1.0).requires_grad_(), use_reentrant={values['reentrant']})"
        return ["    return h", f"h = {call}"]

    def simpler(self, values: Values) -> Iterator[Values]:
        if values["reentrant"]:
            yield {**values, "reentrant": False}


@kind("thread")
class Thread(Kind):
    """Another thread, while this one waits. No region is open, because stock's cache is the process's."""

    has_body = True
    weight = 1.5

    def open(self, values: Values, state: State) -> list[str]:
        state.need_outside()
        state.need_not_in("suspended")
        state.inside["thread"] += 1
        values["name"] = state.name("thread")
        return [f"def {values['name']}():", "    nonlocal h"]

    def close(self, values: Values, state: State) -> list[str]:
        state.inside["thread"] -= 1
        return [f"in_thread({values['name']})"]


@kind("double")
class Double(Kind):
    """A gradient of a gradient."""

    has_body = True
    weight = 1

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need(not state.inside["double"] and not state.inside["hooks"])
        state.need(not (state.inside["step_each"] and state.frames))  # it has a backward, which steps weights
        state.inside["double"] += 1
        state.inside["function"] += 1
        return ["def twice(h):"]

    def close(self, values: Values, state: State) -> list[str]:
        state.inside["double"] -= 1
        state.inside["function"] -= 1
        return [
            "    return h.float().square().mean()",
            "a = (x * 1.0).requires_grad_()",
            "note(*gradient_of_gradient(twice(a), a), *(p.grad for p in m.parameters()))",
        ]


@kind("step_each")
class StepEach(Kind):
    """Each weight is stepped as soon as its gradient is ready."""

    weight = 1.5
    has_body = True

    def open(self, values: Values, state: State) -> list[str]:
        state.need_outside()
        state.need_not_in("step_each", "suspended")
        state.need(not state.saved)
        state.inside["step_each"] += 1
        return ["with stepping_each(m):"]

    def close(self, values: Values, state: State) -> list[str]:
        state.inside["step_each"] -= 1
        return []
