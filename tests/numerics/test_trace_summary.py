"""The text of a trace: the verdict, the numbers, ten rows, repeated casts, and suggestions for fewer casts."""

from __future__ import annotations

import builtins
import dataclasses
import io
import re
from typing import Any

import expecttest
import pytest
import torch

import torch_promote as tp
from helpers.made_up_traces import BF16, F32, cast, info, linear, made_up_call, report_of, small_report
from helpers.parsed_pages import Page, words
from torch_promote.errors import MissingPackageError
from torch_promote.observe.findings import by_weight, repeated_casts, savings, time_in_casts, verdict
from torch_promote.observe.trace import trace
from torch_promote.observe.trace_report import drawings, make_page


class TestText(expecttest.TestCase):
    def test_of_a_step(self) -> None:
        self.assertExpectedInline(
            str(small_report()),
            """\
trace: torch 2.13.0, 1 optimizer step
Autocast had a policy for 4 of 5 calls and made 5 casts (34 KiB); 1 of them (1 KiB) repeated a cast
made before.

calls    5 (4 forward, 1 backward)
results  40 % float32, 60 % bfloat16
casts    5 (34 KiB), 1 repeated (1 KiB), 1 reused from a cache
time     4.2 % of the calls' time on the host, for casts

op          calls  dtypes        casts   bytes  policy
linear          2  fp32 -> bf16      3  34 KiB  lower_precision_fp
mse_loss        1  bf16 -> fp32      2    32 B  fp32
layer_norm      1  fp32 -> fp32      0          fp32 (region at train.py:3)
mm              1  bf16 -> bf16      0

Casts of the same tensor:
  float32[4, 128] -> bfloat16 (activation): 2 casts, 1 KiB again, at model.py:12

Fewer casts:
  my_autocast(..., cache="all"): 1 cast, 1 KiB. These casts of activations would be reused, if the
    earlier cast is in the same region.
  overrides={"mse_loss": "keep"}: 2 casts, 32 B. The op would run on its uncast arguments, in lower
    precision. Its results would differ.

Not in this report:
  A compiled graph ran 2 times. The calls in it were not seen.""",
        )

    def test_of_nothing(self) -> None:
        self.assertExpectedInline(
            str(report_of()),
            """\
trace: torch 2.13.0
No call was recorded.

calls  0
casts  0 (0 B), 0 reused from a cache""",
        )

    def test_where_lists_are_cut(self) -> None:
        calls = [made_up_call(f"lib::op{number}", "") for number in range(12)]
        self.assertExpectedInline(
            str(report_of(*calls, max_calls=5)),
            """\
trace: torch 2.13.0
Autocast was off or had no policy for all 12 calls: arguments kept their dtypes.

calls    12 (12 forward)
results  100 % float32
casts    0 (0 B), 0 reused from a cache

op        calls  dtypes        casts  bytes  policy
lib::op0      1  fp32 -> fp32      0
lib::op1      1  fp32 -> fp32      0
lib::op2      1  fp32 -> fp32      0
lib::op3      1  fp32 -> fp32      0
lib::op4      1  fp32 -> fp32      0
lib::op5      1  fp32 -> fp32      0
lib::op6      1  fp32 -> fp32      0
lib::op7      1  fp32 -> fp32      0
lib::op8      1  fp32 -> fp32      0
lib::op9      1  fp32 -> fp32      0
... and 2 more ops: see report.by_op(), or the JSON of the trace

Not in this report:
  7 calls after the first 5: only sums and tables include them.""",
        )


def test_only_a_name_that_is_longer_makes_a_line_longer_than_100_columns() -> None:
    long = "x" * 150
    call = linear(long, 0, 1)
    calls = [
        dataclasses.replace(call, op=f"{long}::{long}", line=f"/{long}/{long}.py:1", said_by=f"region at {long}.py:3"),
        dataclasses.replace(call, op=f"{long}::{long}", casts=(cast("input", 1, 1),), line=f"/{long}/{long}.py:1"),
    ]
    report = report_of(*calls)
    report.not_seen.append("a sentence " * 30)
    text = str(report)
    assert all(len(line) <= 100 or long in line for line in text.splitlines())
    assert f"{long}::{long}" in text  # not cut
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], "No call was recorded."),
        ([made_up_call()], "Autocast was off or had no policy for the only call: arguments kept their dtypes."),
        (
            [linear("", 0, 1)],
            "Autocast had a policy for 1 of 1 call and made 2 casts (33 KiB), none of them twice.",
        ),
        (
            [made_up_call(policy=BF16, said_by="me", casts=(cast("self", reused=True),)), made_up_call(error=True)],
            "Autocast had a policy for 1 of 2 calls and made no casts (it reused 1 earlier cast); 1 call raised an "
            "error.",
        ),
        (
            [linear("", 0, 1), linear("", 1, 1, 1)],
            "Autocast had a policy for 2 of 2 calls and made 4 casts (66 KiB); 1 of them (1 KiB) repeated a cast made "
            "before.",
        ),
    ],
)
def test_the_verdict(calls: list[Any], expected: str) -> None:
    assert verdict(report_of(*calls)) == expected


