"""A user's program for type checkers, which is not run. tests/test_types.py and `make lint` check it.

A comment `# error` marks a line that has to be an error, for each of them.
"""

import functools
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, assert_type

import torch
from torch import Tensor, nn

import torch_promote as tp
from torch_promote.reference import PromotionRule
from torch_promote.types import (
    AppliedPolicy,
    Attempt,
    CacheMode,
    Derivation,
    DeviceType,
    Difference,
    Explanation,
    Installation,
    OpPolicy,
    Phase,
    PolicyDiff,
    PolicyLike,
    PromotionEvent,
    PromotionKind,
    RegisteredPolicy,
    ReportBlock,
    SetPolicies,
    Site,
)

# --- decorators; decorated_script.py has what they can decorate


class Model(nn.Module):
    @tp.my_autocast("cpu", overrides={"softmax": "lower", torch.mm: torch.float32, "mm.out": tp.CastPolicy.keep})
    def forward(self, x: Tensor) -> Tensor:
        return x

    @tp.promotion("jax", on_promotion="warn", kinds=["any", PromotionKind.UP_TO_FLOAT64])
    async def serve(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return x


@tp.my_autocast("cpu", torch.bfloat16)
def function(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


@tp.promotion("strict")
async def coroutine(x: Tensor) -> float:
    return float(x)


model = Model()
assert_type(model.forward(torch.ones(1)), Tensor)
assert_type(model.serve(torch.ones(1)).close(), None)
assert_type(tp.my_autocast("cpu")(functools.partial(function, torch.ones(1)))(), Tensor)

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
tp.tune(print, model=model, tolerance=1e-3, direction="speed", formats=("lower", "float9"))  # error
tp.crosscheck(level="bit")  # error
tp.why("int8[3] + 1", autocast="gpu")  # error
tp.why("int8[3] + 1", rule="jaks")  # error
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
assert_type(tp.install().remove(), None)
with tp.install(policy="cuda") as installation:
    assert_type(installation, Installation)
with tp.promotion("torch") as by_rule:
    assert_type(by_rule, tp.promotion)


def returns_from_a_block() -> tp.types.TraceReport:
    with tp.trace(model, where="casts") as report:
        return report


def step() -> Tensor:
    return model(torch.ones(1))


with tp.trace(model) as report:
    step()
assert_type(report, tp.types.TraceReport)
assert_type(report.calls[0].phase, Phase)
assert_type(report.calls[0].phase, Literal["forward", "recompute", "backward", "optimizer"])
assert_type(report.diff(report), Difference)
assert_type(report.explain("head"), Explanation)
assert_type(tp.types.TraceReport.load("a.json"), tp.types.TraceReport)
print(report.cals)  # error
print(tp.trace(model).calls)  # error
with tp.find_nonfinite(model, allow=["log"]) as nonfinite:
    step()
assert_type(nonfinite, tp.types.NonfiniteReport)
assert_type(nonfinite.attempts, list[Attempt])
with tp.crosscheck(level="bits") as crosschecked:
    step()
assert_type(crosschecked, tp.types.CrosscheckReport)
with tp.check_casts() as checks:
    step()
assert_type(checks.checked, int)
comparison = tp.compare(step, model=model, candidate="cuda")
assert_type(comparison, tp.types.Comparison)
assert_type(comparison.sites, list[Site])
tuning = tp.tune(step, model=model, tolerance={"loss": 1e-3}, level="module", formats=("lower", "float8"))
assert_type(tuning, tp.types.Tuning)
assert_type(tuning.level, Literal["op", "module", "site"])
assert_type(tp.why("int8[3] + 1", autocast="cpu", rule="jax"), Derivation)
assert_type(tp.reference.promotion_rule("numpy"), PromotionRule)


def on_promotion(event: PromotionEvent) -> None:
    assert_type(event.kind, PromotionKind)


def own_region(
    device: DeviceType, policy: PolicyLike, overrides: dict[str, OpPolicy], cache: CacheMode
) -> tp.my_autocast:
    return tp.my_autocast(device, policy=policy, overrides=overrides, cache=cache)


own_region("cpu", "cuda", {"mm": "fp32"}, "all")
own_region("gpu", "cuda", {}, "all")  # error
tracing: ReportBlock[tp.types.TraceReport] = tp.trace(model)
tp.promotion("array_api", on_promotion)
kept: Callable[[Tensor], Coroutine[Any, Any, float]] = coroutine


def not_a_decorator() -> None:
    tp.crosscheck()(function)  # error
