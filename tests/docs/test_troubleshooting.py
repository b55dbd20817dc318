"""docs/troubleshooting.md, "An op got two dtypes": each line raises its text, its cure passes, and tools name both."""

from __future__ import annotations

import contextlib
import linecache
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import torch_promote as tp
from helpers.doc_blocks import ROOT, blocks
from torch_promote.reading.dtype_errors import cure_by_text, cure_of, say_at_exit
from torch_promote.reading.trace_report import TraceReport

PAGE = "docs/troubleshooting.md"
PRELUDE = next(block.text for block in blocks() if block.page == PAGE and "GradScaler" in block.text)


#: What PyTorch 2.11 says in place of these texts.
IN_2_11 = {
    "input tensors must have the same dtype": "expected scalar type BFloat16 but found Float",
    "expected target dtype to be Long": "expected scalar type Long but found Float",
}


class Row(NamedTuple):
    section: str
    text: str
    code: str
    cure: str

    def __str__(self) -> str:
        return self.code


def rows() -> list[Row]:
    found, section = [], ""
    for line in (ROOT / PAGE).read_text(encoding="utf-8").splitlines():
        if line.startswith("**"):
            section = line.partition("**")[2].partition("**")[0]
        cells = re.fullmatch(r"\| (`+)(.+?)\1 \| `(.+?)` \| `(.+?)` \|", line)
        if cells and section:
            text = IN_2_11.get(cells[2], cells[2]) if torch.__version__ < (2, 12) else cells[2]
            found.append(Row(section, text, cells[3], cells[4]))
    return found


ROWS = rows()
OVERRIDES = [row for row in ROWS if re.fullmatch(r"\w+=\w+", row.cure)]


@contextlib.contextmanager
def region(row: Row, overrides: dict[str, str]) -> Iterator[None]:
    if not row.section.startswith("In a region"):
        yield
        return
    with tp.my_autocast("cpu", overrides=overrides):
        yield


def execute(row: Row, code: str, overrides: dict[str, str] | None = None) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    with region(row, overrides or {}):
        exec(compile(code, "program.py", "exec"), names)


def error_of(row: Row) -> Exception:
    with pytest.raises(Exception, match=re.escape(row.text)) as error:
        execute(row, row.code)
    return error.value


def raised(row: Row) -> TraceReport:
    """A trace of the line, which raises its text."""
    with pytest.raises(Exception, match=re.escape(row.text)), tp.trace() as report:
        execute(row, row.code)
    assert isinstance(report, TraceReport)
    return report