def test_threads_and_errors_are_counted() -> None:
    report = report_of(made_up_call(), made_up_call(thread=12, error=True))
    assert re.search(r"^ *errors +1 call raised$", str(report), re.MULTILINE)
    numbers = words(Page(make_page(report)).sections["numbers"])
    assert "Threads 2 Errors 1 calls that raised" in numbers


def test_8_bit_floating_dtypes_count_as_one() -> None:
    report = report_of(
        *(made_up_call(outputs=(info("0", dtype),)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, F32))
    )
    assert re.search(r"results +33 % float32, 67 % float8", str(report))


def test_repeated_casts_are_listed_once_for_tensors_that_are_cast_at_the_same_places() -> None:
    (found,) = repeated_casts(
        report_of(
            *(linear(f"{block}.{name}", 0, block, place) for block in (1, 2) for place, name in enumerate("qkv")),
            linear("other", 0, 3),
        )
    )
    assert (found.from_dtype, found.to_dtype, found.shape, found.kind) == (
        "float32",
        "bfloat16",
        (4, 128),
        "activation",
    )
    assert (found.tensors, found.made, found.repeated, found.repeated_bytes) == (2, 6, 4, 4096)
    assert found.places == (("aten::linear", "input", "/code/model.py:12"),)
    assert found.modules == ("1.q", "1.k", "1.v", "2.q", "2.k", "2.v")


def test_a_cache_saves_the_casts_of_its_last_four_activations() -> None:
    kept = [linear("", 0, tensor) for tensor in (1, 2, 3, 4)]
    (found,) = savings(report_of(*kept, linear("", 0, 1, 1)))
    assert (found.remedy, found.casts, found.bytes) == ('my_autocast(..., cache="all")', 1, 1024)
    assert savings(report_of(*kept, linear("", 0, 5), linear("", 0, 1, 1))) == []


def test_a_persistent_cache_saves_repeated_casts_of_weights() -> None:
    again = made_up_call(casts=(cast("weight", 5, 2, kind="weight", bytes=64),), policy=BF16, said_by="me")
    (found,) = savings(report_of(again))
    assert (found.remedy, found.casts, found.bytes) == ('my_autocast(..., cache="persistent")', 1, 64)


def test_a_policy_saves_casts_up_to_float32_and_no_others() -> None:
    up = cast("self", from_dtype=BF16, to_dtype=F32, bytes=16)
    low = made_up_call("aten::mse_loss", "", inputs=(info("self", BF16),), casts=(up,), policy=tp.CastPolicy.fp32)
    mixed = dataclasses.replace(low, op="aten::layer_norm", inputs=(info("input", BF16), info("weight")))
    calls = [low, mixed, linear("", 0, 1)]
    (found,) = savings(report_of(*calls))
    assert (found.remedy, found.casts, found.bytes) == ('overrides={"mse_loss": "keep"}', 1, 16)


