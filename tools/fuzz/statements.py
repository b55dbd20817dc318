"""The kinds of statements besides ops: losses and gradients, changes of weights and caches, blocks, CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fuzz.ops import LINEAR, OVERRIDE_SETS
from fuzz.rules import Frame, State, Unfit
from fuzz.tree import Kind, Values, kind

CACHE_MODES = ("weights", "persistent", "all", "none")
#: The values of a block whose region is on.
ENABLED = (True,)


# --- losses and gradients

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


def draw_two(draw: random.Random, state: State, kinds: tuple[str, ...] = LINEAR) -> list[int]:
    """Two layers with matrices."""
    found = state.of(*kinds)
    if len(found) < 2:
        raise Unfit
    return draw.sample(found, 2)


def draw_three(draw: random.Random, state: State) -> list[int]:
    """Three layers with matrices, maybe the same ones."""
    return [draw_linear(draw, state) for _ in range(3)]


@kind("loss")
class Loss(Kind):
    """Keeps a loss, and starts anew."""

    weight = 8
    choices = {"loss": tuple(LOSSES), "scale": (1, 1, 2, 3)}
    plain = {"loss": "square", "scale": 1}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.pending += 1
        state.restart()
        scaled = f"x * {values['scale']}" if values["scale"] > 1 else "x"
        return [f"losses.append({LOSSES[values['loss']].format(h=state.h)})", f"h = {scaled}"]


@kind("penalty")
class Penalty(Kind):
    """A loss of a weight itself."""

    weight = 0.7
    choices = {"layer": draw_linear}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.use(values["layer"], "direct")
        return [f"losses.append(m[{values['layer']}].weight.float().square().mean())"]


@kind("backward")
class Backward(Kind):
    """The backward of all losses."""

    weight = 5
    choices = {"how": ("sum", "sum", "each", "again", "scaled")}
    plain = {"how": "sum"}

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
    choices = {"layer": draw_linear, "which": ("grad", "vmap", "jvp")}

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


# --- changes of weights and caches

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(m.parameters(), lr=0.05, foreach=False)",
    "sgd_foreach": "torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=True)",
    "sgd_fused": "torch.optim.SGD(m.parameters(), lr=0.05, fused=True)",
    "adamw": "torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False)",
    "adamw_foreach": "torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)",
    "adamw_fused": "torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)",
}


@kind("step")
class Step(Kind):
    """A step between regions."""

    weight = 5
    choices = {"zero": ("none", "zero", "")}
    plain = {"zero": ""}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_outside()
        state.write_to_all()
        zero = {"none": ["optimizer.zero_grad()"], "zero": ["optimizer.zero_grad(set_to_none=False)"], "": []}
        return ["optimizer.step()", *zero[values["zero"]]]


@kind("step_inside")
class StepInside(Kind):
    """Writes to all weights in a region, which stock does not see: docs/differences.md, row 1."""

    weight = 3
    choices = {"how": ("step", "step", "mul", "data")}

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
    choices = {"optimizer": tuple(OPTIMIZERS)}
    plain = {"optimizer": "sgd"}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need_not_in("thread")
        return [f"optimizer = {OPTIMIZERS[values['optimizer']]}"]


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
    choices = {"layer": draw_linear, "how": tuple(WRITES)}
    plain = {"how": "mul"}

    def open(self, values: Values, state: State) -> list[str]:
        at, (source, where) = values["layer"], WRITES[values["how"]]
        state.need_top()
        state.need_not_in("function", "suspended")
        state.need(state.layers[at] in LINEAR)
        state.need(not state.frames or "inside" in where)
        state.need(state.device == "cpu" or "cpu" not in where)
        state.need(not (at in state.half and "cpu" in where))
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


@kind("swap")
class Swap(Kind):
    """Exchanges two layers, or their data."""

    weight = 2
    choices = {
        "layers": lambda draw, state: draw_two(draw, state, ("linear",)),
        "how": ("data", "modules", "tensors"),
    }

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
    choices = {"layers": draw_two}

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


@kind("hold")
class Hold(Kind):
    """Something else refers to the weights, or a copy of them is made."""

    weight = 0.7
    choices = {"what": ("m.state_dict()", "copy.deepcopy(m)", "[p.detach() for p in m.parameters()]", "h", "")}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need(not (values["what"].startswith("copy") and (state.inside["step_each"] or state.policies)))
        state.held = values["what"] == "h" or (state.held and values["what"] != "")
        return [f"held.append({values['what']})" if values["what"] else "held.clear()"]


@kind("freeze")
class Freeze(Kind):
    """Freezes a layer, or lets it learn again."""

    weight = 1.5
    choices = {
        "layer": lambda draw, state: draw.randrange(len(state.layers)),
        "frozen": (True, True, True, False, False),
    }

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
    choices = {"layer": draw_linear, "dtype": ("bfloat16", "float16")}

    def open(self, values: Values, state: State) -> list[str]:
        at = values["layer"]
        state.need_outside()
        state.need_not_in("suspended", "step_each")
        state.need(state.layers[at] in LINEAR and state.weights.count(state.weights[at]) == 1)
        state.need(not state.graphs and not state.saved and not state.pending and at not in state.policies)
        state.half[at] = values["dtype"]
        return ["optimizer.zero_grad()", "h = x", f"m[{at}].to(torch.{values['dtype']})"]


@kind("clear")
class Clear(Kind):
    """Clears caches."""

    weight = 1
    choices = {"all": (True, False, False)}

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
    choices = {"layer": draw_linear, "policy": ('"fp32"', '"off"', '{"linear": "fp32"}')}

    def open(self, values: Values, state: State) -> list[str]:
        at = values["layer"]
        state.need_outside()
        state.need_not_in("suspended")
        state.need(state.layers[at] in LINEAR and at not in state.half and at not in state.policies)
        state.policies[at] = values["policy"].strip('"')
        return [f'autocast.set_module_policy(m, "{at}", {values["policy"]})']


# --- blocks


def draw_dtype(draw: random.Random, state: State) -> str:
    """A region's dtype. A nested one mostly has that of the region around it."""
    same = state.frames and state.frames[-1].dtype and draw.random() < 0.8
    return state.frames[-1].dtype if same else draw.choice(("bfloat16", "bfloat16", "float16"))


