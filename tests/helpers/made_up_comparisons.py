"""Made-up comparisons and tunings, whose numbers are the same every time."""

from __future__ import annotations

import math
from typing import Any

from torch_promote.numerics.comparison import Comparison, GradientError, Metric, Site
from torch_promote.numerics.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.policy.policy import Policy

__all__ = ["comparison_of", "gpt_comparison", "gpt_tuning", "made_up_site", "small_comparison", "small_tuning"]


def made_up_site(op: str = "aten::linear", module: str = "", **others: Any) -> Site:
    """A site, by default in float16 with a small error."""
    known: dict[str, Any] = {
        "overload": "",
        "calls": 1,
        "line": "/code/model.py:12",
        "dtypes": "float16",
        "policy": "lower_precision_fp",
        "local": 3e-4,
        "accumulated": 8e-4,
        "impact": 1e-5,
        "signed_impact": -4e-6,
        "bytes": 4096,
        **others,
    }
    return Site(op, module=module, **known)


def comparison_of(*sites: Site, **others: Any) -> Comparison:
    """A comparison with these sites, of stock's policy with float32."""
    known: dict[str, Any] = {
        "reference": Policy.named("off"),
        "candidate": Policy.stock(),
        "metrics": [Metric("loss", 2.3441, 2.3469, 1.19e-3)],
        "runs": 3,
        "backwards": 2,
        "torch_version": "2.13.0",
        **others,
    }
    return Comparison(sites=list(sites), **known)


def small_comparison(**others: Any) -> Comparison:
    """A softmax with a large impact, a product with a small one, and an op outside of modules with an unknown one."""
    softmax = made_up_site(
        "aten::softmax",
        "blocks.0.attn",
        overload="int",
        calls=2,
        line="/code/model.py:31",
        local=0.02,
        accumulated=0.021,
        impact=2.5e-3,
        signed_impact=1.9e-3,
    )
    product = made_up_site("aten::linear", "blocks.0.attn.q")
    loss = made_up_site(
        "aten::mse_loss",
        dtypes="float16, float32",
        policy="",
        line="",
        local=0.0,
        accumulated=None,
        impact=None,
        signed_impact=None,
    )
    known: dict[str, Any] = {
        "gradients": [GradientError("blocks.0.attn.q.weight", 0.03, 1.5), GradientError("head.bias", math.inf, 0.0)],
        "modules": ["", "blocks", "blocks.0", "blocks.0.attn", "blocks.0.attn.q", "head"],
        "not_aligned": ["aten::copy_ in head: the candidate made 1 call more."],
        "not_seen": ["A compiled graph ran 2 times. The calls in it were not seen."],
        "notes": ["The step draws random numbers."],
        **others,
    }
    return comparison_of(softmax, product, loss, **known)


def gpt_comparison() -> Comparison:
    """A large comparison: twelve sites in each of 60 blocks."""
    ops = ("linear", "matmul", "softmax", "div", "layer_norm", "gelu", "dropout", "mul", "add", "cat", "sum", "exp")
    places = [(f"transformer.h.{block}.attn", op) for block in range(60) for op in ops]
    sizes = [10.0 ** -(1 + number * 7 % 23 / 4) for number in range(len(places))]
    sites = [
        made_up_site(f"aten::{op}", path, local=size, accumulated=2 * size, impact=size * size)
        for (path, op), size in zip(places, sizes, strict=True)
    ]
    sites.sort(key=lambda site: -(site.impact or 0.0))
    return comparison_of(*sites, modules=sorted({path for path, _ in places}))


def small_tuning(**others: Any) -> Tuning:
    """A search over three ops, of which one needs float32."""
    softmax, linear, loss = "aten::softmax", "aten::linear", "aten::mse_loss"
    all_three = (softmax, linear, loss)
    trials = [
        Trial((), {"loss": 1.2e-3}, False, "gate", seconds=0.25),
        Trial(all_three, {"loss": 0.0}, True, "gate", seconds=0.5),
        Trial((softmax,), {"loss": 2e-5}, True, "prefix", seconds=0.3),
        Trial((linear,), {"loss": math.inf}, False, "shrink", seconds=0.25),
        Trial((loss,), {}, False, "shrink", error="RuntimeError: no such kernel"),
        Trial((softmax,), {"loss": 4e-5}, True, "held out", seconds=0.3),
    ]
    known: dict[str, Any] = {
        "policy": Policy.stock().override({"softmax.int": "fp32"}),
        "overrides": {softmax: "fp32"},
        "found": (softmax,),
        "met": True,
        "level": "op",
        "direction": "accuracy",
        "tolerance": {"loss": 1e-3},
        "errors": {"loss": 2e-5},
        "certificate": Certificate(
            "minimum",
            "It is a minimum: the only smaller set of overrides was run and failed.",
            held_out={"loss": 4e-5},
        ),
        "trials": trials,
        "noise_floor": {"loss": 0.0},
        "candidates": [
            Candidate(softmax, softmax, "", 2.5e-3, True, 2),
            Candidate(linear, linear, "", 1e-5, calls=1),
            Candidate(loss, loss, "", 0.0, calls=1),
        ],
        "comparison": small_comparison(gradients=[]),
        "budget": 60,
        "runs": 9,
        "notes": ["Held-out batches were drawn with other random numbers."],
        **others,
    }
    return Tuning(**known)


def gpt_tuning() -> Tuning:
    """A search over the sites of a model of 60 blocks, with 60 trials and violations."""
    comparison = gpt_comparison()
    candidates = [
        Candidate(f"{site.module}: {site.op}", site.op, site.module, site.impact or 0.0, False, 1)
        for site in comparison.sites
    ]
    names = tuple(one.name for one in candidates)
    chosen = [names[: len(names) >> number % 10] for number in range(60)]
    errors = [0.5 / (1 + len(some)) * (1 + number % 7) for number, some in enumerate(chosen)]
    trials = [
        Trial(some, {"loss": error}, error < 0.01, "prefix", seconds=1.5)
        for some, error in zip(chosen, errors, strict=True)
    ]
    table = {"transformer.h.*.attn": {"aten::softmax": "fp32"}}
    violations = ("float32 for softmax passed, and float32 for softmax, div failed",)
    return small_tuning(
        policy=Policy.stock().override_modules(table),
        overrides=table,
        found=names[:180],
        level="site",
        certificate=Certificate("1-minimal", "It is 1-minimal.", violations=violations, held_out={"loss": 0.006}),
        met=False,
        trials=trials,
        candidates=candidates,
        comparison=comparison,
    )
