"""The text of a comparison: the verdict, the metrics, and the ten most important sites, in 80 columns."""

from __future__ import annotations

import math
import re
from typing import Any

import expecttest
import pytest

from helpers.made_up_comparisons import comparison_of, gpt_comparison, made_up_site, small_comparison
from torch_promote.numerics.comparing.comparison import GradientError, Metric
from torch_promote.numerics.comparing.comparison_findings import comparison_verdict
from torch_promote.observe.pages import fitted_table, wrapped
from torch_promote.policy.policy import Policy


class TestText(expecttest.TestCase):
    def test_of_a_step(self) -> None:
        self.assertExpectedInline(
            str(small_comparison()),
            """\
comparison: torch 2.13.0, stock against fp32, 3 runs, 2 backwards
The loss is off by 0.12 % (2.3469, reference 2.3441); softmax.int in
blocks.0.attn has the largest impact, 0.0025.

metric  reference  candidate   error
loss       2.3441     2.3469  0.0012

op           module           calls  dtypes      local  accumulated  impact
softmax.int  blocks.0.attn        2  fp16         0.02        0.021  0.0025
linear       blocks.0.attn.q      1  fp16         3e-4         8e-4    1e-5
mse_loss     -                    1  fp16, fp32      0            -       -

gradient                error  norm
blocks.0.attn.q.weight   0.03   1.5
head.bias                 inf     0

Calls that only one of the runs made:
  aten::copy_ in head: the candidate made 1 call more.

Not compared:
  A compiled graph ran 2 times. The calls in it were not seen.

Notes:
  The step draws random numbers.""",
        )

    def test_of_a_model_of_60_blocks(self) -> None:
        self.assertExpectedInline(
            str(gpt_comparison()),
            """\
comparison: torch 2.13.0, stock against fp32, 3 runs, 2 backwards
The loss is off by 0.12 % (2.3469, reference 2.3441), and softmax in
transformer.h.2.attn makes 3 elements infinite or NaN.

metric  reference  candidate   error
loss       2.3441     2.3469  0.0012

op           module                  calls  dtypes  local  accumulated  impact
layer_norm   transformer.h.0.ln_1        1  fp16      0.1          0.1    0.01
div          transformer.h.1.attn        1  fp16      0.1         0.11    0.01
linear       transformer.h.3.mlp.up      1  fp16      0.1         0.13    0.01
layer_norm   transformer.h.7.ln_2        1  fp16      0.1         0.17    0.01
softmax      transformer.h.8.attn        1  fp16      0.1         0.18    0.01
linear       ...h.11.attn.proj           1  fp16      0.1         0.21    0.01
add          transformer.h.14            1  fp16      0.1         0.24    0.01
matmul       transformer.h.15.attn       1  fp16      0.1         0.25    0.01
masked_fill  transformer.h.17.attn       1  fp16      0.1         0.27    0.01
linear       ...h.18.mlp.down            1  fp16      0.1         0.28    0.01
... and 710 more sites

1 site of those left out makes an inf or NaN of finite inputs.""",
        )

    def test_of_nothing(self) -> None:
        self.assertExpectedInline(
            str(comparison_of(metrics=[], runs=0, backwards=0, torch_version="")),
            """\
comparison: stock against fp32, 0 runs, 0 backwards
No op has an error, and the results are identical: no op runs in lower
precision.""",
        )


LOSS = Metric("loss", 2.0, 2.5, 0.25)
SAME = Metric("loss", 2.0, 2.0, 0.0)


@pytest.mark.parametrize(
    ("sites", "metrics", "expected"),
    [
        ([], [SAME], "No op has an error, and the results are identical: no op runs in lower precision."),
        ([], [LOSS], "The loss is off by 25 % (2.5, reference 2); no single op has a local error."),
        (
            [made_up_site("aten::mm", "head")],
            [SAME],
            "The loss is bit-identical; mm in head has the largest impact, 1e-5.",
        ),
        (
            [made_up_site("lib::op", impact=None)],
            [Metric("top1", None, None, 2e-5)],
            "top1 is off by 2e-5 of the reference; lib::op in the model itself has the largest local error, 3e-4.",
        ),
        (
            [made_up_site("aten::exp", "a", nonfinite=1), made_up_site("aten::mul", "b", nonfinite=8)],
            [LOSS, Metric("output", None, None, math.inf)],
            "The output has non-finite values, the reference's has none. exp in a makes 1 element infinite or "
            "NaN; 1 other site does so, too.",
        ),
        (
            [],
            [Metric("loss", 2.0, math.nan, math.inf)],
            "The loss is nan; the reference's is 2. No single op turns finite inputs into inf or NaN.",
        ),
        (
            [made_up_site("aten::exp", "a", nonfinite=2)],
            [Metric("loss", math.inf, math.inf, 0.0)],
            "The loss is bit-identical, and exp in a makes 2 elements infinite or NaN.",
        ),
    ],
)
def test_the_verdict(sites: list[Any], metrics: list[Metric], expected: str) -> None:
    assert comparison_verdict(comparison_of(*sites, metrics=metrics)) == expected


def test_no_line_is_longer_than_80_columns_whatever_names_there_are() -> None:
    long = "x" * 150
    site = made_up_site(f"{long}::{long}", f"model.{long}.{long}", dtypes="float16, bfloat16, float32", calls=10**9)
    text = str(
        comparison_of(
            site,
            metrics=[Metric(long, 1.23456789e-300, -1.23456789e-300, 2.0)],
            gradients=[GradientError(f"{long}.weight", 1e-300, 1e300)],
            notes=["a sentence " * 30, long, "/".join([long] * 3)],
            candidate=Policy.stock().override({"mm": "fp32"}).override_modules({"head": "fp32"}),
        )
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "1,000,000,000" in text
    assert "-1.234568e-300" in text


def test_a_path_loses_its_first_parts() -> None:
    rows = [["model.decoder.layers.11.self_attn.q_proj", "a" * 60, "12"]]
    table = fitted_table(("module", "op", "calls"), rows, most=10, noun="site")
    path, op, calls = table[1].split()
    assert (path, calls) == ("...layers.11.self_attn.q_proj", "12")
    assert re.fullmatch(r"a{30,}\.\.\.", op)
    assert len(table[1]) <= 80


def test_columns_stay_wide_enough_to_read() -> None:
    _, row = fitted_table("abcdefghij", [["x" * 20] * 9 + ["1" * 20]], most=10, noun="site")
    assert row.split() == ["xxxxxxx..."] * 9 + ["1" * 20]


def test_words_are_not_broken() -> None:
    assert wrapped("one " * 30)[0] == ("one " * 20).strip()
    assert wrapped("float32 for blocks-0-attn " * 6)[1].startswith(("blocks-0-attn", "float32", "for"))


def test_ten_rows_and_how_many_more() -> None:
    text = str(comparison_of(*(made_up_site(f"lib::op{number}") for number in range(12))))
    assert "lib::op9" in text
    assert "lib::op10" not in text
    assert "... and 2 more sites" in text
