"""A user's program for type checkers, which is not run. tests/test_types.py and `make lint` check it.

A comment `# error` marks a line that has to be an error, for each of them.
"""

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, assert_type, overload

import torch
from torch import Tensor, nn

import torch_promote as tp
from torch_promote.checking.why import Derivation
from torch_promote.numerics.comparison import Site
from torch_promote.numerics.find_nonfinite import Attempt
from torch_promote.policy.policy import AppliedPolicy, PolicyDiff
from torch_promote.reference import PromotionRule
from torch_promote.regions.defaults import RegisteredPolicy
from torch_promote.regions.installation import Installation
from torch_promote.regions.module_policies import SetPolicies
from torch_promote.regions.promotion import PromotionEvent, PromotionKind

T = TypeVar("T", bound=nn.Module)


# --- what can be decorated


@tp.my_autocast("cpu", torch.bfloat16)
def function(x: Tensor, /, scale: float = 1.0, *, name: str | None = None) -> Tensor:
    return x * scale


assert_type(function(torch.ones(1), 2.0, name="a"), Tensor)
function("x")  # error
function(torch.ones(1), scale="two")  # error
function(torch.ones(1), nam="a")  # error
function()  # error
function.backward()  # error


@tp.promotion("strict")
def generic(model: T, *, copies: int) -> list[T]:
    return [model] * copies


assert_type(generic(nn.Linear(1, 1), copies=2), list[nn.Linear])
generic(3, copies=2)  # error


@overload
def overloaded(x: Tensor) -> Tensor: ...
@overload
def overloaded(x: float) -> float: ...
def overloaded(x: Tensor | float) -> Tensor | float:
    return x


half = tp.my_autocast("cpu")
assert_type(half(overloaded)(1.0), float)
assert_type(half(overloaded)(torch.ones(1)), Tensor)
half(overloaded)("x")  # error


@half
async def coroutine(x: Tensor) -> float:
    return float(x)


@half
def generator(x: Tensor) -> Generator[Tensor, int, str]:
    sent = yield x
    return str(sent)


@half
async def asynchronous_generator(count: int) -> AsyncIterator[Tensor]:
    yield torch.ones(count)


async def main() -> str:
    assert_type(await coroutine(torch.ones(1)), float)
    async for x in asynchronous_generator(3):
        assert_type(x, Tensor)
    async for _ in asynchronous_generator("3"):  # error
        pass
    await coroutine(3)  # error
    return coroutine(torch.ones(1))  # error


def delegate() -> Generator[Tensor, int, None]:
    assert_type((yield from generator(torch.ones(1))), str)
    assert_type(generator(torch.ones(1)).send(3), Tensor)
    generator(torch.ones(1)).send("3")  # error