def test_the_tables_are_whole() -> None:
    assert len(ROWS) == sum(line.startswith("| `") for line in (ROOT / PAGE).read_text(encoding="utf-8").splitlines())
    assert len({row.text for row in ROWS}) > 40
    assert len(OVERRIDES) > 20


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_line_raises_its_text_and_its_cure_passes(row: Row) -> None:
    report = raised(row)
    failure = report.failure
    assert failure is not None
    said = report.content()
    assert said.good is False
    if row not in OVERRIDES:
        execute(row, row.cure)
        if failure.in_call:
            assert "What cures it: " in said.verdict
            assert not cure_of(report.raised[-1], failure, report.calls).overrides
        else:  # no op has raised
            assert said.verdict.startswith(f"The program ended with {failure.text.partition(':')[0]}: ")
            assert cure_by_text(failure.text) in said.verdict
        return
    op, _, policy = row.cure.partition("=")
    execute(row, row.code, {op: policy})
    cure = cure_of(report.raised[-1], failure, report.calls)
    assert (cure.overrides, cure.tried) == ({op: policy}, True), said.verdict
    assert f"--override {row.cure}, in code" in said.verdict
    explained = report.explain(f"op={report.raised[-1][0].op}")
    assert f"What cures the error: --override {row.cure}" in explained.advice[0]
    assert "raised last" in dict(explained.facts)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_run_says_is_in_the_table(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` observes nothing: it reads the call from the traceback, and has not tried the cure."""
    monkeypatch.setitem(linecache.cache, "program.py", (len(row.code), None, [row.code], "program.py"))
    monkeypatch.setattr("sys.last_value", error_of(row), raising=False)
    say_at_exit()
    said = capsys.readouterr().err
    assert said.startswith("torch-promote: ")
    assert said.count("\n") == 1
    assert "program.py:1" in said
    if row in OVERRIDES:
        assert f"--override {row.cure}," in said
        assert "(not tried)" in said
    else:
        assert "--override" not in said or "Where autocast is on: --override" in said


FUNCTION = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad
with torch.autocast("cpu"):
    y = Product.apply(x.requires_grad_(), model.weight)
y.sum().backward()
"""
STATES = """
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
"""
LIBRARY = """
@torch.library.custom_op("tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if x.dtype is not scale.dtype:
        raise RuntimeError(f"scaled: {x.dtype} is not {scale.dtype}")
    return x * scale
with torch.autocast("cpu"): scaled(model(x), x)
"""
IN_CHECKPOINT = FUNCTION.replace("Product.apply(", "torch.utils.checkpoint.checkpoint(Product.apply, ").replace(
    "model.weight)", "model.weight, use_reentrant=True)"
)
OTHERS = {
    IN_CHECKPOINT: "The backward of the autograd.Function Product runs",
    FUNCTION: 'decorate it with torch.amp.custom_fwd(device_type="cpu"), and the backward with torch.amp.custom_bwd(',
    STATES: "A step of the optimizer got several dtypes (self bfloat16, end float32).",
    LIBRARY: 'where it is defined: tp.register_policy("tests::scaled", "promote"), or "lower" or "fp32" (not tried).',
    "with torch.autocast('cpu', enabled=False): model(low)": "off there, by install, region at program.py:1, so no ",
    "model(x[:, :2])": "",  # of shapes
    "torch.linalg.cholesky(-x)": "",  # of values
}


@pytest.mark.parametrize(("code", "cure"), OTHERS.items(), ids=range(len(OTHERS)))
def test_other_errors(code: str, cure: str) -> None:
    with pytest.raises(RuntimeError), tp.install(), tp.trace() as report:
        execute(Row("", "", code, ""), code)
    said = report.content().verdict
    assert said.startswith(f"The call that raised: {'tests' if code is LIBRARY else 'aten'}::")
    assert cure in said if cure else "What cures it" not in said


NAN = [
    "torch.multinomial(x[0] * float('nan'), 1)",
    "torch.linalg.svd(x * float('nan'))",
    "torch.distributions.Normal(x * float('nan'), 1.0, validate_args=True)",
    "with torch.autograd.detect_anomaly(): (torch.zeros(2, requires_grad=True).sqrt() * 0).sum().backward()",
    "model.weight.grad = x / 0; nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
    "int((x[0, 0] * float('nan')).item())",
]


@pytest.mark.parametrize("code", NAN)
def test_errors_of_values_that_are_not_finite(
    code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((RuntimeError, ValueError)) as error:
        execute(Row("", "", code, ""), code)
    monkeypatch.setattr("sys.last_value", error.value, raising=False)
    say_at_exit()
    assert "`torch-promote find-nan` in place of this command names the call" in capsys.readouterr().err


def test_a_backward_of_two_dtypes_names_the_override_of_its_forward() -> None:
    code = """
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
with torch.autocast("cpu", torch.float16):
    out = net(torch.ones(8, 4)).squeeze()
torch.vmap(lambda v: torch.autograd.grad(out, list(net.parameters()), v)[0])(torch.eye(8))
"""
    with pytest.raises(RuntimeError, match="expected scalar type"), tp.trace() as report:
        execute(Row("", "", code, ""), code)
    assert "or run it in float32: --override batch_norm=fp32, in code" in report.content().verdict
    with tp.install(overrides={"batch_norm": "fp32"}):
        execute(Row("", "", code, ""), code)


def test_errors_that_the_program_handles() -> None:
    """They do not begin the report, which lists the last ones. Inside of a call, the first that raised is named."""
    with tp.trace() as report, tp.my_autocast("cpu"):
        for _ in range(3):
            with contextlib.suppress(RuntimeError):
                torch.dot(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
        with contextlib.suppress(RuntimeError):
            torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2)
    assert report.failure is None
    assert [(call.name, first.name) for call, first in report.raised] == [
        ("aten::dot", "aten::dot"),
        ("aten::matmul", "aten::mm"),
    ]
    text = " ".join(str(report).split())
    assert "Calls that raised" in text
    assert "--override dot=promote" in text
    assert "Autocast casts no float64" in text


CHECKPOINT = """
from torch.utils.checkpoint import checkpoint
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
with torch.autocast("cpu"):
    y = checkpoint(lambda x: checkpoint(net, x.sin(), use_reentrant=False).sin(), x, use_reentrant=False)
y.sum().backward()
"""


def test_the_early_stop_of_a_recomputation_is_no_error() -> None:
    """A checkpoint raises an error of its own in the call that saves the last tensor, and handles it."""
    with tp.trace() as report:
        execute(Row("", "", CHECKPOINT, ""), CHECKPOINT)
    assert any(call.phase == "recompute" and not call.outputs for call in report.calls)
    assert (report.raised, report.total.errors) == ([], 0)
    assert "raised" not in str(report)
    assert "raised" not in str(report.explain("op=linear"))


def test_an_error_that_a_recomputation_handles() -> None:
    code = CHECKPOINT.replace("(net, x.sin()", "(f, x.sin()")
    code = f"""
import contextlib
def f(x):
    y = net(x)
    with contextlib.suppress(RuntimeError):
        torch.dot(low[0], x.detach()[0])
    return y.sin()
{code}"""
    with tp.trace() as report:
        execute(Row("", "", code, ""), code)
    assert [call.phase for call, _ in report.raised] == ["recompute"]
    assert {one.key: one.errors for one in report.by_op() if one.errors} == {"aten::dot": 3}


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        ("with torch.autocast('cpu'): model(x.double())", "cast input with .to(torch.float32)"),
        ("nn.GRU(4, 4)(x[None], x[None].bfloat16())", "cast hx with .to(torch.float32)"),
        ("low[i] = x", "cast x with .to(torch.bfloat16)"),
        ("torch.dot(low[0], x[0].sin())", "--override dot=promote"),
    ],
)
def test_what_run_advises_keeps_weights_and_tensors_that_it_does_not_see(
    code: str, cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(linecache.cache, "program.py", (len(code), None, [code], "program.py"))
    with pytest.raises(RuntimeError) as error:
        execute(Row("", "", code, ""), code)
    monkeypatch.setattr("sys.last_value", error.value, raising=False)
    say_at_exit()
    said = capsys.readouterr().err
    assert cure in said
    assert ("In the code" in said) == ("cast" in cure)


@pytest.mark.parametrize(
    ("call", "op", "cure"),
    [
        ("torch.scatter(x, 0, i[None], model(x))", "scatter", "--override scatter=promote, in code"),
        ("x.masked_scatter(x > 0, model(x))", "masked_scatter", "--override masked_scatter=promote, in code"),
        ("F.scaled_dot_product_attention(x, x, x, low)", "scaled_dot_product_attention", "cast attn_mask with"),
    ],
)
def test_errors_while_torch_compile_traces(
    call: str, op: str, cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    region = "contextlib.nullcontext()" if "attention" in call else "torch.autocast('cpu')"
    code = f"import contextlib\ndef f(x):\n    return {call}\nwith {region}: torch.compile(f, backend='eager')(x)"
    with pytest.raises(Exception, match="fake tensors") as error, tp.trace() as report:
        execute(Row("", "", code, ""), code)
    monkeypatch.setattr("sys.last_value", error.value, raising=False)
    say_at_exit()
    # PyTorch 2.15 logs the error before.
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("torch-promote: "))
    assert said.startswith(f"torch-promote: aten::{op} of ")
    assert "program.py:3, compiled: RuntimeError(" in said
    for text in (said, report.content().verdict):
        assert cure in text


def test_an_error_in_another_thread(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace does not observe it, and a region is one thread's."""
    code = "import concurrent.futures as c\nwith torch.autocast('cpu'), c.ThreadPoolExecutor(1) as pool:\n"
    code += "    low = model(x)\n    pool.submit(nn.Linear(4, 4), low).result()"
    with pytest.raises(RuntimeError) as error, tp.trace() as report:
        execute(Row("", "", code, ""), code)
    monkeypatch.setattr("sys.last_value", error.value, raising=False)
    say_at_exit()
    for text in (capsys.readouterr().err, report.content().verdict):
        assert "aten::linear of input bfloat16[" in text
        assert "program.py:4, module" in text
        assert "a region that another thread has opened does not act there." in text


def test_a_result_that_is_complex_is_not_cast_back() -> None:
    for code, back in (("torch.view_as_complex(low[:, :2])", False), ("torch.linalg.cholesky(low @ low.T)", True)):
        with pytest.raises(RuntimeError), tp.trace() as report:
            execute(Row("", "", code, ""), code)
        text = report.content().verdict
        assert "cast self with .to(torch.float32)" in text
        assert ("its result back" in text) == back
