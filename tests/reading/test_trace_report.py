"""The report of `trace`: what it says of recorded calls, as text, page and plot."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

import torch_promote as tp
from helpers.made_up_traces import BF16, F32, cast, info, linear, made_up_call, report_of, small_report
from torch_promote.errors import RegionError
from torch_promote.reading.findings import (
    PLUMBING,
    by_weight,
    casts_chart,
    dtypes_chart,
    exponents_chart,
    module_tree,
    savings,
    time_in_casts,
)
from torch_promote.reading.trace import trace
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.values import EMPTY
from torch_promote.report import page


class TestText(expecttest.TestCase):
    def test_of_a_step(self) -> None:
        self.assertExpectedInline(
            str(small_report()),
            """\
trace: torch 2.13.0, optimizer steps: 1
Autocast had a policy for 4 of 5 calls. Casts made: 5 (34 KiB), 1 of them repeated.

calls           5 (4 forward, 1 backward)
results         60 % bfloat16 (40 % float32)
casts           5 (34 KiB; 1 more reused from a cache)
repeated casts  1 (1 KiB)
time in casts   4.2 % (of the calls' time on the host)

Ops
op          calls  dtypes        casts   bytes  policy
linear          2  fp32 -> bf16      3  34 KiB  lower_precision_fp
mse_loss        1  bf16 -> fp32      2    32 B  fp32
layer_norm      1  fp32 -> fp32      -       -  fp32 (region at train.py:3)
mm              1  bf16 -> bf16      -       -  -

Where casts are made
cast          argument      module          at           made  reused   bytes  repeated  bytes again
fp32 -> bf16  input         blocks.0.key    model.py:12     1       -   1 KiB         1        1 KiB
              (activation)
fp32 -> bf16  weight        blocks.0.query  model.py:12     1       -  32 KiB         -            -
              (weight)
fp32 -> bf16  input         blocks.0.query  model.py:12     1       -   1 KiB         -            -
              (activation)
bf16 -> fp32  self          (model)         train.py:7      1       -    16 B         -            -
              (activation)
bf16 -> fp32  target        (model)         train.py:7      1       -    16 B         -            -
              (activation)
... 1 more

Fewer casts
change                         casts  bytes  effect
my_autocast(..., cache="all")      1  1 KiB  These casts of activations would be reused within their
                                             region.

Not in this report
  A compiled graph ran 2 times. The calls in it were not seen.""",
        )


def test_the_verdict_of_a_trace_without_policies() -> None:
    assert report_of().content().verdict == "No call was recorded."
    assert "Calls that raised: 1." in report_of(made_up_call(error=True, outputs=())).content().verdict


def test_savings_of_a_cache_are_the_casts_that_it_avoids() -> None:
    (found,) = savings([linear("", 0, 1), linear("", 0, 1, 1), linear("", 0, 1, 1)])
    assert (found.remedy, found.casts, found.bytes) == ('my_autocast(..., cache="all")', 2, 2048)
    assert savings([linear("", 0, 1)]) == []


def test_a_policy_saves_casts_up_to_float32_and_no_others() -> None:
    up = cast("self", from_dtype=BF16, to_dtype=F32, bytes=16)
    low = made_up_call("aten::prod", "", inputs=(info("self", BF16),), casts=(up,), policy=tp.CastPolicy.fp32)
    mixed = dataclasses.replace(low, op="aten::cdist", inputs=(info("input", BF16), info("weight")))
    (found,) = savings([low, mixed])
    assert (found.remedy, found.casts, found.bytes) == ('overrides={"prod": "keep"}', 1, 16)
    assert savings([low, mixed, linear("", 0, 1)]) == [], "they are few"
    for op in ("mse_loss", "cross_entropy_loss", "softmax", "_log_softmax", "layer_norm", "rms_norm", "nll_loss2d"):
        assert savings([dataclasses.replace(low, op=f"aten::{op}")]) == []


@pytest.mark.parametrize("remedy", ["all", "keep", "persistent"])
def test_what_is_said_to_save_casts_does(remedy: str) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8).requires_grad_(False) for _ in range(3))
    x = torch.ones(4, 8)

    def run(**options: Any) -> TraceReport:
        with tp.trace(model) as report:
            for _ in range(2 if remedy == "persistent" else 1):
                with tp.my_autocast("cpu", **options):
                    y = sum(layer(x) for layer in model)
                    y.prod()
        return report

    options: dict[str, Any] = {"overrides": {"prod": "keep"}} if remedy == "keep" else {"cache": remedy}
    before, after = run(), run(**options)
    found = next(one for one in savings(before.calls) if f'"{remedy}"' in one.remedy)
    if remedy == "persistent":  # which also keeps activations within a region
        assert before.total.casts - after.total.casts >= found.casts > 0
    else:
        assert before.total.casts - after.total.casts == found.casts
        assert before.total.bytes - after.total.bytes == found.bytes


def test_time_in_casts_is_a_share_of_the_outermost_calls() -> None:
    outer = linear("", 0, 1)
    inner = made_up_call(start=outer.start + 10, duration=5_000)
    other_thread = made_up_call(start=outer.start + 20, duration=100_000, thread=12)
    assert time_in_casts(report_of(inner, outer, other_thread)) == pytest.approx(10_000 / 200_000)
    assert time_in_casts(report_of(inner, outer, max_calls=1)) is None


def test_the_order_of_ops() -> None:
    """Inf and NaN first, then casts, then forward; views, fills and optimizers are folded, and calls counted once."""
    x, weight = torch.ones(2, 2), torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
    with tp.trace(values=True) as report:
        for _ in range(9):
            x.view(4).unsqueeze(0).detach().expand(2, 4).t()
        with tp.my_autocast("cpu"):
            loss = ((x @ weight).float().sin() + torch.full((2, 2), 2.0)).sum()
        (loss / 0).add(1).clone()
        loss.backward()
        optimizer.step()
    shown, apart = by_weight(report)
    names = [group.key for group in shown]
    assert names[:3] == ["aten::div.Tensor", "aten::add.Tensor", "aten::matmul"]
    assert names.index("aten::sin") < names.index("aten::cos"), "cos is in the backward alone"
    assert {group.key for group in apart["(optimizer)"]} == {"aten::add_.Tensor"}
    views = {f"aten::{name}" for name in ("t", "view", "unsqueeze", "clone", "expand", "full", "ones_like")}
    assert views <= {group.key for group in apart[PLUMBING]}
    lines = report.text(None).splitlines()
    [folded] = [line for line in lines if line.endswith("--html F.html, or by_op(), lists all.")]
    assert folded.startswith(f"And {len(apart[PLUMBING])} ops {PLUMBING}, ")
    assert "; 1 op (optimizer), 1 calls." in folded
    facts = [line.split() for line in lines if line.startswith("calls  ")]
    total = f"{report.total.calls - 1:,}"
    assert [words[1] for words in facts] == [total]
    assert f" of {total} calls." in lines[1]
    assert lines[3].split() == ["losses", "1", "(all", "finite)"]


def test_gradients_that_are_all_0_and_the_inf_before_them() -> None:
    weight = torch.nn.Parameter(torch.full((2, 2), 300.0, dtype=torch.half))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with tp.trace(values=True) as report:
        (weight / weight.square()).float().sum().backward()
        optimizer.step()
    verdict = report.content().verdict
    assert verdict.startswith("Gradients of 1 of 1 parameters are all 0 in step 0. The first inf or NaN: aten::square")
    assert " The first call of its backward that made only zeros of other values: aten::div.Tensor, backward" in verdict


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_a_gradient_that_is_0_exactly_is_no_alarm(dtype: torch.dtype) -> None:
    """That of the last bias of a critic, whose loss is a difference of two means."""
    critic = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    with tp.trace(critic, values=True) as report:
        with torch.autocast("cpu", dtype):
            loss = critic(torch.ones(8, 4)).mean() - critic(torch.rand(8, 4)).mean()
        loss.backward()
        optimizer.step()
    assert report.ends[0].gradients["bias"].zeros == 1 > report.ends[0].gradients["weight"].zeros
    assert "all 0" not in report.content().verdict


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize(("factor", "said"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_losses_are_read_always(values: bool, factor: float, said: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with tp.trace(values=values) as report:
        for step in range(3):
            (weight.sum() * (factor if step else 1.0)).backward()
            optimizer.zero_grad()
            optimizer.step()
    found = report.nonfinite
    assert (found.losses, found.nans + found.infs, found.first_loss, found.loss_step) == (3, 2, 1, 1)
    title, verdict, *_ = report.text(None).splitlines()
    assert title.endswith(f", 2 of 3 losses are {said}, from step 1")
    assert ("torch-promote find-nan" in verdict) == (not values)


@pytest.mark.parametrize(
    ("dtype", "rates", "factor", "is_said"),
    [
        (BF16, (1e-4, 1e-4), 1.0, True),
        (BF16, (0.0, 1e-4), 1.0, True),  # a warm-up
        (BF16, (1.0, 0.0), 1.0, False),
        (BF16, (1e-4, 1.0), 1.0, False),
        (BF16, (1e-4, 1e-4), 0.0, False),
        (F32, (1e-4, 1e-4), 1.0, False),
    ],
)
def test_updates_that_are_rounded_away(dtype: Any, rates: tuple[float, ...], factor: float, is_said: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.SGD([weight])
    with tp.trace(values=True) as report:
        for optimizer.param_groups[0]["lr"] in rates:
            (weight.sum() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ("1 of 1 parameters in 16 bits have the same bits" in report.content().verdict) == is_said


def _ema(average: torch.Tensor, weight: torch.Tensor) -> None:
    average.mul_(0.999).add_(weight.to(average.dtype), alpha=0.001)


class Decay(torch.optim.Optimizer):
    """An optimizer whose decay is below the distance to the next number."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.param_groups[0]["params"][0].mul_(1 - 1e-5)


UPDATES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], torch.dtype, str]] = {
    "an average": (_ema, torch.bfloat16, "mul_ at "),
    "lerp": (lambda average, weight: average.lerp_(weight.to(average.dtype), 1e-4), torch.bfloat16, "lerp_ at "),
    "of a list": (
        lambda average, weight: torch._foreach_lerp_([average], [weight.to(average.dtype)], 1e-4),
        torch.bfloat16,
        "_foreach_lerp_ at ",
    ),
    "a sum": (lambda total, weight: total.add_(1e-5), torch.float16, "add_ at "),
    "in float32": (_ema, torch.float32, ""),
    "that moves": (lambda average, weight: average.lerp_(weight.to(average.dtype), 0.5), torch.bfloat16, ""),
    "that has arrived": (lambda average, weight: average.lerp_(average.clone(), 1e-4), torch.bfloat16, ""),
    "of a weight": (lambda weight, _: Decay([weight.requires_grad_()]).step(), torch.bfloat16, "mul_ at "),
    "of zeros": (lambda total, weight: total.add_(torch.zeros_like(total)), torch.bfloat16, ""),
    "without a change": (lambda total, weight: total.mul_(1.0), torch.bfloat16, ""),
    "of masked values": (lambda total, weight: total.mul_(torch.ones_like(total)), torch.bfloat16, ""),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_that_leave_a_tensor_as_it_was(name: str) -> None:
    update, dtype, start = UPDATES[name]
    average, weight = torch.full((8,), 1.5, dtype=dtype), torch.full((8,), 2.0)
    with tp.trace(values=True) as report:
        for _ in range(5):
            update(average, weight)
    said = report.content().verdict
    assert said.startswith(start) if start else "as they were" not in said
    assert not start or "left 5 of 5 " in said


def count(values: torch.Tensor, start: float) -> None:
    total = torch.tensor(start, dtype=torch.float16)
    for value in values:
        total = total + value


@pytest.mark.parametrize(
    ("values", "start", "said"),
    [
        (
            torch.ones(9, dtype=torch.float16),
            2043,
            "left 4 of 8 float16 tensors as they were, bit for bit, up to 2,048",
        ),
        (torch.ones(9) > 0, 2043, "left 4 of 8 float16 tensors"),
        (torch.ones(9, dtype=torch.float16), 0, ""),
        (torch.tensor([0.0, -0.0] * 9).half(), 2048, ""),
        (torch.tensor([[0.0, -0.0]] * 9).half(), 2048, ""),
    ],
)
def test_a_sum_that_stops(values: torch.Tensor, start: float, said: str) -> None:
    with tp.trace(values=True) as report:
        count(values, start)
    verdict = report.content().verdict
    assert said in verdict if said else "as they were" not in verdict


SUMS: dict[str, tuple[Callable[[int], Any], torch.dtype, str]] = {
    "of integers": (lambda _: torch.tensor(3), torch.float16, "is 2,516 in float16, and 2,400 without rounding."),
    "of bools": (lambda _: torch.tensor(True), BF16, "is 256 in bfloat16, and 800 without rounding."),
    "of Python's numbers": (lambda _: 3, torch.float16, "is 2,516 in float16, and 2,400 without rounding."),
    "of negative ones": (
        lambda _: torch.tensor(-3.0, dtype=torch.float16),
        torch.float16,
        "is -2,516 in float16, and -2,400 without rounding.",
    ),
    "that is exact": (lambda _: torch.tensor(2), torch.float16, ""),
    "whose roundings cancel": (lambda number: torch.tensor(3 - number % 2 * 2), torch.float16, ""),
    "in float32": (lambda _: torch.tensor(0.1), torch.float32, ""),
}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", SUMS)
def test_running_sums_that_roundings_change(name: str, in_place: bool) -> None:
    term, dtype, said = SUMS[name]
    total = torch.full((), 1600.0 if "cancel" in name else 0.0, dtype=dtype)
    with tp.trace(values=True) as report:
        for number in range(800):
            if in_place:
                total += term(number)
            else:
                total = total + term(number)
    verdict = report.content().verdict
    if said:
        assert verdict.startswith(f"add{'_' * in_place} at test_trace_report.py:")
        assert f": this sum of 800 terms {said} Sum up in float32." in verdict
    else:
        assert not re.search("this sum|changes the sum|as they were", verdict)


def test_the_sum_that_has_lost_most_comes_first_and_unknown_terms_say_nothing() -> None:
    counts = [torch.zeros((), dtype=torch.float16) for _ in range(3)]
    with tp.trace(values=True) as report:
        for number in range(900):
            counts[0].add_(3)
            counts[1].sub_(1, alpha=5)
            counts[2].add_(torch.tensor(100_000 * (number % 2)), alpha=1e-5)
    found = re.findall(r"of 900 terms is (\S+) in", report.content().verdict)
    assert found == ["-4,012", "2,916"]


def test_running_sums_that_are_elements_of_one_tensor() -> None:
    counts = torch.zeros(2, dtype=torch.float16)
    with tp.trace(values=True) as report:
        for _ in range(900):
            counts[0] += 3
            counts[1] += torch.tensor(True)
    assert re.findall(r"of 900 terms is (\S+) in float16, and (\S+) w", report.content().verdict) == [
        ("2,916", "2,700")
    ]


def test_a_third_of_an_adapter_that_is_lost_in_the_weight() -> None:
    """Of a weight; not of what a residual branch adds."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False).bfloat16()
    x, delta = 1 + torch.rand(64, 64, generator=generator), torch.rand(64, 64, generator=generator) * 0.0125
    torch.nn.init.constant_(model.weight, 1.0)
    model.weight.data.add_(x - 1)
    for total, is_said in ((model.weight.data, True), (x.bfloat16(), False)):
        with tp.trace(model, values=True) as report:
            model(x.bfloat16())
            total += delta.bfloat16()
        assert ("changes the sum" in report.content().verdict) == is_said, report.content().verdict


@pytest.mark.parametrize(
    ("compute", "dtype", "start"),
    [
        (lambda x: torch.arange(999).to(x.dtype), BF16, "to at "),
        (lambda x: torch.arange(999).type_as(x), BF16, "type_as at "),
        (lambda x: torch.arange(999, dtype=x.dtype), BF16, "arange at "),
        (lambda x: torch.arange(5000).to(x.dtype), torch.float16, "to at "),
        (lambda x: torch.arange(999).to(x.dtype), torch.float16, ""),
        (lambda x: torch.arange(200).to(x.dtype), BF16, ""),
        (lambda x: torch.arange(999).to(x.dtype), F32, ""),
        (lambda x: torch.arange(999).sum().to(x.dtype), BF16, ""),  # one number is no table of positions
        (lambda x: (x + 500).cos(), BF16, "cos at "),
        (lambda x: (x + 5).cos(), BF16, ""),
        (lambda x: (x.float() + 500).cos().to(x.dtype), BF16, ""),
    ],
)
def test_positions_and_angles_that_a_dtype_does_not_tell_apart(compute: Any, dtype: torch.dtype, start: str) -> None:
    with tp.trace(values=True) as report:
        compute(torch.ones(8, dtype=dtype))
    said = report.content().verdict
    assert said.startswith(start) if start else " apart" not in said


@pytest.mark.parametrize(
    ("dtype", "size", "alpha", "is_lost"),
    [
        (BF16, 1e-3, 1, True),
        (BF16, 1e-1, 1e-2, True),
        (BF16, 1e-1, 1, False),
        (torch.float16, 1e-4, -1, True),
        (torch.float16, 1e-2, 1, False),
        (F32, 1e-3, 1, False),
        (BF16, 0.0, 1, False),
        (BF16, 2**-7, 1, False),  # the sum is exact
        (BF16, 1e-10, 1, False),  # float32 loses it, too
    ],
)
def test_a_term_that_a_sum_loses(dtype: torch.dtype, size: float, alpha: float, is_lost: bool) -> None:
    """The change is estimated from the recording, and known from the same sum in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = (1 + torch.rand(256, generator=generator)).to(dtype) if size != 2**-7 else torch.ones(256, dtype=dtype)
    delta = torch.full((256,), size, dtype=dtype)
    with tp.trace(values=True) as report:
        for _ in range(2):
            total = weight.add(delta, alpha=alpha)
    change = (total.double() - weight.double() - alpha * delta.double()).norm() / (abs(alpha) * delta.double().norm())
    assert size == 1e-10 or bool(change > 0.5) == is_lost
    said = report.content().verdict
    assert said.startswith("add at ") == is_lost
    if is_lost:
        estimate = float(re.findall(r"by about (\S+) times the norm of its smaller term, in 2 calls", said)[0])
        assert change / 1.6 < estimate < change * 1.6


def test_losses_of_other_devices_are_read_together() -> None:
    """And what has no data is no loss that was read."""
    with FakeTensorMode(), tp.trace() as report:
        torch.nn.Parameter(torch.ones(2)).sum().backward()
    assert report.nonfinite.losses == 0


def test_the_tree_has_the_modules_between_and_marks_the_outermost_islands() -> None:
    norm = made_up_call("aten::native_layer_norm", "", module="a.norms.10")
    other = dataclasses.replace(norm, module="a.norms.2")
    tree = module_tree(report_of(norm, other, linear("a.b", 0, 1), made_up_call()).by_module())
    found = {branch.path: (branch.cells[0], branch.tag, branch.note) for branch in tree.branches}
    assert list(found) == ["a", "a.b", "a.norms", "a.norms.2", "a.norms.10", ""]
    assert found["a"] == (3, "", "")
    assert found["a.norms"] == (2, "float32 island", "no policy")
    assert found["a.norms.2"] == (1, "", "")
    fp32 = small_report().calls[0]
    assert "fp32: region at /code/train.py:3" in [
        one.note for one in module_tree(report_of(fp32, linear("a", 0, 1)).by_module()).branches
    ]
    assert not any(branch.tag for branch in module_tree(report_of(fp32).by_module()).branches)


def test_histograms_leave_out_views_composite_ops_and_results_without_values() -> None:
    values = small_report(values=True).values[4]
    calls = [
        made_up_call("aten::mm", ""),
        made_up_call("aten::view", ""),
        made_up_call("aten::add_", "Tensor"),
        made_up_call("aten::linear", "", composite=True),
        made_up_call("aten::empty", "memory_format"),
        made_up_call("nobody::knows", ""),
    ]
    found = exponents_chart([*((call, values) for call in calls), (made_up_call("aten::arange", ""), (EMPTY,))])
    assert found is not None
    assert [series.name for series in found.series] == ["aten::add_.Tensor", "aten::mm", "nobody::knows"]
    assert found.series[0].note == "5 % overflow, 25 % become 0, 20 % subnormal"
    assert exponents_chart([(made_up_call(), ())]) is None


def test_charts_have_the_calls_and_the_bytes() -> None:
    report = small_report()
    dtypes = dtypes_chart(report)
    assert {series.name: sum(series.y) for series in dtypes.series} == {"float32": 2, "bfloat16": 3}
    assert [name for name, _, _ in dtypes.spans] == ["forward", "backward"]
    bytes_of = casts_chart(report.by_module())
    made = [sum(parts) for parts in zip(*(series.y for series in bytes_of.series), strict=True)]
    assert dict(zip(bytes_of.labels, made, strict=True)) == {
        "blocks.0.query": 33_792,
        "blocks.0.key": 1024,
        "(model)": 32,
    }
    assert len(report.plot().axes) == 2


def test_the_page_of_a_traced_step_is_small_and_survives_a_file(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with tp.trace(model, values=True) as report:
        with tp.my_autocast("cpu", overrides={"gelu": "fp32"}):
            loss = torch.nn.functional.mse_loss(model(torch.ones(2, 4, 16)), torch.ones(2, 4, 16))
        loss.backward()
    report.save(tmp_path / "run.jsonl.gz")
    first = tp.load(tmp_path / "run.jsonl.gz")
    source = page.render(first.content())
    assert len(source) < 600_000
    for part in ("self_attn", "aten::linear", "No call used these overrides", "Ranges of results", "casts are made"):
        assert part in source
    first.save(tmp_path / "run.jsonl.gz")
    assert page.render(tp.load(tmp_path / "run.jsonl.gz").content()) == source


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (tp.trace, "calls"),
        (tp.trace, "save"),
        (tp.trace, "explain"),
        (tp.trace, "total"),
        (tp.find_nonfinite, "origin"),
        (tp.find_nonfinite, "attempts"),
    ],
)
def test_a_block_without_with_says_how_to_get_the_report(function: Any, name: str) -> None:
    block = function(torch.nn.Linear(2, 2))
    usage = f"`with {function.__name__}(...) as report:`"
    assert repr(block) == f"<a {function.__name__}, which {usage} starts>"
    for one in (block, copy.copy(block)):
        with pytest.raises(AttributeError, match=re.escape(f"has no {name!r}. Write {usage}")):
            getattr(one, name)
    with block as report:
        torch.ones(2)
    assert "1" in str(report)
    with pytest.raises(RegionError, match=re.escape(f"this block was opened before. Write {usage} for each block.")):
        block.__enter__()


