"""The text of a tuning: the verdict, the overrides, and the most important trials, in 80 columns."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import expecttest
import pytest

from helpers.made_up_tunings import gpt_tuning, small_tuning
from torch_promote.numerics.tuning.tuning import Candidate, Certificate, Trial
from torch_promote.numerics.tuning.tuning_findings import chosen_candidates, frontier, marked_modules, tuning_verdict


class TestText(expecttest.TestCase):
    def test_of_a_search(self) -> None:
        self.assertExpectedInline(
            str(small_tuning()),
            """\
tuning: torch 2.13.0, fewest overrides, level op, 3 candidates, 9 of 60 runs
1 override, softmax, meets the tolerance: loss 2e-5, allowed 1e-3 (the minimum,
9 of 60 runs).

override  policy
softmax   fp32

metric  tolerance  error  held out  compiled  noise
loss         1e-3   2e-5      4e-5  -             0

overrides   error  passed  run for  which
        0  0.0012  no      gate     -
        1    2e-5  yes     prefix   softmax
        3       0  yes     gate     softmax (+2)

It is a minimum: the only smaller set of overrides was run and failed.

Notes:
  Held-out batches were drawn with other random numbers.""",
        )

    def test_of_a_model_of_60_blocks(self) -> None:
        self.assertExpectedInline(
            str(gpt_tuning()),
            """\
tuning: torch 2.13.0, fewest overrides, level site, 720 candidates, 60 of 60
runs
180 overrides, softmax in transformer.h.*.attn and linear in
transformer.h.3.mlp.up, meet the tolerance in the search and fail in the
compiled step: loss 0.02, allowed 0.01 (60 of 60 runs).

override                policy
transformer.h.*.attn    softmax: fp32
transformer.h.3.mlp.up  linear: fp32

metric    tolerance  error  held out  compiled  noise
loss           0.01  0.004     0.006      0.02   1e-9
accuracy       0.05  0.002     0.003     0.004      0

overrides  error / tolerance  passed  run for  which
        2                 17  no      shrink   ...h.1.attn: div
        5                8.3  no      shrink   ...h.0.ln_1: layer_norm (+4)
       11                4.2  no      certify  ...h.0.ln_1: layer_norm (+10)
       21                2.3  no      prefix   ...h.41.mlp.down: linear (+20)
       22                2.2  no      certify  ...h.0.ln_1: layer_norm (+21)
       42                1.2  no      prefix   transformer.h.24: add (+41)
       45                1.1  no      certify  ...h.0.ln_1: layer_norm (+44)
      180               0.55  yes     shrink   ...h.0.ln_1: layer_norm (+179)
      360               0.28  yes     shrink   ...h.0.ln_1: layer_norm (+359)
      720               0.14  yes     certify  ...h.0.ln_1: layer_norm (+719)

It is 1-minimal: without any one of the 61 overrides it fails.

Not monotone:
  float32 for softmax passed, and float32 for softmax, div failed

Notes:
  Held-out batches were drawn with other random numbers.""",
        )

    def test_where_nothing_is_known(self) -> None:
        tuning = small_tuning(
            overrides={},
            found=(),
            met=False,
            trials=[],
            candidates=[],
            errors={},
            certificate=Certificate("passes", "It was interrupted before any overrides were known to pass."),
            predicted_against_measured=[],
            runs=2,
            interrupted=True,
            notes=[],
        )
        self.assertExpectedInline(
            str(tuning),
            """\
tuning: torch 2.13.0, fewest overrides, level op, 0 candidates, 2 of 60 runs
Interrupted: no set of overrides is known to meet the tolerance (2 of 60 runs).

metric  tolerance  error  held out  compiled  noise
loss         1e-3  -      -         -             0

