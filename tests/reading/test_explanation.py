"""`TraceReport.explain`: explanations of modules, ops and lines are correct, and its advice works."""

from __future__ import annotations

import dataclasses
import linecache
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.made_up_traces import made_up_call, report_of
from torch_promote.errors import OptionError
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reading.findings import promotions
from torch_promote.reading.trace_report import TraceReport

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.q(x)).softmax(-1) + x


def model() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Sequential(Block(), Block())})


def trace_step(net: nn.Module, most: int = 1000, **options: Any) -> TraceReport:
    with tp.trace(net, max_calls=most) as report:
        with tp.my_autocast("cpu", **options):
            loss = net["blocks"](X).sum()  # type: ignore[index]
        loss.backward()
    return report


@pytest.fixture(scope="module")
def report() -> TraceReport:
    """A step with two blocks, in which PyTorch's table, a region, a module or no policy decides."""
    net = model()
    tp.set_module_policy(net, {"blocks.1.q": {"linear": "fp32"}})
    return trace_step(net, overrides={"layer_norm": "fp16"})


# --- what it says


def test_an_op(report: TraceReport) -> None:
    found = report.explain("linear")
    assert (found.pattern, found.kind) == ("linear", "op")
    assert dict(found.facts) == {
        "calls": "2 forward",
        "modules": "blocks.0.q, blocks.1.q",
        "dtypes": "float32 -> bfloat16 -> bfloat16 (1), float32 -> float32 (1)",
        "policies": 'lower_precision_fp: PyTorch\'s table (1), fp32: module policy "blocks.1.q" (1)',
        "meaning": "lower_precision_fp: Cast every eligible argument to the region's autocast dtype; "
        "fp32: Cast every eligible argument to float32",
        "casts": "3 (56 B): weight (weight) float32 -> bfloat16 (1), input (activation) float32 -> bfloat16 (1), "
        "bias (weight) float32 -> bfloat16 (1)",
    }
    assert [(row.op, row.module, row.calls, row.casts) for row in found.rows] == [
        ("aten::linear", "blocks.0.q", 1, 3),
        ("aten::linear", "blocks.1.q", 1, 0),
    ]


def test_a_module_with_those_inside(report: TraceReport) -> None:
    found = report.explain("blocks.0")
    calls = report.calls.where(module="blocks.0")
    assert found.kind == "module"
    assert sum(row.calls for row in found.rows) == len(calls)
    assert {row.module for row in found.rows} == {"blocks.0", "blocks.0.q", "blocks.0.norm"}
    assert f"{sum(call.phase == 'backward' for call in calls)} backward" in dict(found.facts)["calls"]
    assert "lower_precision_fp: region at test_explanation.py:" in found.paragraph


def test_a_line(report: TraceReport) -> None:
    number = next(call.line for call in report.calls if call.op == "aten::softmax").rpartition(":")[2]
    found = report.explain(f"reading/test_explanation.py:{number}")
    assert found.kind == "line"
    assert {row.op for row in found.rows} >= {"aten::softmax.int", "aten::linear", "aten::layer_norm"}
    whole = report.explain("test_explanation.py")
    assert sum(row.calls for row in whole.rows) == sum(call.line.startswith(__file__) for call in report.calls)


def test_why_there_was_no_policy() -> None:
    def run(most: int) -> TraceReport:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tp.set_module_policy(net, {"1": "fp32"})
        with tp.trace(net, max_calls=most) as report:
            X.exp()
            X + X.half()
            with tp.promotion("jax"):
                X * X.half()
            with tp.my_autocast("cpu"):
                X.cos(), net(X)
            X.cos()
        return report

    report, few = run(1000), run(1)
    for pattern, reasons in {
        "exp": "autocast was off (1)",
        "cos": "autocast was off (1), autocast has none for the op (1)",
        "add": "promotion rule torch (1)",
        "mul": "promotion rule jax (1)",
    }.items():
        assert dict(report.explain(pattern).facts)["without a policy"] == reasons
    assert 'autocast off by module policy "1" (1)' in report.explain("1").paragraph
    assert dict(few.explain("cos").facts)["without a policy"] == "not known, beyond max_calls (2)"


def test_reused_and_repeated_casts() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with tp.trace() as report:
        for _ in range(2):
            with tp.my_autocast("cpu"):
                X.mm(weight), X.mm(weight)
    found = report.explain("mm")
    assert dict(found.facts)["casts reused"] == "2"
    assert dict(found.facts)["casts repeated"].startswith("4 (")
    assert any(one.startswith('my_autocast(..., cache="persistent"): ') for one in found.advice)


