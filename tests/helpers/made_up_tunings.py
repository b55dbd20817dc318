"""Results of made-up searches, whose numbers are the same every time."""

from __future__ import annotations

import math
from typing import Any

from helpers.made_up_comparisons import gpt_comparison, small_comparison
from torch_promote.numerics.tuning.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.policy.policy import Policy

__all__ = ["gpt_tuning", "small_tuning"]


def small_tuning(**others: Any) -> Tuning:
    """A search over three ops, of which one needs float32."""
    softmax, linear, loss = "aten::softmax", "aten::linear", "aten::mse_loss"
    all_three = (softmax, linear, loss)
    trials = [
        Trial((), {"loss": 1.2e-3}, False, "gate", predicted=2.5e-3, seconds=0.25),
        Trial(all_three, {"loss": 0.0}, True, "gate", predicted=0.0, seconds=0.5),
        Trial((softmax,), {"loss": 2e-5}, True, "prefix", predicted=1e-5, seconds=0.3),
        Trial((linear,), {"loss": math.inf}, False, "shrink", predicted=2.4e-3, seconds=0.25),
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
        "predicted_against_measured": [
            (trial.overrides, trial.predicted, trial.errors["loss"])
            for trial in trials[:4]
            if trial.predicted is not None
        ],
        "comparison": small_comparison(gradients=[]),
        "budget": 60,
        "runs": 9,
        "notes": ["Held-out batches were drawn with other random numbers."],
        **others,
    }
    return Tuning(**known)


def gpt_tuning(**others: Any) -> Tuning:
    """A search over the sites of a model of 60 blocks, with 60 trials, two metrics and violations."""
    comparison = gpt_comparison()
    candidates = [
        Candidate(f"{site.module}: {site.op}", site.op, site.module, site.impact or 0.0, bool(site.nonfinite), 1)
        for site in comparison.sites
    ]
    names = tuple(one.name for one in candidates)
    trials = []
    for number in range(60):
        chosen = names[: len(names) >> (number % 10)] if number % 3 else names[number : number * 2]
        error = 0.5 / (1 + len(chosen)) * (1 + number % 7)
        trials.append(
            Trial(
                chosen,
                {"loss": error, "accuracy": error / 3},
                error < 0.01,
                ("prefix", "shrink", "certify")[number % 3],
                predicted=error * (0.3 + number % 5),
                seconds=1.5,
            )
        )
    table = {"transformer.h.*.attn": {"aten::softmax": "fp32"}, "transformer.h.3.mlp.up": {"aten::linear": "fp32"}}
    known: dict[str, Any] = {
        "policy": Policy.stock().override_modules(table),
        "overrides": table,
        "found": names[:180],
        "level": "site",
        "tolerance": {"loss": 0.01, "accuracy": 0.05},
        "errors": {"loss": 0.004, "accuracy": 0.002},
        "certificate": Certificate(
            "1-minimal",
            "It is 1-minimal: without any one of the 61 overrides it fails.",
            violations=("float32 for softmax passed, and float32 for softmax, div failed",),
            held_out={"loss": 0.006, "accuracy": 0.003},
            compiled={"loss": 0.02, "accuracy": 0.004},
        ),
        "met": False,
        "trials": trials,
        "noise_floor": {"loss": 1e-9, "accuracy": 0.0},
        "candidates": candidates,
        "predicted_against_measured": [(one.overrides, one.predicted or 0.0, one.errors["loss"]) for one in trials],
        "comparison": comparison,
        "runs": 60,
        **others,
    }
    return small_tuning(**known)