def draw_enabled(draw: random.Random, state: State) -> bool:
    """Whether a region is enabled; an outermost one is."""
    return draw.random() < 0.85 or not state.frames


#: The values of every region.
REGION = {
    "dtype": draw_dtype,
    "enabled": draw_enabled,
    "cache": ("mode", "mode", "mode", "mode", "inherit", "off"),
    "which": CACHE_MODES,
}
PLAIN_REGION = {"dtype": "bfloat16", "cache": "mode", "enabled": True}


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


class Region(Kind):
    """A region."""

    weight = 12
    has_body = True
    choices = REGION
    plain = PLAIN_REGION

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
    choices = {**REGION, "enabled": ENABLED}

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
    choices = {**REGION, "enabled": ENABLED, "overrides": OVERRIDE_SETS}

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
        yield from super().simpler(values)


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
    choices = {**REGION, "enabled": ENABLED, "layers": draw_three, "steps": (1, 2, 3)}
    plain = {"steps": 1, **PLAIN_REGION}

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
    choices = {"reentrant": (False, False, False, True, True)}
    plain = {"reentrant": False}

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


# --- CUDA graphs

#: Frees the graphs of autograd, which must not refer to weights while a CUDA graph uses them.
DROP = ("h = x", "losses.clear()")


def draw_some(draw: random.Random, state: State) -> list[int]:
    """No, one or two layers with matrices."""
    linear = state.of(*LINEAR)
    return [draw.choice(linear) for _ in range(draw.choice((0, 0, 1, 2)))] if linear else []


@kind("capture")
class Capture(Kind):
    """Captures an inference or a training step, with writes to weights before, between and after."""

    weight = 6
    has_body = True
    indent = 3
    devices = ("cuda",)
    choices = {
        **REGION,
        "enabled": ENABLED,
        "learns": (False, True),
        "writes": draw_some,
        "through_data": (False, True),
        "again": (False, False, True),
        "warm_up": (0, 1, 2),
        "reuse": (False, False, False, False, True),
    }
    plain = {"writes": [], "again": False, "reuse": False, "warm_up": 0, "learns": False, **PLAIN_REGION}

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


@kind("replay")
class Replay(Kind):
    """Replays all graphs. Inside a region before it uses weights, since a graph may write to them."""

    weight = 8
    devices = ("cuda",)
    choices = {"times": (1, 2), "on_a_stream": (False, False, True)}
    plain = {"times": 1, "on_a_stream": False}

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


@kind("drop_graph")
class DropGraph(Kind):
    """Frees a graph. The rules for weights stay, since others may be there."""

    weight = 2
    devices = ("cuda",)
    choices = {"reset": (False, True)}

    def open(self, values: Values, state: State) -> list[str]:
        state.need_top()
        state.need(state.graphs > 0)
        return [f"drop_graph(graphs, reset={values['reset']})"]