def test_an_error_and_a_recomputation() -> None:
    net = Block()
    with tp.trace(net) as report, tp.my_autocast("cpu"):
        checkpoint(net, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
        with pytest.raises(RuntimeError):
            X.mm(X)
    assert "1 forward, 1 recompute" in report.explain("linear").paragraph
    mm = dict(report.explain("mm").facts)
    assert mm["raised"] == "1"
    assert "-> none (1)" in mm["dtypes"]


@pytest.mark.parametrize("pattern", ["softmax", "aten::softmax", "softmax.int", "aten::softmax.int", "op=softmax"])
def test_spellings_of_an_op(report: TraceReport, pattern: str) -> None:
    assert [row.op for row in report.explain(pattern).rows] == ["aten::softmax.int"] * 2


# --- what it advises


def advised(text: str) -> str:
    return re.search(r"(set_module_policy\(.*\)|my_autocast\(.*\))\.?", text)[1]  # type: ignore[index]


def test_lower_precision_can_run_in_float32() -> None:
    net = model()
    report = trace_step(net)
    [of_module] = [one for one in report.explain("blocks.0.q").advice if "linear" in one]
    [of_op] = [one for one in report.explain("linear").advice if "aten::linear" in one]
    assert advised(of_module) == 'set_module_policy(model, {"blocks.0.q": {"linear": "fp32"}})'
    assert advised(of_op) == 'my_autocast(overrides={"linear": "fp32"})'
    eval(f"tp.{advised(of_module)}", {"tp": tp, "model": net})
    again = trace_step(net)
    assert [row.dtypes for row in again.explain("blocks.0.q").rows if row.op == "aten::linear"] == [
        "float32 -> float32"
    ]


def test_float32_can_run_in_lower_precision() -> None:
    def run(**options: Any) -> TraceReport:
        with tp.trace() as report, tp.my_autocast("cpu", **options):
            torch.nn.functional.mse_loss(X.bfloat16(), X.bfloat16())
        return report

    [advice] = run().explain("mse_loss").advice
    assert advice.startswith("To run aten::mse_loss in the autocast dtype instead of float32: ")
    options = eval(advised(advice).removeprefix("my_autocast").replace("(", "dict(", 1))
    assert run(**options).explain("mse_loss").rows[0].dtypes == "bfloat16 -> bfloat16"


def test_a_users_own_policy_is_changed_where_it_stands(report: TraceReport) -> None:
    [advice] = report.explain("blocks.1.q").advice
    assert advice == 'The policy of aten::linear was set by: module policy "blocks.1.q". Change it there.'
    assert "was set by: region at " in report.explain("layer_norm").advice[0]


def test_a_backward_in_a_region() -> None:
    """Autocast casts there as well; a module policy would not apply."""
    net = model()
    with tp.trace(net) as report, tp.my_autocast("cpu"):
        (net["blocks"](X) * 2).sum().backward()
    [advice] = [one for one in report.explain("blocks.0.q").advice if "backward" in one]
    assert advice.startswith("aten::mm: autocast was on in the backward, and casts there as well. If a region is open ")
    assert {call.phase for call in report.calls.where(op="mm", policy="lower_precision_fp")} == {"backward"}
    assert not any(call.policy for call in trace_step(net).calls.where(phase="backward"))


# --- as text, in files, beyond max_calls


def test_text_page_and_dict(report: TraceReport) -> None:
    found = report.explain("linear")
    lines = str(found).splitlines()
    assert lines[1] == "Autocast had a policy for 2 of 2 calls of the op linear."
    assert max(map(len, lines)) <= 100
    assert lines[-1].split()[:3] == ["linear", "blocks.1.q", "1"]
    assert "module policy" in found._repr_html_()
    data = found.to_dict()
    assert list(data) == ["pattern", "kind", "verdict", "paragraph", "facts", "advice", "rows"]
    assert (data["facts"]["calls"], data["rows"][0]["op"]) == ("2 forward", "aten::linear")


@pytest.mark.parametrize("policy", [CastPolicy.promote, CastPolicy.lower_precision_fp])
def test_no_advice_for_promote_and_ops_of_a_library_that_is_not_imported(policy: CastPolicy) -> None:
    call = made_up_call("not_imported::op", "", policy=policy, policy_source="register_policy")
    assert report_of(call).explain("not_imported::op").advice == ()


def test_max_calls_changes_nothing() -> None:
    whole, few = trace_step(model()), trace_step(model(), most=3)
    assert few.dropped > 10
    for pattern in ("blocks.0", "linear", "test_explanation.py", "op=softmax"):
        assert few.explain(pattern).rows == whole.explain(pattern).rows


# --- what is wrong


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "explain what? Got ''. Legal: a module's path"),
        ("sofmax", "no module, op or line of this trace is 'sofmax'. Closest: softmax"),
        ("blocks.2", "Closest: blocks.1, blocks.0"),
        ("q", "no module has the path 'q'. Write the whole path: blocks.0.q, blocks.1.q."),
        ("op=blocks.0", "no module, op or line of this trace is 'blocks.0'."),
    ],
)
def test_no_match(report: TraceReport, pattern: str, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        report.explain(pattern)


def test_a_module_named_as_an_op() -> None:
    net = nn.ModuleDict({"softmax": nn.Softmax(-1), "other": nn.Softmax(-1)})
    with tp.trace(net) as ambiguous:
        net["softmax"](X), net["other"](X)
    text = "'softmax' is ambiguous in this trace: module, op. Write 'module=softmax' or 'op=softmax'."
    with pytest.raises(OptionError, match=re.escape(text)):
        ambiguous.explain("softmax")
    assert {row.module for row in ambiguous.explain("module=softmax").rows} == {"softmax"}
    assert {row.module for row in ambiguous.explain("op=softmax").rows} == {"softmax", "other"}


#: What is said of a region for cuda without a GPU.
UNAVAILABLE = "" if torch.cuda.is_available() else ", which is not available here"


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.bias


def test_a_float32_bias_that_promotes_activations() -> None:
    """The activations would stay in low precision. The sum of two activations is not advised about."""
    model = nn.Sequential(Biased())
    with tp.trace(model) as report, tp.my_autocast("cpu"):
        model(X) + X
    advice = [text for text in report.explain("0").advice if text.startswith("add=lower: ")]
    assert advice == [
        "add=lower: other (parameter 0.bias), of float32, promotes self of bfloat16, which has more elements, to "
        'float32. To run it in the autocast dtype: set_module_policy(model, {"0": {"add": "lower"}}).'
    ]
    assert len([text for text in report.explain("add").advice if text.startswith("add=lower: ")]) == 1
    (row,) = promotions(report.calls)
    assert row[2:] == ("self bfloat16[2, 4], other (parameter 0.bias) float32[4]", 1, 32, "add=lower")
    elsewhere = (dataclasses.replace(call, autocast=(("cuda", torch.float16),)) for call in report.calls)
    assert promotions(elsewhere) == []
    assert "Promoted to float32" in str(report)
    with tp.trace(model) as report, tp.my_autocast("cpu", overrides={"add": "lower"}):
        model(X) + X
    assert promotions(report.calls) == []


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cos", torch.ones(8, 4))
        self.register_buffer("sin", torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * self.cos[:5] + y.flip(-1) * self.sin[:5]


def test_the_buffers_that_promote_activations_are_named(tmp_path: Path) -> None:
    """Nothing is promoted if these are cast."""
    model = nn.Sequential(Rotated())
    with tp.trace() as report, tp.my_autocast("cpu"):
        for _ in range(2):
            model(torch.ones(3, 5, 4))
    report.save(tmp_path / "a.jsonl.gz")
    for one in (report, tp.load(tmp_path / "a.jsonl.gz")):
        operands = [row[2] for row in promotions(one.calls)]
        assert operands == [
            f"self bfloat16[3, 5, 4], other (a view of buffer 0.{name}) float32[5, 4]" for name in ("cos", "sin")
        ]
        assert sum("a view of buffer 0." in text for text in one.explain("0").advice) == 2
    for name in re.findall(r"of buffer 0\.(\w+)", str(operands)):
        setattr(model[0], name, getattr(model[0], name).bfloat16())
    with tp.trace() as report, tp.my_autocast("cpu"):
        model(torch.ones(3, 5, 4))
    assert promotions(report.calls) == []


def test_a_region_that_is_for_another_device() -> None:
    with tp.trace() as report, tp.my_autocast("cuda", enabled=False):
        nn.Linear(4, 4)(X)
    why = dict(report.explain("linear").facts)["without a policy"]
    assert why.startswith("no region for cpu: region at test_explanation.py:")
    assert why.endswith(f" is for cuda{UNAVAILABLE} (1)")


@pytest.mark.parametrize(("dtype", "said"), [(torch.float64, True), (torch.float32, False)])
def test_what_is_float64_gets_no_override(dtype: torch.dtype, said: bool) -> None:
    with tp.trace() as report, tp.my_autocast("cpu"):
        nn.functional.linear(torch.ones(2, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype))
    advice = " ".join(report.explain("linear").advice)
    assert ("The arguments of aten::linear are float64, which autocast does not cast" in advice) is said
    assert ("fp32" in advice) is not said


def test_a_promotion_where_no_override_acts() -> None:
    model = nn.Sequential(Biased())
    torch.set_autocast_enabled("cpu", True)
    try:
        with tp.trace() as report:
            model(X)
            model[0](X)
        with tp.trace() as in_region, torch.autocast("cpu"):
            model(X)
    finally:
        torch.set_autocast_enabled("cpu", False)
    (row,) = promotions(report.calls)
    assert row[-1] is None
    (advice,) = report.explain("add").advice
    assert advice.endswith("in place of torch.set_autocast_enabled, under which no override acts.")
    assert promotions(in_region.calls)[0][-1] == "add=lower"
    tp.set_module_policy(model, {"0": {"add": "lower"}})
    with tp.my_autocast("cpu"):
        assert model(X).dtype is torch.bfloat16


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.net = net
        ctx.save_for_backward(x)
        return net(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu"):  # of the backward
            y = ctx.net(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Decorated(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # of Decorated
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.float() @ ctx.saved_tensors[0]


def test_a_region_that_the_backward_opens() -> None:
    """backward() is called after the region, and its line opens none."""
    net = nn.Sequential(nn.Linear(4, 4))
    with tp.install(), tp.trace(net) as report:
        with torch.autocast("cpu", torch.float16):
            y = Recomputed.apply(net, torch.ones(2, 4, requires_grad=True))
        y.sum().backward()
    (call,) = report.calls.where(op="linear", phase="backward")
    source, _, line = call.policy_source.rpartition(":")
    assert source == f"PyTorch's table, region opened in the backward at {__file__}"
    assert "# of the backward" in linecache.getline(__file__, int(line))
    for text in ("op=linear", "0"):
        advice = report.explain(text).advice
        assert (
            f"The region opened in the backward at test_explanation.py:{line} is of cpu bfloat16; the forward of "
            "module 0 ran in cpu float16. Open both with one dtype."
        ) in advice
        assert "after the region" not in str(advice)


def test_custom_bwd_of_another_device() -> None:
    with tp.install(), tp.trace() as report:
        with torch.autocast("cpu"):
            y = Decorated.apply(torch.ones(2, 2, requires_grad=True))
        y.sum().backward()
    found = report.explain("matmul")
    (line,) = (at for at in range(1, 999) if "# of Decorated\n" in linecache.getline(__file__, at))
    assert (
        f"no region for cpu: custom_bwd at test_explanation.py:{line} is for cuda{UNAVAILABLE} (1)" in found.paragraph
    )
    assert found.advice[0].endswith(
        f' is for cuda{UNAVAILABLE}. Decorate with custom_fwd(device_type="cpu") and custom_bwd(device_type="cpu").'
    )


def test_an_op_without_a_policy_in_a_disabled_region() -> None:
    """The region makes nothing float32: its input is of lower precision."""
    with tp.install(), tp.trace() as report, torch.autocast("cpu"):
        y = X @ X.t()
        with torch.autocast("cpu", enabled=False):
            (y @ y).softmax(-1)
    facts = dict(report.explain("softmax").facts)
    assert facts["without a policy"] == "autocast was off (1)"
    assert re.fullmatch(
        r"autocast off by torch\.autocast at test_explanation\.py:\d+ \(1\)", facts["in the same modules"]
    )
    assert "self: aten::matmul (bfloat16 -> bfloat16) at test_explanation.py:" in facts["its tensors"]
    assert {"in the same modules", "its tensors"}.isdisjoint(dict(report.explain("(model)").facts))


def test_the_calls_have_the_order_of_the_ops_of_the_trace() -> None:
    """Inf and NaN first, then casts, then policies, then what computes; last views and conversions."""
    with tp.trace(values=True) as traced, tp.my_autocast("cpu", torch.bfloat16):
        x = torch.ones(2, 2)
        for _ in range(5):
            x = x.view(2, 2).t().to(torch.float64).to(torch.float32)
        x.relu().relu()
        torch.mm(x, x)
        torch.zeros(1).log()
    rows = [row.op for row in traced.explain("(model)").rows]
    assert rows[:3] == ["aten::log", "aten::mm", "aten::relu"]
    assert "aten::t" in rows[3:]