It was interrupted before any overrides were known to pass.""",
        )


PASSES = Certificate("passes", "It passed.")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"certificate": PASSES}, "1 override, softmax, meets the tolerance: loss 2e-5, allowed 1e-3 (9 of 60 runs)."),
        (
            {"certificate": PASSES, "interrupted": True},
            "Interrupted: 1 override, softmax, meets the tolerance: loss 2e-5, allowed 1e-3 (9 of 60 runs).",
        ),
        (
            {"found": ("aten::linear", "aten::softmax"), "certificate": PASSES},
            "2 overrides, softmax and linear, meet the tolerance: loss 2e-5, allowed 1e-3 (9 of 60 runs).",
        ),
        (
            {"direction": "speed", "gain": {"bytes": 2048.0, "seconds": 0.25}},
            "1 override, softmax, meets the tolerance: loss 2e-5, allowed 1e-3, saving 2 KiB and 0.25 s (9 of 60 "
            "runs).",
        ),
        (
            {"met": False, "errors": {"loss": 0.5}, "certificate": PASSES},
            "No set of overrides was found that meets the tolerance; the best one has loss 0.5, allowed 1e-3 (9 of 60 "
            "runs).",
        ),
        (
            {"met": False, "certificate": dataclasses.replace(PASSES, held_out={"loss": math.nan})},
            "1 override, softmax, meets the tolerance in the search and fails on held-out batches: loss nan, allowed "
            "1e-3 (9 of 60 runs).",
        ),
        ({"met": False}, "The overrides found did not pass the check in every run (9 of 60 runs)."),
    ],
)
def test_the_verdict(changes: dict[str, Any], expected: str) -> None:
    assert tuning_verdict(small_tuning(**changes)) == expected


def sites_of(*places: tuple[str, str]) -> list[Candidate]:
    return [Candidate(f"{module or '(model)'}: {op}", op, module, 0.0) for op, module in places]


def test_reprs_count() -> None:
    assert repr(small_tuning()) == "<Tuning: 1 override, met, 9 of 60 runs>"
    assert repr(small_tuning().comparison).endswith(", 1 metric>")


def test_candidates_are_named_by_level() -> None:
    sites = sites_of(("aten::softmax", "blocks.0.attn"), ("aten::mul", ""), ("aten::mul", "head"))
    table = {"blocks.0.attn": {"aten::softmax": "fp32"}, "": {"aten::mul": "fp32"}}
    found = tuple(one.name for one in sites[:2])
    tuning = small_tuning(level="site", candidates=sites, overrides=table, found=found)
    assert chosen_candidates(tuning) == sites[:2]
    assert "2 overrides, softmax in blocks.0.attn and mul in the model itself, meet" in tuning_verdict(tuning)
    assert marked_modules(tuning) == {"blocks.0.attn": "softmax: fp32"}
    places = [(op, module) for op in ("aten::mul", "aten::exp") for module in "abcde"]
    sites = sites_of(*places)
    table = {module: {"aten::mul": "fp32", "aten::exp": "fp32"} for module in "abcde"}
    tuning = small_tuning(level="site", candidates=sites, overrides=table, found=tuple(one.name for one in sites))
    assert "10 overrides, mul, exp in a, mul, exp in b, mul, exp in c and 2 more tables, meet" in tuning_verdict(tuning)
    modules = [Candidate(name, "", name, 0.0) for name in ("blocks.0.attn", "head", "blocks.0.attn.q")]
    table = {"blocks.*.attn*": {"aten::softmax": "fp32"}, "head": {"aten::linear": "fp32"}}
    tuning = small_tuning(level="module", candidates=modules, overrides=table, found=("head", "blocks.0.attn"))
    assert "2 overrides, blocks.0.attn and head, meet" in tuning_verdict(tuning)
    assert marked_modules(tuning) == {"blocks.0.attn": "fp32"}
    assert marked_modules(small_tuning()) == {"blocks.0.attn": "softmax: fp32"}


def test_the_frontier_has_each_number_of_overrides_that_is_better_than_fewer() -> None:
    def trial(number: int, error: float, why: str = "search") -> Trial:
        return Trial(tuple("abcdef"[:number]), {"loss": error}, error <= 1e-3, why)

    trials = [trial(3, 1e-4), trial(1, 0.5), trial(2, 0.9), trial(0, math.inf), trial(4, 5e-4), trial(1, 0.1)]
    trials += [trial(0, 0.0, "held out")]
    found = [(len(one.overrides), one.errors["loss"]) for one in frontier(small_tuning(trials=trials))]
    assert found == [(0, math.inf), (1, 0.1), (3, 1e-4)]
    slower = small_tuning(trials=trials, direction="speed")
    assert [(len(one.overrides), one.errors["loss"]) for one in frontier(slower)] == [(4, 5e-4), (3, 1e-4)]


def test_no_line_is_longer_than_80_columns_whatever_names_there_are() -> None:
    long = "x" * 150
    tuning = small_tuning(
        overrides={f"{long}.{long}": {f"{long}::{long}": "fp32"}},
        tolerance={long: 1.23e-300},
        errors={long: 1.5},
        met=False,
        trials=[Trial((long, f"{long}.{long}"), {long: 1e300}, False, long, error=long)],
        certificate=Certificate("1-minimal", f"{long} is {long}.", violations=(long,)),
        noise_floor={long: 0.0},
        notes=[long],
    )
    assert max(map(len, str(tuning).splitlines())) <= 80
