"""docs/troubleshooting.md, "An op got two dtypes": each line raises its text, its cure passes, and tools name both."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import linecache
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import torch_promote as tp
from helpers.doc_blocks import ROOT, blocks
from torch_promote.observe.call import COMPILED
from torch_promote.reading.dtype_errors import cure_by_text, cure_of, describe_raised
from torch_promote.reading.raised_errors import say_at_exit
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
    assert ("Of the optimizer's 2, these are float16: weight, bias." in said) == ("FP16" in row.text)
    if row in OVERRIDES:
        assert f"--override {row.cure}," in said
        assert "(not tried)" in said
    else:
        assert "--override" not in said or re.search(r"(\. Where|\. Or, where) autocast is on: --override", said)


@pytest.mark.parametrize("bias", [True, False])
def test_tensors_of_one_dtype_are_not_those_of_an_error_of_two(
    bias: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """functional_call puts the weights back before the error reaches `run`."""
    model = torch.nn.Linear(4, 4, bias=bias).bfloat16()
    weights = {name: one.detach().float() for name, one in model.named_parameters()}
    with pytest.raises(RuntimeError, match="dtype") as raised:
        torch.func.functional_call(model, weights, torch.ones(2, 4, dtype=torch.bfloat16))
    monkeypatch.setattr("sys.last_value", raised.value, raising=False)
    say_at_exit()
    said = capsys.readouterr().err
    assert "aten::linear, at test_troubleshooting.py" in said
    assert "The tensors that the traceback shows have one dtype. `torch-promote trace` names the call" in said
    assert "bfloat16" not in said


def test_the_tensor_of_another_dtype_is_an_expression(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(out: torch.Tensor, rows: torch.Tensor, y: torch.Tensor) -> None:
        out.index_add_(0, rows, y * y[:1].float())

    with pytest.raises(RuntimeError, match="must have the same scalar type") as raised:
        add(torch.zeros(2, 4).half(), torch.arange(2), torch.ones(2, 4).half())
    monkeypatch.setattr("sys.last_value", raised.value, raising=False)
    say_at_exit()
    said = capsys.readouterr().err
    assert (
        "The traceback does not show all of its tensors. Where autocast is on: --override index_add_=match_self" in said
    )


def test_a_cast_stands_before_an_override_that_may_not_act(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a moving average, which is updated outside of the region."""

    def update(target: torch.Tensor, source: torch.Tensor) -> None:
        target.lerp_(source, 0.1)

    with pytest.raises(RuntimeError, match="expected dtype float for `end`") as raised:
        update(torch.zeros(4), torch.ones(4, dtype=torch.bfloat16))
    monkeypatch.setattr("sys.last_value", raised.value, raising=False)
    say_at_exit()
    said = capsys.readouterr().err
    assert said.index("cast source with .to(torch.float32)") < said.index("Or, where autocast is on: --override lerp_")


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
WIDE = """
@torch.library.custom_op("tests::wide", mutates_args=())
def wide(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError("expected scalar type Float but found BFloat16")
    return x.sin()
with torch.autocast("cpu"): wide(model(x))
"""
REGISTERED = """
@torch.library.custom_op("tests::products", mutates_args=())
def products(xs: list[torch.Tensor], w: torch.Tensor) -> {result}:
    return {products}
products.register_autograd({backward}, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]))
{cured}
with torch.autocast("cpu"):
    y = products([model(x), model(x)], x.requires_grad_())
sum(one.float().sum() for one in y).backward()
"""
OF_LIST = REGISTERED.format(
    result="list[torch.Tensor]",
    products="[one.mm(w) for one in xs]",
    backward="lambda ctx, grads: ([one.mm(ctx.saved_tensors[0].t()) for one in grads], None)",
    cured="{cured}",
)
OF_ONE = REGISTERED.format(
    result="torch.Tensor",
    products="xs[0].mm(w)",
    backward="lambda ctx, grad: ([grad.mm(ctx.saved_tensors[0].t())] * 2, None)",
    cured="{cured}",
)
REGISTER = 'torch.library.register_autocast("tests::products", "cpu", torch.bfloat16)'
SETTER = """
torch.set_autocast_enabled("cpu", True)
try: x.index_add(0, i, model(x))
finally: torch.set_autocast_enabled("cpu", False)
"""
IN_CHECKPOINT = FUNCTION.replace("Product.apply(", "torch.utils.checkpoint.checkpoint(Product.apply, ").replace(
    "model.weight)", "model.weight, use_reentrant=True)"
)
OFF = "with autocast off. If its forward ran with autocast on,"
OTHERS = {
    IN_CHECKPOINT: "The backward of the autograd.Function Product runs",
    FUNCTION: 'decorate it with torch.amp.custom_fwd(device_type="cpu"), and the backward with torch.amp.custom_bwd(',
    STATES: "A step of the optimizer got several dtypes (self bfloat16, end float32).",
    LIBRARY: 'where it is defined: tp.register_policy("tests::scaled", "promote"), or "lower" or "fp32" (not tried).',
    WIDE: "--override tests::wide=fp32, in code",  # "promote" changes nothing
    OF_LIST.format(cured=""): f"The backward of the op tests::products (register_autograd) runs {OFF} {REGISTER} casts",
    OF_ONE.format(cured=""): f"The backward of the op tests::products (register_autograd) runs {OFF} {REGISTER} casts",
    SETTER: "Autocast is on by torch.set_autocast_enabled, outside of regions, so no override acts. In the code, at",
    "with torch.autocast('cpu', enabled=False): model(low)": "off there, by torch.autocast at program.py:1, so no ",
    "model(x[:, :2])": "",  # of shapes
    "torch.linalg.cholesky(-x)": "",  # of values
}