@pytest.mark.usefixtures("without_onednn")  # of which torchao's product has no kernel for some instruction sets
@pytest.mark.parametrize("by_torchao", [False, True])
def test_the_operands_in_float8(by_torchao: bool) -> None:
    linear, x = torch.nn.Linear(16, 32, bias=False).to(torch.bfloat16), torch.zeros(4, 16, dtype=torch.bfloat16)
    torch.nn.init.constant_(linear.weight, 0.5)
    x[0] = torch.tensor([448.0, 2.0**-12] * 8)
    if by_torchao:
        linear = Float8Linear.from_float(linear, config=Float8LinearConfig())
    region = tp.my_autocast("cpu", overrides={"linear": "float8:tensorwise"}, enabled=not by_torchao)
    with trace(linear, values=True) as report, torch.no_grad(), region:
        linear(x)
    (table,) = (part for part in report.content().parts if part.title == "Operands in float8")
    weight_shape = "[16, 32]" if by_torchao else "[32, 16]"
    assert set(table.rows) == {
        ("(model)", "forward", "float8_e4m3fn[4, 16]", 1, "1 to 1", "12 %", "12 %"),  # 8 of 64 values
        ("(model)", "forward", f"float8_e4m3fn{weight_shape}", 1, "896 to 896", "100 %", "0 %"),
    }


def test_the_title_names_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"a GPU at {device}")
    with FakeTensorMode(), tp.trace() as report:
        torch.ones(2, device="xpu") + torch.ones(2, device="xpu")
        torch.ones(2) + 1
    assert report.device_names == ["a GPU at xpu:0"]
    assert "a GPU at xpu:0" in str(report)
