"""Made-up comparisons and tunings, whose numbers are the same every time."""

from __future__ import annotations

import math
from typing import Any

from torch_promote.numerics.comparison import Comparison, GradientError, Metric, Site
from torch_promote.numerics.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.policy.policy import Policy


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