@pytest.mark.parametrize(("code", "cure"), OTHERS.items(), ids=range(len(OTHERS)))
def test_other_errors(code: str, cure: str) -> None:
    with pytest.raises(RuntimeError), tp.install(), tp.trace() as report:
        execute(Row("", "", code, ""), code)
    said = report.content().verdict
    assert said.startswith(f"The call that raised: {'tests' if code in (LIBRARY, WIDE) else 'aten'}::")
    assert cure in said if cure else "What cures it" not in said


@pytest.mark.parametrize("code", [OF_LIST, OF_ONE], ids=["list", "one"])
def test_register_autocast_cures_the_backward_of_an_op(code: str) -> None:
    execute(Row("", "", "", ""), code.format(cured=REGISTER))


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
    assert "`torch-promote find-nan` names the call" in capsys.readouterr().err


def test_a_backward_of_two_dtypes_names_the_override_of_its_forward() -> None:
    code = """
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
with torch.autocast("cpu", torch.float16):
    out = net(torch.ones(8, 4)).squeeze()
torch.vmap(lambda v: torch.autograd.grad(out, list(net.parameters()), v)[0])(torch.eye(8))
"""
    with pytest.raises(RuntimeError, match="expected scalar type"), tp.trace() as report:
        execute(Row("", "", code, ""), code)
    said = report.content().verdict
    assert "The call of the backward got several dtypes (float16, float32). Cast in the forward" in said
    assert "or run it in float32: --override batch_norm=fp32, in code" in said
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
        ("torch.ops.aten.index_add(x, 0, i, low)", "cast source with .to(torch.float32)"),
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


class Said(NamedTuple):
    run: str
    trace: str


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Said]:
    """What both tools say of a program that an error ends."""

    def said(code: str) -> Said:
        lines = code.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, "program.py", (len(code), None, lines, "program.py"))
        with pytest.raises(Exception, match=r".") as error, tp.trace() as report:
            execute(Row("", "", code, ""), code)
        monkeypatch.setattr("sys.last_value", error.value, raising=False)
        say_at_exit()
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torch-promote: ")]
        assert len(told) == 1
        assert report.content().title.endswith(", an error")
        return Said(told[0], report.content().verdict)

    return said


COMPLEX = "and what its complex64 result meets with .to(torch.complex64). Cast the real tensor that comes of these"