def test_what_is_said_to_save_casts_does() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    x, target = torch.ones(4, 8), torch.ones(4, 8)

    def traced(**options: Any) -> Any:
        with tp.trace(model) as report, tp.my_autocast("cpu", **options):
            y = sum(layer(x) for layer in model)
            torch.nn.functional.mse_loss(y, target.to(BF16))
        return report

    plain = traced()
    by_remedy = {one.remedy: one for one in savings(plain)}
    cached, kept = by_remedy['my_autocast(..., cache="all")'], by_remedy['overrides={"mse_loss": "keep"}']
    assert (cached.casts, kept.casts) == (2, 2)
    for saving, options in ((cached, {"cache": "all"}), (kept, {"overrides": {"mse_loss": "keep"}})):
        after = traced(**options)
        assert plain.total.casts - after.total.casts == saving.casts
        assert plain.total.bytes - after.total.bytes == saving.bytes


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_what_is_said_to_save_casts_of_weights_does(frozen: bool) -> None:
    model = torch.nn.Linear(8, 8).requires_grad_(not frozen)

    def traced(**options: Any) -> Any:
        with tp.trace(model) as report:
            for _ in range(2):
                with tp.my_autocast("cpu", **options):
                    model(torch.ones(2, 8))
                    model(torch.ones(2, 8))
        return report

    plain, kept = traced(), traced(cache="persistent")
    (found,) = savings(plain)
    assert found.remedy == 'my_autocast(..., cache="persistent")'
    assert plain.total.casts - kept.total.casts == found.casts == (6 if frozen else 2)
    assert plain.total.bytes - kept.total.bytes == found.bytes


def test_time_in_casts_is_a_share_of_the_outermost_calls() -> None:
    outer = linear("", 0, 1)
    inner = made_up_call(start=outer.start + 10, duration=5_000)
    other_thread = made_up_call(start=outer.start + 20, duration=100_000, thread=12)
    assert time_in_casts(report_of(inner, outer, other_thread)) == pytest.approx(10_000 / 200_000)
    assert time_in_casts(report_of(inner, outer, max_calls=1)) is None


def test_drawings_say_the_same_in_colours() -> None:
    from rich.console import Console

    report = small_report()
    for number in range(9):
        report.add(made_up_call(f"lib::op{number}", ""))

    def drawn(**options: Any) -> str:
        file = io.StringIO()
        console = Console(file=file, width=160, **options)
        for drawing in drawings(report, 160):
            console.print(drawing)
        return file.getvalue()

    plain = drawn()
    assert "\x1b[" in drawn(force_terminal=True, color_system="standard")
    for line in str(report).splitlines():
        assert set(line.split()) <= set(plain.split()), line


def test_markup_in_names_is_text() -> None:
    from rich.console import Console

    file = io.StringIO()
    call = dataclasses.replace(linear("[red]", 0, 1), op="lib::[bold]op[/bold]", said_by="[/]")
    for drawing in drawings(report_of(call), 200):
        Console(file=file, width=200).print(drawing)
    assert "[bold]op[/bold]" in file.getvalue()
    assert "[/]" in file.getvalue()


def test_without_rich_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_rich(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(MissingPackageError, match=r"needs rich: pip install rich"):
        drawings(small_report(), 80)


def test_a_call_with_two_dtypes_has_its_floating_ones_in_the_row() -> None:
    call = made_up_call("aten::embedding", "", inputs=(info("weight"), info("indices", torch.int64)))
    assert "fp32 -> fp32" in str(report_of(call))


def test_the_summary_names_overrides_that_no_call_used() -> None:
    with tp.trace() as report, tp.my_autocast("cpu", overrides={"gelu": "fp32"}):
        torch.ones(2).exp()
    assert "No call used these overrides: gelu: fp32, asked for by region at " in " ".join(str(report).split())


def test_ops_that_return_views_come_last() -> None:
    x = torch.ones(2, 2)
    with trace() as report:
        for _ in range(3):
            x.view(4).unsqueeze(0).detach().expand(2, 4).t()
        for op in (torch.sin, torch.cos, torch.exp, torch.abs, torch.neg, torch.tan, torch.erf, torch.sqrt, torch.sinh):
            op(x)
        x.to(torch.float64)
    shown = [group.key for group in by_weight(report.by_op())]
    assert set(shown[-5:]) == {f"aten::{name}" for name in ("t", "view", "unsqueeze", "detach", "expand")}


def test_tables_print_as_tables() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with trace(model) as report, tp.my_autocast("cpu"):
        model(torch.ones(1, 2))
    for table in (report.by_op(), report.by_module(), report.by_line()):
        assert isinstance(table, list)
        assert table == list(table)
        lines = str(table).splitlines()
        assert lines[0].split() == ["calls", "casts", "reused", "bytes", "dtypes", "ms"]
        assert len(lines) == len(table) + 1
        assert table._repr_html_().count("<tr>") == len(table) + 1
    assert "aten::linear" in str(report.by_op())
    assert "float32 -&gt; bfloat16" in report.by_op()._repr_html_()
    with trace() as empty:
        pass
    assert str(empty.by_op()) == "no calls"