class Model(nn.Module):
    @tp.my_autocast("cpu", overrides={"softmax": "lower", torch.mm: torch.float32, "mm.out": tp.CastPolicy.keep})
    def forward(self, x: Tensor) -> Tensor:
        return x

    @classmethod
    @half
    def build(cls, depth: int) -> "Model":
        return cls()

    @staticmethod
    @half
    def loss(x: Tensor) -> float:
        return float(x)

    @property
    @half
    def width(self) -> int:
        return 3

    @tp.promotion("jax", on_promotion="warn", kinds=["any", PromotionKind.UP_TO_FLOAT64])
    async def serve(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return x


model = Model()
assert_type(model.forward(torch.ones(1)), Tensor)
assert_type(Model.build(3), Model)
assert_type(Model.loss(torch.ones(1)), float)
assert_type(model.width, int)
assert_type(model.serve(torch.ones(1)).close(), None)
assert_type(half(model)(torch.ones(1)), Tensor)
assert_type(half(functools.partial(function, torch.ones(1)))(), Tensor)
assert_type(half(lambda: 3)(), int)
model.forward(3)  # error
Model.build("3")  # error
half(model).parameters()  # error
half(3)  # error


@tp.stock_autocast("cpu")
def under_stock(x: int) -> str:
    return str(x)


@tp.installed_as(policy="off", cache="all")
def under_installation(x: int) -> str:
    return str(x)


@tp.find_nonfinite(raise_at_first=True)
def finite(x: int) -> str:
    return str(x)


@tp.trace(values=True)
def traced(x: int) -> str:
    return str(x)


assert_type(under_stock(1), str)
assert_type(under_installation(1), str)
assert_type(finite(1), str)
assert_type(traced(1), str)
under_stock("1")  # error
under_installation("1")  # error
finite("1")  # error
traced("1")  # error

# --- arguments

file: str = "mine.toml"
device = torch.device("cpu")
tp.my_autocast()
tp.my_autocast(device.type, "bf16", policy=file, cache="persistent")
tp.my_autocast(["cpu", "cuda"], policy=Path(file), overrides={torch.ops.aten.mm.default: "float64"})
tp.my_autocast(policy=tp.Policy.named("torch-2.11"), model=model)
tp.promotion(tp.make_rule("mine", {(torch.int8, torch.int16): torch.int16}, over="torch"), on_promotion=print)
tp.my_autocast(cache="persistant")  # error
tp.my_autocast(device_typ="cpu")  # error
tp.my_autocast(device)  # error
tp.my_autocast("cpu", dtype=16)  # error
tp.my_autocast("cpu", overrides={"mm": 16})  # error
tp.my_autocast("cpu", policy=16)  # error
tp.my_autocast("cpu", model=function)  # error
tp.promotion("jaks")  # error
tp.promotion("jax", "wran")  # error
tp.promotion("jax", "warn", kinds="overflow")  # error
tp.promotion("jax", lambda: None)  # error
tp.make_rule("mine", {}, over="jaks")  # error
tp.install(cache="never")  # error
tp.Policy.named("fp23")  # error
tp.trace(where="modules")  # error
tp.tune(print, model=model, tolerance=1e-3, level="ops")  # error
tp.tune(print, model=model, tolerance=1e-3, direction="fast")  # error
tp.crosscheck(level="bit")  # error
tp.why("int8[3] + 1", autocast="gpu")  # error
tp.why("int8[3] + 1", rule="jaks")  # error
tp.reference.can_cast("int8", "int16", "unsave")  # error
tp.register_policy("mm", 3)  # error
tp.set_module_policy(model, {"head": 3})  # error

# --- results

policy = tp.Policy.stock().override({"mm": "fp32"}, "cpu").override_modules({"head": "fp32", "body": {"mm": "keep"}})
assert_type(policy, tp.Policy)
assert_type(policy.diff("stock"), PolicyDiff)
assert_type(policy.lookup("mm", "cuda"), tp.CastPolicy | torch.dtype | None)
assert_type(tp.default_policy(), tp.Policy | None)
assert_type(tp.cache_info()["entries"], int)
assert_type(tp.set_default_policy("cuda"), tp.Policy | None)
assert_type(tp.module_policies(model), dict[str, dict[str, str] | tp.Policy | str])
assert_type(tp.registered_policies(), Mapping[tuple[str, str], tp.CastPolicy | torch.dtype])
print(tp.cache_info()["entry"])  # error

applied = policy.apply_to(model)
assert_type(applied, AppliedPolicy)
assert_type(applied.policy, tp.Policy)
applied.undo()  # error
policy.apply_to(file)  # error
with policy.apply_to(model) as applied_here, tp.my_autocast("cpu", policy=policy) as region:
    assert_type(applied_here, AppliedPolicy)
    assert_type(applied_here.modules, Mapping[str, dict[str, str] | tp.Policy | str])
    assert_type(region, tp.my_autocast)
with tp.set_module_policy(model, {"head": "fp32", "body.*": policy, nn.Linear: {"linear": "float16"}}) as set_here:
    assert_type(set_here, SetPolicies)
with tp.register_policy("mm", torch.float32, device_type="cpu") as registered:
    assert_type(registered, RegisteredPolicy)
    assert_type(registered.overloads, tuple[str, ...])
assert_type(tp.install(overrides={"mm": "fp32"}), Installation)
assert_type(tp.installed(), Installation | None)
assert_type(tp.uninstall(), Installation | None)
with tp.installed_as(policy="cuda") as installation:
    assert_type(installation, Installation)
with tp.promotion("torch") as by_rule:
    assert_type(by_rule, tp.promotion)


def returns_from_a_block() -> tp.TraceReport:
    with tp.trace(model, where="casts") as report:
        return report


def step() -> Tensor:
    return model(torch.ones(1))


with tp.trace(model) as report:
    step()
assert_type(report, tp.TraceReport)
assert_type(report.calls[0].phase, Literal["forward", "recompute", "backward", "optimizer"])
assert_type(tp.TraceReport.load("a.json"), tp.TraceReport)
print(report.cals)  # error
print(tp.trace(model).calls)  # error
with tp.find_nonfinite(model, allow=["log"]) as nonfinite:
    step()
assert_type(nonfinite, tp.NonfiniteReport)
assert_type(nonfinite.suggest(step), tp.Policy | None)
assert_type(nonfinite.cure, Attempt | None)
with tp.crosscheck(level="bits") as crosschecked:
    step()
assert_type(crosschecked, tp.CrosscheckReport)
with tp.check_casts() as checks:
    step()
assert_type(checks.checked, int)
comparison = tp.compare(step, model=model, candidate="cuda")
assert_type(comparison, tp.Comparison)
assert_type(comparison.sites, list[Site])
tuning = tp.tune(step, model=model, tolerance={"loss": 1e-3}, level="module", formats=("lower", "float8"))
assert_type(tuning, tp.Tuning)
assert_type(tuning.level, Literal["op", "module", "site"])
assert_type(tp.why("int8[3] + 1", autocast="cpu", rule="jax"), Derivation)
assert_type(tp.reference.promotion_rule("numpy"), PromotionRule)


def on_promotion(event: PromotionEvent) -> None:
    assert_type(event.kind, PromotionKind)


tp.promotion("array_api", on_promotion)
kept: Callable[[Tensor], Coroutine[Any, Any, float]] = coroutine


def not_a_decorator() -> None:
    tp.crosscheck()(function)  # error