@pytest.mark.parametrize(
    ("code", "back"),
    [
        ("torch.view_as_complex(low[:, :2])", COMPLEX),
        ("torch.fft.fft2(x.half())", COMPLEX),
        ("torch.fft.irfft(x.half())", "and its result"),
        ("torch.linalg.cholesky(low @ low.T)", "and its result"),
    ],
)
def test_what_is_cast_back(code: str, back: str, tools: Callable[[str], Said]) -> None:
    said = tools(code).trace
    assert f"with .to(torch.float32) (tried for the call alone), {back} back with .to(torch." in said


SPECTRAL = """
weight = nn.Parameter(torch.ones(3, 2).half())
spectrum = torch.fft.rfft(x.half(){to}) * torch.view_as_complex(weight){complex}
torch.fft.irfft(spectrum){back} @ x.half()[:4, :4]
"""


def test_the_casts_around_a_complex_result(tools: Callable[[str], Said]) -> None:
    casts = {"to": ".to(torch.float32)", "complex": ".to(torch.complex64)", "back": ".to(torch.float16)"}
    assert COMPLEX in tools(SPECTRAL.format(**casts | {"to": ""})).trace
    with pytest.raises(RuntimeError, match="same dtype"):
        execute(Row("", "", "", ""), SPECTRAL.format(**casts | {"back": ""}))
    execute(Row("", "", "", ""), SPECTRAL.format(**casts))


SCRIPTED = """
def f(x):
    return x.view(4, 4) @ torch.ones(4, 4)
f.__module__ = "program"
graph = torch.jit.{graph}
graph(low)
"""


@pytest.mark.parametrize("graph", ["trace(f, x)", "script(f)"])
def test_a_graph_of_torchscript_has_no_line_to_cast_at(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = SCRIPTED.format(graph=graph)
    monkeypatch.setitem(linecache.cache, "program.py", (len(code), None, code.splitlines(True), "program.py"))
    with pytest.raises(RuntimeError, match="TorchScript"), tp.trace() as report:
        execute(Row("", "", "", ""), code)
    said = report.content().verdict
    assert (
        ": RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float (in TorchSc" in said
    )
    assert "(in TorchScript, program.py:3). What cures it: Autocast is off there, so no override acts. Open a " in said
    assert "In the code" not in said


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "x.new_zeros(5, 4).index_copy(0, i, low)",
            [
                "Or cast self with .to(torch.bfloat16), if the ops after",
                "self: aten::new_zeros (float32 -> float32) at",
            ],
        ),
        (
            "torch.cat([x[:0], low, low]).view(8, 4) @ low",
            ["Or cast self with .to(torch.bfloat16), if", "self: aten::cat (float32, bfloat16 -> float32) at"],
        ),
        (
            "nn.GRU(4, 4)(nn.utils.rnn.pack_sequence([x, x]), low[None, :2])",
            ["cast hx with .to(torch.float32) (not tried)."],
        ),
        (
            "exec(compile('def f(x): return model(x)', '/site-packages/lib.py', 'exec')); f(low)",
            ["lib.py:1, autocast off, called at program.py:1: RuntimeError"],
        ),
    ],
    ids=["tie", "joined", "packed", "library"],
)
def test_what_the_tensors_of_two_dtypes_are(code: str, says: list[str], tools: Callable[[str], Said]) -> None:
    said = tools(code).trace
    assert all(one in said for one in says), said


@pytest.mark.parametrize(
    "code",
    [
        "@torch.autocast('cpu', enabled=False)\ndef f(): torch.dot(low[0], x[0])\nf()",
        "class Own(torch.optim.SGD):\n    def step(self): torch.dot(low[0], x[0])\nOwn(model.parameters()).step()",
    ],
)
def test_no_override_is_advised_where_none_acts(code: str, tools: Callable[[str], Said]) -> None:
    assert not any("--override" in said for said in tools(code))


def test_a_region_around_a_call_has_to_have_the_next_op_too(tools: Callable[[str], Said]) -> None:
    """The result of fft2 is complex64, so that a linear layer of half weights raises after a cast, or a region."""
    code = "F.linear(torch.fft.fft2({}).real{}, x.half())"
    said = tools(code.format("x.half()", ""))
    assert "Or open a region around it and the ops that take its result (tried for the call alone): " in said.trace
    execute(Row("", "", code, ""), code.format("x.half().float()", ".to(torch.float16)"))


FREE = """
class Free(torch.optim.SGD):
    @torch.no_grad()
    def eval(self):
        for p in self.param_groups[0]["params"]:
            p.lerp_(end=self.state[p]["z"]{}, weight=0.5)
optimizer = Free(model.half().parameters())
for p in model.parameters():
    optimizer.state[p]["z"] = p.detach().float()
optimizer.eval()
"""
FUSED = """
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(2):
    model(x.to(model.weight.dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.bfloat16(){}
"""


def test_an_op_in_the_code_of_an_optimizer(tools: Callable[[str], Said]) -> None:
    """The dtype of its state is its own affair."""
    said = tools(FREE.format(""))
    assert "aten::lerp_ of p float16[4, 4], self.state[p]['z'] float32[4, 4], at program.py:6, " in said.run
    assert "In the code, at that line: cast self.state[p]['z'] with .to(torch.float16) (not tried)." in said.run
    assert "In the code, at that line: cast end with .to(torch.float16) (tried for the call alone)." in said.trace
    assert "A step of the optimizer" not in f"{said}"
    execute(Row("", "", "", ""), FREE.format(".to(torch.float16)"))


def test_a_step_of_an_optimizer_of_pytorch(tools: Callable[[str], Said]) -> None:
    """The names in its code are not those of the program, and its counters of steps need float32."""
    said = tools(FUSED.format(""))
    for text, mixed in zip(said, ("device_exp_avg_sqs[1] float32).", "exp_avg_sqs[1] float32)."), strict=True):
        assert "A step of the optimizer got several dtypes (" in text
        assert f"{mixed} A parameter, its gradient and its states need one: make the optimizer after" in text
        assert "In the code" not in text
    assert re.search(r", at adam.py:\d+, called at program.py:5, module", said.run)
    execute(Row("", "", "", ""), FUSED.format("; optimizer.load_state_dict(optimizer.state_dict())"))


def test_counters_of_steps_are_not_cast(tools: Callable[[str], Said]) -> None:
    code = "p, m, v, steps = [low], [x], [x.clone()], [torch.tensor(300.0)]\n"
    code += "torch._fused_adamw_(p, p, m, v, [], steps, lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, "
    code += "amsgrad=False, maximize=False)"
    said = tools(code)
    assert "cast m[0], v[0] with .to(torch.bfloat16) (not tried)." in said.run
    assert "cast exp_avgs[0], exp_avg_sqs[0] with .to(torch.bfloat16) (tried for the call alone)." in said.trace


def test_an_error_while_a_compiled_graph_runs(tools: Callable[[str], Said]) -> None:
    """The node of the graph knows its line."""
    code = """
def f(x):
    y = torch.bernoulli(x).to(torch.float16)
    return y{} @ x
torch.compile(f, backend="aot_eager")(x)
"""
    said = tools(code.format(""))
    assert "aten::mm of self float16[4, 4], mat2 float32[4, 4], at program.py:4, in a compiled function, " in said.run
    assert "forward, module (model), program.py:4, in a compiled function, autocast off: " in said.trace
    for text in said:
        assert "An override acts only where the function is compiled. In the code of that function: cast self" in text
        assert "--override" not in text
    execute(Row("", "", "", ""), code.format(".to(torch.float32)"))


WORKER = """
import threading
from multiprocessing.pool import ThreadPool
errors = []
def work():
    try:
        model(low)
    except Exception as error:
        errors.append(error)
def run():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors[0]
with torch.autocast("cpu"):
    {}
"""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise run()", 7),
        ("raise ValueError('a worker failed') from run()", 7),
        ("ThreadPool(1).apply(model, (low,))", 16),
    ],
)
def test_an_error_that_a_thread_has_handed_on(code: str, line: int, tools: Callable[[str], Said]) -> None:
    for text in tools(WORKER.format(code)):
        assert (
            "aten::linear of input bfloat16[4, 4], self.weight (parameter weight) float32[4, 4], self.bias (parameter "
            "bias) float32[4], at linear.py:" in text
        )
        assert f", called at program.py:{line}, module" in text
        assert (
            "does not act there. Open torch.autocast in that thread. Or in the code that calls it: cast input" in text
        )
        assert "torch-promote trace" not in text


def test_a_program_in_one_thread_is_in_no_other(tools: Callable[[str], Said]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        said = pool.submit(tools, "model(low)").result()
    assert "thread" not in f"{said}"
    assert "In the code that calls it: cast input with .to(torch.float32) (not tried)." in said.run


def test_an_error_of_a_replica(tools: Callable[[str], Said]) -> None:
    code = (
        "try: model(low)\nexcept RuntimeError: one = torch._utils.ExceptionWrapper(where='in replica 0 on device 0')\n"
    )
    for text in tools(f"{code}one.reraise()"):
        assert (
            "program.py:3, module (model): It ran in replica 0 on device 0. A region acts in the thread that " in text
        )


RECOMPUTED = """
from torch.utils.checkpoint import checkpoint
forward = True
net = nn.Sequential(nn.GELU(), nn.Linear(4, 4))
{hook}
for _ in range(2):
    with torch.autocast("cpu"):
        y = checkpoint(lambda x: net(x), x.requires_grad_(), use_reentrant=False)
    forward = False
    y.sum().backward()
"""


@pytest.mark.parametrize(
    ("hook", "differs"),
    [
        (
            "net[0].register_forward_pre_hook(lambda _, args: args[0].bfloat16() if forward else None)",
            "aten::gelu in 0, program.py:8, ran bfloat16 -> bfloat16 in the forward and float32 -> float32 in the "
            "recomputation.",
        ),
        (
            "net[0].register_forward_pre_hook(lambda _, args: None if forward else args[0].sin())",
            "aten::sin in 0, program.py:5, ran in the recomputation alone.",
        ),
        (
            "net = nn.Linear(4, 4)\nclass Warm(nn.Module):\n    def forward(self, x):\n"
            "        with torch.autocast('cpu', enabled=not forward): return lin(x)\nlin, net = net, Warm()",
            "aten::linear in Linear, program.py:8, ran float32 in the forward and float32 -> bfloat16 in the "
            "recomputation. Autocast was off in the forward, and on in the recomputation.",
        ),
    ],
)
def test_the_first_call_that_differs_in_a_recomputation(hook: str, differs: str, tools: Callable[[str], Said]) -> None:
    said = tools(RECOMPUTED.format(hook=hook))
    known = "The recomputation of a checkpoint saved other tensors than the forward."
    assert said.run.endswith(f": {known} `torch-promote trace` names the first call that differs.")
    assert said.trace.endswith(f" {known} The first call that differs: {differs}")


def test_a_cast_that_a_selective_checkpoint_has_not_saved(tools: Callable[[str], Said]) -> None:
    code = next(one.text for one in blocks() if one.page == PAGE and "create_selective_checkpoint_contexts" in one.text)
    said = tools(code.replace("except RuntimeError", "except ZeroDivisionError"))
    for text in said:
        assert "open the region with torch.autocast(..., cache_enabled=False), or run under `torch-promote run" in text
    assert said.trace.endswith(" The forward of this call took these casts from the cache: weight, bias.")


def test_a_flag_of_another_device_type(tools: Callable[[str], Said], recwarn: pytest.WarningsRecorder) -> None:
    """The trials of cures open regions for that device type, too, whose warnings nobody sees."""
    code = SETTER.replace('"cpu", ', "").replace("x.index_add(0, i, model(x))", "model(x.half())")
    with pytest.raises(RuntimeError), tp.trace() as report:
        execute(Row("", "", "", ""), code)
    said = report.content().verdict
    assert 'It is on for cuda, and the tensors are on cpu: torch.set_autocast_enabled("cpu", True) (not tried).' in said
    assert not [one for one in recwarn if "Disabling my_autocast" in str(one.message)]
    execute(Row("", "", "", ""), SETTER.replace("x.index_add(0, i, model(x))", "model(x.half())"))


def test_a_nested_tensor_has_no_shape() -> None:
    code = "torch.nested.nested_tensor([x, x[:2]]) @ low"
    with pytest.raises(RuntimeError), tp.trace() as report:
        execute(Row("", "", "", ""), code)
    assert "of self float32 nested, other bfloat16[4, 4]" in report.content().verdict


def test_a_compiled_function_whose_lines_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code has none: the first line of the function is not said to be the call's."""
    with tp.trace() as report, pytest.raises(RuntimeError):
        execute(Row("", "", "", ""), "x @ low")
    (call,) = (one for one, _ in report.raised)
    monkeypatch.setitem(linecache.cache, "program.py", (9, None, ["def f():\n"], "program.py"))
    call = dataclasses.replace(call, policy_source=COMPILED, line="/there/program.py:1")
    monkeypatch.setitem(linecache.cache, "/there/program.py", (9, None, ["def f():\n"], "/there/program.py"))
    assert "line unknown, in the compiled function f (from program.py:1), autocast off" in describe_raised((call, call))


PARAMETRIZED = """
from torch.nn.utils import parametrize
class Delta(nn.Module):
    def forward(self, weight): return torch.baddbmm(weight, weight, weight)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.delta = nn.Parameter(torch.ones(2, 4, 4)), Delta()
    def forward(self, x):
        parametrize.register_parametrization(self, "weight", self.delta)
        return self.weight
with torch.autocast("cpu"): Experts()(x)
"""
NORMALIZED = """
def attend(q, v):
    if q.dtype is not v.dtype:
        raise ValueError(f"the dtypes differ: {q.dtype} and {v.dtype}")
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x): return self.weight * x
net = nn.ModuleDict({"project": nn.Linear(4, 4), "norm": Norm()})
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        y = self.net["project"](x)
        attend(self.net["norm"](y), y)
with torch.autocast("cpu"): Attention()(x)
"""


@pytest.mark.parametrize(
    ("code", "where", "before"),
    [
        (
            PARAMETRIZED,
            "parametrize.py:\\d+, called at program.py:10",
            "baddbmm in delta, program.py:4, returned bfloat16 for float32 by PyTorch's table, baddbmm=fp32.",
        ),
        (
            NORMALIZED,
            "program.py:4",
            "mul in net.norm, program.py:9, promoted to float32 by self (parameter net.norm.weight), mul=lower; linear "
            "in net.project, program.py:16, returned bfloat16 for float32 by PyTorch's table, linear=fp32.",
        ),
    ],
)
def test_an_error_that_python_code_raises(code: str, where: str, before: str, tools: Callable[[str], Said]) -> None:
    """Each override that is named cures it here."""
    said = tools(code)
    for text in said:
        assert re.search(f"The ValueError was raised in Python at {where}; no op raised it. ", text)
    assert said.trace.startswith("The program ended with ValueError: ")
    assert said.trace.endswith(f" the last first: {before}")
    for op, policy in re.findall(r", (\w+)=(\w+)", before):
        with tp.install(overrides={op: policy}):
            execute(Row("", "", "", ""), code)


@pytest.mark.parametrize(
    "code",
    [
        "{}['torch.float32']",
        "{}['dtype']",
        "raise KeyError('weights')",
        "raise ValueError('the shapes must be the same: dtype')",
        "assert torch.allclose(low, low + 1)",
    ],
)
def test_other_errors_of_python_code(
    code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(linecache.cache, "program.py", (len(code), None, [code], "program.py"))
    with pytest.raises((LookupError, ValueError, AssertionError)) as error, tp.trace() as report:
        execute(Row("", "", "", ""), code)
    monkeypatch.setattr("sys.last_value", error.value, raising=False)
    say_at_exit()
    assert (report.failure, capsys.readouterr().err) == (None, "")


def test_an_op_that_a_library_defines_in_python(tools: Callable[[str], Said]) -> None:
    """`run` names the call of the op, and not the line of its kernel that raises."""
    said = tools(LIBRARY)
    assert said.run.startswith("torch-promote: tests::scaled of x bfloat16[4, 4], scale float32[4, 4], at custom_ops.")
    assert ", called at program.py:7, module" in said.run
    for text in said:
        assert (
            'it is defined: tp.register_policy("tests::scaled", "promote"), or "lower" or "fp32" (not tried).' in text
        )
    for policy in ("promote", "lower", "fp32"):
        with tp.install(), tp.register_policy("tests::scaled", policy):
            execute(Row("", "", "", ""), LIBRARY)


BLUR = """
class Blur(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kernel", torch.ones(4, 4))
    def forward(self, x): {op}
nn.Sequential({first}Blur())(low)
"""
FIRST, TRIED = "nn.Linear(4, 4).bfloat16(), ", "(tried for the call alone). Or cast"


@pytest.mark.parametrize(
    ("op", "first", "cure", "cured"),
    [
        ("x @ self.kernel", FIRST, f"other (buffer 1.kernel) with .to(torch.bfloat16) {TRIED} self", ".to(x.dtype)"),
        # Nothing has computed x in bfloat16.
        ("self.kernel @ x", "", f"other with .to(torch.float32) {TRIED} self (buffer 0.kernel)", ".float()"),
        # It has no kernel for bfloat16.
        ("torch.cdist(self.kernel, x", FIRST, f"x2 with .to(torch.float32) {TRIED} x1", ".float()"),
    ],
)
def test_a_buffer_of_another_dtype(op: str, first: str, cure: str, cured: str, tools: Callable[[str], Said]) -> None:
    end = ")" * op.count("(")
    said = tools(BLUR.format(op=f"return {op}{end}", first=first))
    assert f"cast {cure}" in said.trace
    assert f"(buffer {int(bool(first))}.kernel) float32[4, 4]" in said.run
    execute(Row("", "", "", ""), BLUR.format(op=f"return {op}{cured}{end}", first=first))


def test_no_cast_is_advised_in_code_of_pytorch(tools: Callable[[str], Said]) -> None:
    said = tools("nn.Sequential(nn.Flatten(), nn.Linear(4, 4))(low)")
    assert "aten::linear of input bfloat16[4, 4], " in said.run
    assert "In the code" not in said.run


def test_a_decorator_of_another_device_type() -> None:
    code = "@torch.autocast({})\ndef f(x): return model(x)\nf(x)"
    with tp.install(), tp.trace() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        execute(Row("", "", "", ""), code.format("'cuda'"))
    here = "" if torch.cuda.is_available() else ", which is not available here"
    said = report.content().verdict
    assert said.endswith(
        f": no region for cpu: torch.autocast at program.py:1 is for cuda{here}. The tensors are on cpu: "
        'torch.autocast("cpu").'
    )
    with tp.install(), tp.trace() as report:
        execute(Row("", "", "", ""), code.format('"cpu"'))
    assert report.total.policies.total() == 1


UNSCALED_TWICE = """
optimizer = torch.optim.SGD([weight := nn.Parameter(torch.zeros(4))], lr=1.0)
for update in (False, {updates}):
    if update:
        scaler.update()
    {clears}
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
scaler.step(optimizer)
assert -weight.min().item() == {gradient}, "another gradient"
"""


@pytest.mark.parametrize(
    ("clears", "gradient"),
    [("optimizer.zero_grad()", 1), ("optimizer.zero_grad(set_to_none=False)", 1), ("pass", 2)],
)
def test_a_second_unscale(clears: str, gradient: int, tools: Callable[[str], Said]) -> None:
    """An update before the second backward cures it if the gradients are new; the sum of two would have two scales."""
    said = tools(UNSCALED_TWICE.format(updates=False, clears=clears, gradient=gradient)).trace
    advised = "call scaler.update() before that backward." in said
    assert advised == (gradient == 1), said
    assert ("With accumulated gradients, call it only where the optimizer steps." in said) != advised
    with contextlib.nullcontext() if advised else pytest.raises(AssertionError, match="another gradient"):
        execute(Row("", "", "", ""), UNSCALED_TWICE.format(updates=True, clears=clears, gradient=gradient))


REPLACED = """
import copy
{before}
model = copy.deepcopy(model)
{after}
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
"""
BUILT = "optimizer = torch.optim.SGD(model.parameters())"
SEVERAL = """
other = nn.Linear(4, 4)
of_other = torch.optim.SGD(other.parameters())
for optimizer in {steps}:
    scaler.scale(other(model(x).detach()).sum()).backward()
    scaler.step(optimizer)
"""


def test_an_optimizer_of_a_model_that_was_replaced(tools: Callable[[str], Said]) -> None:
    run, trace = tools(REPLACED.format(before=BUILT, after=""))
    cure = (
        "2 others have gradients and are in no optimizer: weight, bias. Build the optimizer after the model is final."
    )
    assert trace.endswith(f"No traced call that autograd recorded read the optimizer's 2 parameters. {cure}"), trace
    assert run.endswith(f"No parameter of the optimizer has a gradient. {cure}"), run
    execute(Row("", "", "", ""), REPLACED.format(before="", after=BUILT))


@pytest.mark.parametrize(
    ("code", "cure", "says"),
    [
        (
            SEVERAL.format(steps="(optimizer,)"),
            SEVERAL.format(steps="(of_other,)"),
            "Another optimizer has some. Call scaler.step() for those alone that have a gradient in this step.",
        ),
        (
            "model.requires_grad_(False); scaler.scale((model(x) + nn.Parameter(x)).sum()).backward(); "
            "scaler.step(optimizer)",
            "scaler.scale((model(x) + nn.Parameter(x)).sum()).backward(); scaler.step(optimizer)",
            "None requires one.",
        ),
        (
            "scaler.scale(model(x).sum()).backward(); optimizer.zero_grad(); scaler.step(optimizer)",
            "scaler.scale(model(x).sum()).backward(); scaler.step(optimizer); optimizer.zero_grad()",
            "Call backward() before the step, and optimizer.zero_grad() after it.",
        ),
    ],
    ids=["several", "frozen", "cleared"],
)
def test_an_optimizer_without_gradients(code: str, cure: str, says: str, tools: Callable[[str], Said]) -> None:
    assert tools(code).trace.endswith(f"No parameter of the optimizer has a gradient. {says}")
    execute(Row("", "", "", ""), cure)


HALF = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.base.requires_grad_(False)
    def forward(self, x):
        {converts}
        return self.base(x) + self.adapter(x)
model = Adapted()
{loads}
optimizer = torch.optim.SGD([model.adapter.weight])
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(x).sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
"""
STORES = "self.adapter.weight.data = self.adapter.weight.data.to(torch.float16)"
MADE = "model.adapter.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))"
KEEPS = (
    " Keep the model in float32, and let autocast cast: no model.half(), and no dtype=torch.float16 where it is loaded."
)
LEAVES = " Leave these in float32 there, and let autocast cast."
FROZEN = "for p in model.parameters(): if p.requires_grad: p.data = p.data.float()"


@pytest.mark.parametrize(
    ("converts", "loads", "cure", "says"),
    [
        (STORES, "", ("", ""), f" (converted from float32 at program.py:8).{LEAVES}"),
        ("", MADE, ("", ""), f".{KEEPS}"),
        (
            "",
            "model.half()",
            ("", f"model.half()\n{FROZEN.replace(': if', ':' + chr(10) + '    if')}"),
            f" (converted from float32 at program.py:11).{LEAVES} Parameters that are frozen may stay in float16: "
            f"`{FROZEN}`.",
        ),
        (
            "self.adapter(x); self.adapter.weight.data = torch.ones(4, 4, dtype=torch.float16)",
            "",
            ("self.adapter(x)", ""),
            f" (read first in float32).{LEAVES}",
        ),
    ],
    ids=["in a forward", "from the start", "the whole model", "not by a conversion"],
)
def test_parameters_in_float16(
    converts: str, loads: str, cure: tuple[str, str], says: str, tools: Callable[[str], Said]
) -> None:
    said = tools(HALF.format(converts=converts or "pass", loads=loads)).trace
    assert said.endswith(f"Of the optimizer's 1, these are float16: adapter.weight{says}"), said
    execute(Row("", "", "", ""), HALF.format(converts=cure[0] or "pass", loads=cure[1]))
