"""The comparison of two recorded runs: a planted change is found, with its kind, op, module and parameter."""

from __future__ import annotations

import functools
import gc
import gzip
import itertools
import json
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_promote as tp
from torch_promote.cli.program import main
from torch_promote.errors import OptionError
from torch_promote.reading.alignment import align
from torch_promote.reading.difference import Difference
from torch_promote.reading.trace import Tracer
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.program_state import OptimizerStates
from torch_promote.report.base import Table, Tree, spell

BATCHES = 3
PLACE = 2  # the block that a change is planted in


class Block(nn.Module):
    """A residual MLP, in which a change can be planted."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.change in ("clone", "relu"):
            y = getattr(y, self.change)()
        elif self.change == "times one":
            y = y * 1
        elif self.change == "dropout":
            y = functional.dropout(y, 0.0, training=True)
        if self.change == "formula":
            y = 0.5 * y * (1 + torch.erf(y * 0.5**0.5))
        elif self.change == "double":
            y = functional.gelu(y.double()).to(y.dtype)
        else:
            y = functional.gelu(y)
        out: torch.Tensor = x + self.drop(self.down(y))
        return out


def record(change: str, folder: Path | None = None, *, autocast: bool = False, stock: bool = False) -> TraceReport:
    """Two training steps; with a folder, read from a file."""
    torch.manual_seed(0)
    blocks = [Block(change if i == PLACE else "") for i in range(4)]
    model = nn.Sequential(*blocks)
    batches = list(torch.randn(BATCHES, 6, 8))
    if change == "weight":
        with torch.no_grad():
            blocks[PLACE].up.weight.view(-1)[0] += 1e-3
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if change == "lr" else 0.1)
    overrides = {"gelu": "fp32"} if change == "override" else {}
    file = None if folder is None else folder / f"{len(list(folder.iterdir()))}.jsonl.gz"
    with tp.trace(model, values=True, record=file) as report:
        for batch in batches[:2]:
            region = torch.autocast("cpu") if stock else tp.my_autocast("cpu", enabled=autocast, overrides=overrides)
            with region:
                loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report if file is None else TraceReport.load(file)


PLANTED = {
    "weight": ("weight", "aten::linear", f"{PLACE}.up", f"{PLACE}.up.weight"),
    "clone": ("structure", "aten::clone", f"{PLACE}", None),
    "times one": ("structure", "aten::mul", f"{PLACE}", None),
    "relu": ("structure", "aten::relu", f"{PLACE}", None),
    "dropout": ("structure", "aten::dropout", f"{PLACE}", None),
    "formula": ("structure", "aten::gelu", f"{PLACE}", None),
    "double": ("policy", "aten::gelu", f"{PLACE}", None),
    "override": ("policy", "aten::gelu", "0", None),
}


def told(difference: Difference) -> tuple[object, ...]:
    first = difference.first
    assert first is not None
    return difference.kind, first.op, first.module, first.parameter


@pytest.mark.parametrize("change", PLANTED)
def test_a_planted_change_is_found(change: str, tmp_path: Path) -> None:
    autocast = change == "override"
    difference = record("", tmp_path, autocast=autocast).diff(record(change, tmp_path, autocast=autocast))
    kind, op, module, parameter = PLANTED[change]
    if change == "override":
        assert told(difference)[:2] == (kind, op)
        assert difference.first is not None
        assert difference.first.b is not None
        assert difference.first.b.policy_name == "fp32"
    else:
        assert told(difference) == (kind, op, module, parameter)
    assert difference
    assert not difference.equal


class Small(nn.Module):
    """A small program, whose changes are hard to attribute."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.inp, self.norm, self.rnn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.inp(x))
        y = functional.relu(y.float()).to(y.dtype) if self.change == "relu in float32" else functional.relu(y)
        y = self.rnn(y.flatten(2).transpose(1, 2))[0]
        out: torch.Tensor = y.sum(1) / y.shape[1] if self.change == "sum for mean" else y.mean(1)
        return out


#: Programs of one step in bfloat16: a dtype behind an op with several results; a target that is only read through
#: views; another backward with equal bits; another initialization, of which what an RNN saves for its backward depends.
SMALL = {
    "relu in float32": ("policy", "aten::relu", "", None),
    "target": ("input", "aten::mse_loss", "", None),
    "seeds": ("weight", "aten::conv2d", "inp", "inp.weight"),
    "sum for mean": ("structure", "aten::mean", "", None),
}


@pytest.mark.parametrize("change", SMALL)
def test_a_change_in_a_small_program_is_found(change: str) -> None:
    def run(change: str) -> TraceReport:
        torch.manual_seed(1 if change == "seeds" else 0)
        model = Small(change).bfloat16()
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(4, 3, 6, 6, generator=generator).bfloat16()
        target = torch.full((4, 4), 0.5 if change == "target" else 0.0, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with tp.trace(model, values=True) as report:
            functional.mse_loss(model(x), target).backward()
            optimizer.step()
        return report

    assert told(run("").diff(run(change))) == SMALL[change]


def test_the_evidence_names_what_differs() -> None:
    weight, rate = (record("").diff(record(change)).evidence[0] for change in ("weight", "lr"))
    assert weight.startswith(f"The parameter {PLACE}.up.weight has other contents (relative L2 ")
    assert "Of 16 parameters and buffers that both runs read, 1 differs." in weight
    assert "alpha -0.1 in A, -0.2 in B. At the start of step 0, lr of group 0 is 0.1 in A and 0.2 in B." in rate


def test_an_environment_variable_that_one_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for value in (None, "COMPATIBLE"):
        if value is not None:
            monkeypatch.setenv("MKL_CBWR", value)
        with tp.trace(values=True) as report:
            torch.ones(2).exp()
        reports.append(report)
    del reports[0].environment["sdpa"]  # as in a file of an earlier version
    environment = reports[0].diff(reports[1]).environment
    assert environment["MKL_CBWR"] == ("not set", "COMPATIBLE")
    assert environment["sdpa"][0] == "unknown"


UNINITIALIZED: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(64),
    "empty_like": lambda: torch.empty_like(torch.ones(64)),
    "new_empty": lambda: torch.ones(1).new_empty(64),
    "resize_": lambda: torch.empty(3).resize_(64),
    "resize_as_": lambda: torch.empty(3).resize_as_(torch.ones(64)),
}


@pytest.mark.parametrize("case", UNINITIALIZED)
def test_uninitialized_memory_is_not_compared(case: str) -> None:
    reports = []
    for deterministic in (False, True):  # fills it with NaN
        torch.use_deterministic_algorithms(deterministic)
        try:
            with tp.trace(values=True) as report:
                UNINITIALIZED[case]().fill_(1.0).exp()
        finally:
            torch.use_deterministic_algorithms(False)
        reports.append(report)
    assert reports[0].diff(reports[1]).equal


def test_what_set_puts_into_a_tensor_is_an_input() -> None:
    reports = []
    for value in (1.0, 2.0):
        storage = torch.full((64,), value).untyped_storage()
        with tp.trace(values=True) as report:
            torch.ones(3).set_(storage).exp()  # type: ignore[call-overload]
        reports.append(report)
    difference = reports[0].diff(reports[1])
    assert difference.first is not None
    assert (difference.kind, difference.first.op) == ("input", "aten::exp")
    assert (
        difference.evidence[0]
        == "aten::exp in (model) reads other contents (self) of memory that no recorded call has written."
    )


def test_a_killed_run_is_compared_up_to_its_end(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.jsonl.gz", tmp_path / "killed.jsonl.gz"
    for change in ("", "bias"):
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        nn.init.constant_(model.bias, 1.0 if change else 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tp.trace(model, record=whole):
            for step in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                if step == 0 and not change:
                    killed.write_bytes(whole.read_bytes())
        one, other = TraceReport.load(killed), TraceReport.load(whole)
        end = "ends after 1 step: its run was killed, or is still running."
        for difference, name in ((one.diff(other), "A"), (other.diff(one), "B")):
            kind, start = ("weight" if change else "structure"), f"Different from step {0 if change else 1} on: "
            assert (difference.kind, difference.only_in_a, difference.only_in_b) == (kind, [], [])
            assert difference.content().verdict.startswith(start)
            assert difference.content().verdict.endswith(f" The recording of {name} {end}")
            assert difference.to_dict()["unfinished"] == {name: 1}
            assert difference.first is not None
            assert difference.first.step == (0 if change else 1)
            assert len(difference.steps) == 1
        assert one.diff(one).equal


def test_calls_that_depend_on_the_version_of_pytorch_alone() -> None:
    """A line makes another call with equal results; if the program makes it, it is named."""

    def report(*lines: str, version: str = "2.13.0") -> TraceReport:
        program = compile("\n".join(lines), "program.py", "exec")
        with tp.trace(values=True) as report:
            exec(program, {"x": torch.ones(4), "torch": torch})
        report.environment["torch"] = version
        return report

    one = report("x.fill_(2.0)", "y = x.exp()")
    assert one.diff(report("x.fill_(torch.tensor(2.0))", "y = x.exp()", version="2.15.0")).equal
    more = one.diff(report("x.fill_(2.0)", "y = x.clone().exp()", version="2.15.0"))
    assert more.equal
    assert more.evidence == [
        "Only B calls aten::clone in (model), program.py:2. Places where the versions of PyTorch make other calls: 1."
    ]
    added = report("x.fill_(2.0)", "y = x.clone()", "y = y.exp()", version="2.15.0")
    assert one.diff(added).kind == "structure"


def test_the_page_has_all_dtypes_of_both_sides() -> None:
    [tree] = [part for part in record("").diff(record("double")).content().parts if isinstance(part, Tree)]
    [branch] = [branch for branch in tree.branches if branch.path == f"{PLACE}"]
    assert [spell(cell, "dtypes") for cell in branch.cells[1:]] == ["fp32", "fp64, fp32"]


def test_ours_equals_stock() -> None:
    assert record("", autocast=True).diff(record("", autocast=True, stock=True)).equal


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record("", tmp_path), record("weight", tmp_path)
    files = [str(tmp_path / f"{i}.jsonl.gz") for i in range(2)]
    assert main(["diff", files[0], files[0]]) == 0
    assert "Equal: the results of " in capsys.readouterr().out
    assert main(["diff", *files, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["equal"], data["kind"], data["first"]["parameter"]) == (False, "weight", f"{PLACE}.up.weight")
    assert len(data["steps"]) >= 2
    assert main(["diff", *files, "--tolerance", "1"]) == 0
    assert main(["diff", *files, "--tolerance", "1e-9"]) == 1
    assert main(["diff", files[0], str(tmp_path / "none.jsonl.gz")]) == 2
    page = tmp_path / "diff.html"
    assert main(["diff", *files, "--html", str(page)]) == 1
    assert f"{PLACE}.up.weight" in page.read_text()


def test_the_text_shows_both_sides() -> None:
    """In 80 and 100 columns: the verdict, both sides of the first call, and what else differs."""
    texts = [record("", autocast=True).diff(record("override", autocast=True)).text(width) for width in (80, 100)]
    for text, width in zip(texts, (80, 100), strict=True):
        assert max(map(len, text.splitlines())) <= width
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "First: aten::gelu in 0, forward, step 0, call 0" in lines
        assert "policy none fp32" in lines
        assert "Other dtypes, policies, casts and arguments" in lines
    assert "gelu forward policy none fp32 8 0; 3 more" in [" ".join(line.split()) for line in texts[1].splitlines()]


def test_a_call_of_one_run_alone_has_its_effect_in_the_verdict() -> None:
    for change, effect in (
        ("relu", r"After step 0 the parameters differ \(relative L2 about 0\.\d+\)"),
        ("clone", "The parameters are equal after every step"),
    ):
        verdict = record("").diff(record(change)).content().verdict
        assert re.search(rf"Only B calls aten::{change} in 2, test_difference.py:\d+\. {effect}\.$", verdict)


def run_of(program: Callable[[torch.Tensor], object]) -> TraceReport:
    with tp.trace(values=True) as report:
        program(torch.linspace(0.1, 1.0, 32))
    return report


def step_with(parameters: int, steps: int = 1) -> Callable[[torch.Tensor], object]:
    def program(x: torch.Tensor) -> None:
        weights = [nn.Parameter(torch.ones(32)) for _ in range(parameters)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for _ in range(steps):
            (x * weights[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


TOLERATED: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object], bool]] = {
    "another op at the end": (lambda x: x.exp(), lambda x: x.sin(), False),
    "another op, converted": (lambda x: x.exp().double(), lambda x: x.sin().double(), False),
    "another op, read by item()": (lambda x: x.exp()[3].item(), lambda x: x.sin()[3].item(), False),
    "an op less": (lambda x: (x + 1, x.exp()), lambda x: (x + 1,), False),
    "two ops for one": (lambda x: x.exp(), lambda x: (x.sin(), x.cos()), False),
    "integers": (lambda x: x.argmax(), lambda x: x.argmin(), False),
    "another formula": (lambda x: torch.exp(x) - 1, lambda x: torch.expm1(x), True),
    "a copy": (lambda x: x.exp(), lambda x: x.exp().clone(), True),
    "a result that is computed twice": (lambda x: x.exp(), lambda x: (x.exp(), x.exp()), True),
    "a call whose result is read": (lambda x: x.exp(), lambda x: (x * 1.0000001).exp(), True),
    "a step less": (step_with(1, 2), step_with(1, 1), False),
    "equal steps": (step_with(1, 2), step_with(1, 2), True),
}


@pytest.mark.parametrize("case", TOLERATED)
def test_what_one_run_alone_has_is_not_tolerated(case: str) -> None:
    before, after, expected = TOLERATED[case]
    one, other = run_of(before), run_of(after)
    assert one.diff(other).is_within(1e-3) is expected
    assert other.diff(one).is_within(1e-3) is expected
    assert one.diff(one).is_within(0.0)


@pytest.mark.parametrize("tolerance", [-1e-3, float("nan"), float("inf"), "1e-3", None])
def test_tolerances_that_are_none(tolerance: Any) -> None:
    with tp.trace(values=True) as report:
        torch.ones(2).exp()
    with pytest.raises(OptionError, match="`tolerance` is a finite number of 0 or more"):
        report.diff(report).is_within(tolerance)


def test_a_tolerance_needs_values() -> None:
    reports = []
    for op in (torch.exp, torch.sin):
        with tp.trace() as report:
            op(torch.ones(2))
        reports.append(report)
    with pytest.raises(OptionError, match="values=True"):
        reports[0].diff(reports[1]).is_within(0.1)


def test_other_shapes_are_named() -> None:
    def record(rows: int) -> TraceReport:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(rows, 4)
        with tp.trace(model, values=True) as report:
            model(x)
        return report

    difference = record(2).diff(record(5))
    assert difference.first is not None
    assert difference.first.a is not None
    assert difference.first.b is not None
    assert difference.first.a.shapes == "[2, 4], [3, 4], [3] -> [2, 3]"
    assert difference.first.b.shapes == "[5, 4], [3, 4], [3] -> [5, 3]"
    assert any(one.startswith("Calls with other shapes: 2 of 2.") for one in difference.evidence)
    assert "\nshapes " in str(difference)


def test_a_saved_difference(tmp_path: Path) -> None:
    difference = record("").diff(record("weight"))
    difference.save(tmp_path / "difference.json")
    data = json.loads((tmp_path / "difference.json").read_text())
    assert data == json.loads(json.dumps(difference.to_dict(), allow_nan=False))
    assert set(data) >= {"equal", "first", "kind", "facts", "arguments", "state", "steps", "only_in_a", "only_in_b"}
    assert set(data["first"]) >= {"op", "module", "phase", "call", "line", "relative_l2", "parameter"}


def test_what_a_tolerance_excuses_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"{name}.jsonl.gz") for name in ("one", "more", "other")]
    x = torch.linspace(0.1, 1.0, 32)
    with tp.trace(record=files[0]):
        x.exp()
    with tp.trace(record=files[1]):
        x.exp(), x.sin()
    with tp.trace(record=files[2]):
        x.exp2()
    for file, tolerance, status, text in (
        (files[0], "0", 0, "error, 0, is within 0."),
        (
            files[1],
            "0.5",
            1,
            "is within 0.5. 1 result, loss, gradient or parameter of one run alone has no error, so no tolerance",
        ),
        (files[2], "0.5", 0, "is within 0.5."),
        (files[2], "1e-3", 1, "is over 0.001."),
    ):
        assert main(["diff", files[0], file, "--tolerance", tolerance]) == status
        assert text in capsys.readouterr().err


MISUSE = {
    "a folder with several": (
        ["two", "two"],
        r"one recording, \*.jsonl.gz. Found: run.rank0.jsonl.gz, run.rank1.jsonl.gz. "
        r"Name one of them, or choose a rank with --rank",
    ),
    "a rank that is not there": (["two", "two", "--rank", "7"], r"\*.rank7.jsonl.gz. Found: run.rank0.jsonl.gz"),
    "another rank's file": (["two/run.rank1.jsonl.gz", "two", "--rank", "3"], r"no file 'two/run.rank3.jsonl.gz'"),
    "an empty folder": (["empty", "two"], r"Found: none. `torch-promote trace --record"),
    "no file": (["none.jsonl.gz", "two"], r"there is no file 'none.jsonl.gz'. `torch-promote trace --record"),
    "ranks, and none is chosen": (
        ["two/run.jsonl.gz", "two"],
        r"no file 'two/run.jsonl.gz'. There are files of ranks, such as run.rank0.jsonl.gz: choose one with --rank",
    ),
    "another file": (
        ["notes.txt", "two"],
        r"'notes.txt' is not a recording, \*.jsonl.gz. `torch-promote trace --record",
    ),
    "a run that was stopped early": (["stopped.jsonl.gz", "two/run.rank0.jsonl.gz"], r"'stopped.jsonl.gz' has no call"),
    "a negative tolerance": (["two", "two", "--tolerance", "-1"], r"-1 is not a relative L2 error, a number from 0 up"),
    "an infinite tolerance": (["two", "two", "--tolerance", "inf"], r"inf is not a relative L2 error"),
    "a tolerance without values": (
        ["run.jsonl.gz", "run.jsonl.gz", "--tolerance", "1"],
        r"compares contents, and a file has none",
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_of_the_command(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("two").mkdir()
    Path("notes.txt").write_text("notes")
    for name in ("two/run.rank0.jsonl.gz", "two/run.rank1.jsonl.gz"):
        with tp.trace(record=name) as report:
            torch.ones(2).exp()
    with tp.trace() as report:
        torch.ones(2).exp()
    report.save("run.jsonl.gz")
    header = gzip.decompress(Path("two/run.rank0.jsonl.gz").read_bytes()).splitlines(keepends=True)[0]
    Path("stopped.jsonl.gz").write_bytes(gzip.compress(header))
    words, message = MISUSE[case]
    status: object = None
    try:
        status = main(["diff", *words])
    except SystemExit as exit_of_argparse:
        status = exit_of_argparse.code
    assert status == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_ranks(tmp_path: Path) -> None:
    made = record("", tmp_path)
    assert made.calls
    (tmp_path / "0.jsonl.gz").rename(tmp_path / "run.rank3.jsonl.gz")
    name = str(tmp_path / "run.jsonl.gz")
    assert main(["diff", name, str(tmp_path), "--rank", "3"]) == 0
    assert main(["diff", name, str(tmp_path), "--rank", "1"]) == 2


def test_the_alignment_is_a_longest_common_subsequence() -> None:
    draw = random.Random(0)
    for _ in range(300):
        one, other = ([draw.choice("abc") for _ in range(draw.randint(0, 12))] for _ in range(2))
        pairs = align([(one, other)])
        assert all(one[i] == other[j] for i, j in pairs)
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))


def test_calls_with_equal_results_are_aligned_first() -> None:
    assert align([(["mul", "add"], ["mul", "mul", "add"])], [(["a", "b"], ["c", "a", "b"])]) == [(0, 1), (1, 2)]


def attended(backend: torch.nn.attention.SDPBackend) -> TraceReport:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 33, 16).unbind()
    with tp.trace(values=True) as report, torch.nn.attention.sdpa_kernel(backend):
        functional.scaled_dot_product_attention(q, k, v)
    return report


def test_another_kernel_of_attention_is_no_other_random_number() -> None:
    """PyTorch's tag says that the op draws some, which it does with a dropout alone."""
    backends = torch.nn.attention.SDPBackend
    difference = attended(backends.MATH).diff(attended(backends.FLASH_ATTENTION))
    assert difference.first is not None
    assert (difference.kind, difference.first.op) == ("rounding", "aten::scaled_dot_product_attention")
    assert any("_scaled_dot_product_flash_attention_for_cpu" in one for one in difference.evidence)


# --- compiled code


def record_compiled(backend: str = "", change: str = "", weight: bool = False) -> TraceReport:
    """Two training steps of a small model with layer norms, of which bias and weight have one shape."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(change)
    model = nn.Sequential(nn.LayerNorm(8), block, nn.LayerNorm(8)).eval()
    if weight:
        with torch.no_grad():
            block.up.weight.view(-1)[0] += 1e-3
    x = torch.randn(6, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    run = torch.compile(model, backend=backend) if backend else model
    with tp.trace(model, values=True) as report:
        for _ in range(2):
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def test_a_change_in_compiled_code_is_named_as_such() -> None:
    eager = record_compiled()
    difference = eager.diff(record_compiled("aot_eager", "relu"))
    assert difference.first is not None
    assert (difference.kind, difference.first.op) == ("op", "torch.compile")
    rounded = eager.diff(record_compiled("aot_eager", "formula"))
    assert (rounded.kind, rounded.equal) == ("rounding", False)
    for one, other in (
        (eager, record_compiled("aot_eager", weight=True)),
        (record_compiled("aot_eager"), record_compiled("", weight=True)),
    ):
        weight = one.diff(other)
        assert weight.first is not None
        found = weight.kind, weight.first.op, weight.first.module, weight.first.parameter
        assert found == ("weight", "aten::linear", "1.up", "1.up.weight")


def record_one_call(backend: str, change: str) -> TraceReport:
    """One call of a function whose result nothing reads."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    last = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), last, nn.GELU())
    x = torch.randn(4, 8)
    if change == "weight":
        with torch.no_grad():
            last.weight[0, 0] += 1e-3
    elif change == "input":
        x = torch.randn(4, 8)

    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scaled": model(x) * (3 if change == "op" else 2)}

    with tp.trace(model, values=True) as report:
        (torch.compile(function, backend=backend) if backend else function)(x)
    return report


@pytest.mark.parametrize("backends", [("", "aot_eager"), ("aot_eager", ""), ("aot_eager", "aot_eager"), ("eager", "")])
@pytest.mark.parametrize("change", ["", "weight", "input", "op"])
def test_the_arguments_and_the_result_of_the_call_that_compiles(backends: tuple[str, str], change: str) -> None:
    difference = record_one_call(backends[0], "").diff(record_one_call(backends[1], change))
    if torch.__version__.startswith("2.11") and change == "op" and "eager" not in backends:
        assert "What compiled functions return is unknown" in " ".join(record_one_call("aot_eager", "").not_seen)
        return
    assert difference.equal == (not change)
    if not change:
        assert difference.kind is None
    else:
        assert difference.first is not None
        op, parameter = difference.first.op, difference.first.parameter
        is_seen = "eager" in backends or ("" in backends and change != "op")
        assert difference.kind == ("arguments" if change == "op" and is_seen else change)
        named = "aten::mul" if change == "op" else "aten::linear"
        assert (op, parameter) == (named if is_seen else "torch.compile", "2.weight" if change == "weight" else None)


class Trainer:
    """Has a model, as many programs' own classes do."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gain = model, torch.tensor(2.0)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x) * self.gain
        return out


#: Functions that get at a model in other ways than a closure, a global and `self` of a module.
WAYS: dict[str, Callable[[nn.Module, Callable[..., Any]], Callable[[torch.Tensor], Any]]] = {
    "a bound method": lambda model, compiled: compiled(Trainer(model).run),
    "a method": lambda model, compiled: functools.partial(compiled(Trainer.run), Trainer(model)),
    "an argument": lambda model, compiled: functools.partial(compiled(lambda model, x: model(x) * 2), model),
    "a keyword": lambda model, compiled: functools.partial(compiled(lambda x, model: model(x) * 2), model=model),
    "a partial function": lambda model, compiled: compiled(functools.partial(lambda model, x: model(x) * 2, model)),
    "a list": lambda model, compiled: functools.partial(compiled(lambda parts, x: parts[0](x) * 2), [model]),
}


@pytest.mark.parametrize("way", WAYS)
def test_how_a_compiled_function_gets_at_a_model(way: str) -> None:
    def run(change: float) -> TraceReport:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        with torch.no_grad():
            model[2].weight[0, 0] += change
        function = WAYS[way](model, functools.partial(torch.compile, backend="aot_eager"))
        with tp.trace(model, values=True) as report:
            function(torch.ones(4, 8)).sum()
        return report

    assert told(run(0).diff(run(1e-3))) == ("weight", "torch.compile", "", "2.weight")


def test_a_compiled_call_that_raises_and_one_that_returns_keep_nothing() -> None:
    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor, *, fails: bool) -> torch.Tensor:
        y = x.exp()
        if fails:
            torch._dynamo.graph_break()
            raise KeyError("mine")
        return y

    gc.collect()
    gc.disable()
    try:
        with tp.trace(values=True) as report:
            for _ in range(2):
                with pytest.raises(KeyError, match="mine"):
                    function(torch.ones(3), fails=True)
                x = torch.ones(3)
                result = function(x, fails=False)
                references = weakref.ref(x), weakref.ref(result)
                del x, result
                assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    calls = [call for call in report.calls if call.op == "torch.compile"]
    assert [len(call.outputs) for call in calls] == [0, not torch.__version__.startswith("2.11")] * 2
    assert len({report.values_of(call)[0].digest for call in calls if call.outputs}) <= 1


@pytest.mark.slow  # a compiler runs; the everyday cases are those above
@pytest.mark.usefixtures("inductor")
def test_eager_against_inductor() -> None:
    """It uses its buffers again, without a new version, and writes the gradients of a norm one by one."""
    difference = record_compiled().diff(record_compiled("inductor"))
    assert difference.kind in (None, "rounding")


# --- steps that were asked for, and states that cannot be read


def steps_of(first: int, end: int | None, seed: int = 0) -> TraceReport:
    """The requested ones of five steps, as `torch-promote trace --steps` records them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    asked = f"{first}:{'' if end is None else end}" if first or end else ""
    tracer = Tracer(model, True, False, 50_000, None, asked)
    for step in range(5):
        if step == first:
            tracer.__enter__()
        if seed and step == 3:
            torch.manual_seed(seed)
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == (5 if end is None else end):
            tracer.__exit__(None, None, None)
            return tracer.report
    raise AssertionError


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        (((2, 4), (2, None)), " Not compared: 1 more step of B, which A was not asked to record (--steps)."),
        (((0, 5), (0, 2)), " Not compared: 3 more steps of A, which B was not asked to record (--steps)."),
        (((2, 4), (2, 4)), ""),
        (((0, None), (0, 5)), ""),
    ],
)
def test_steps_that_one_recording_was_not_asked_for(sides: Any, said: str) -> None:
    found = tp.diff(*(steps_of(*side) for side in sides))
    assert found.equal
    assert (found.unmatched, found.only_in_a, found.only_in_b) == (0, [], [])
    assert found.content().verdict.endswith(f"calls have equal bits.{said}")


def test_a_difference_in_steps_that_both_have_is_found() -> None:
    found = tp.diff(steps_of(2, 4), steps_of(2, None, seed=1))
    assert (found.kind, found.facts[0].step) == ("input", 1)


def test_the_first_step_of_a_resumed_run_may_be_another_one_of_the_whole() -> None:
    """Steps are counted in each process: the states at their start say whether they are the same."""
    found = tp.diff(steps_of(2, 4), steps_of(0, 2))
    assert (found.equal, found.kind, found.left_out) == (False, "state", {})


def test_a_state_that_neither_run_could_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(OptimizerStates, "_tensors_of", fails)
    found = tp.diff(steps_of(0, None), steps_of(0, None))
    assert (found.equal, found.unread_states) == (True, ["state of AdamW"])
    said = " In neither run could the state of AdamW be read, so it was not compared."
    assert found.content().verdict.endswith(said)
    monkeypatch.undo()
    assert tp.diff(steps_of(0, None), steps_of(0, None)).unread_states == []


# --- traces without values: the calls that differ, and their differing attributes

X = torch.ones(2, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))


def traced(net: nn.Module, batch: torch.Tensor = X, **options: Any) -> TraceReport:
    with tp.trace(net) as report, tp.my_autocast("cpu", **options):
        net(batch).sum().backward()
    return report


def test_equal_traces() -> None:
    """Another model with other tensors, at another time, with another batch size."""
    before = traced(model())
    difference = before.diff(traced(model(), torch.ones(3, 4)))
    assert difference.equal
    assert not difference
    assert difference.compared > 10
    assert difference.content().verdict.startswith("Equal: dtypes, policies, casts and other arguments. Contents were")


def test_an_override() -> None:
    difference = traced(model()).diff(traced(model(), overrides={"softmax": "fp32"}))
    assert difference
    softmax = (change for change in difference.changes if change[0] and change[0].name == "aten::softmax.int")
    found = {what: (before, after) for _, _, what, before, after in softmax}
    assert {name: value for name, value in found.items() if name != "policy_source"} == {
        "ran_with": ("bfloat16", "float32"),
        "outputs": ("bfloat16", "float32"),
        "policy": ("none", "fp32"),
        "casts": ("none", "self: bfloat16 -> float32"),
    }
    assert found["policy_source"][0] == "none"
    assert found["policy_source"][1].startswith("region at ")
    assert difference.kind == "policy"
    first = difference.first
    assert first is not None
    assert (first.op, first.overload, first.phase, first.module) == ("aten::softmax", "int", "forward", "1")
    assert difference.evidence[0].startswith(
        "aten::softmax in 1: dtypes bfloat16 -> bfloat16 in A, bfloat16 -> float32"
    )
    [table] = (one for one in difference.content().parts if one.title.startswith("Other dtypes"))
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows[:5]] == ["aten::softmax.int"] * 5, "what the override changed comes first"
    assert ("aten::softmax.int", "forward", "policy", "none", "fp32", 1, {"1": 1}) in table.rows
    inner = [row[2] for row in table.rows if row[0] == "aten::_softmax"]
    assert inner == ["inputs", "outputs"], "what the op ran with is what it got, and needs no row of its own"
    assert max(map(len, str(difference).splitlines())) <= 100
    data = difference.to_dict()
    assert data["equal"] is False
    assert [one["what"] for one in data["changes"]] == [what for _, _, what, *_ in difference.changes]


def test_casts_that_a_cache_serves() -> None:
    def twice(cache: str) -> TraceReport:
        weight = torch.nn.Parameter(torch.ones(4, 4))
        with tp.trace() as report, tp.my_autocast("cpu", cache=cache):
            for _ in range(2):
                X.mm(weight)
        return report

    before, after = twice("none"), twice("weights")
    [change] = [one for one in before.diff(after).changes if "aten::mm" in [call and call.op for call in one[:2]]]
    assert change[0] is before.calls.where(op="mm")[1]
    assert change[1] is after.calls.where(op="mm")[1]
    casts = "self: float32 -> bfloat16; mat2: float32 -> bfloat16"
    assert change[2:] == ("casts", casts, f"{casts}, reused")


def test_calls_of_one_trace_alone() -> None:
    with tp.trace() as before:
        X.exp(), X.exp(), X.sin()
    with tp.trace() as after:
        X.exp(), X.cos(), X.exp(), X.exp()
    difference = before.diff(after)
    assert difference.compared == 2
    assert (difference.only_in_a, difference.only_in_b) == ([before.calls[2]], [after.calls[1], after.calls[3]])
    assert difference.changes == [
        (before.calls[2], None, "only before", "float32 -> float32", ""),
        (None, after.calls[1], "only after", "", "float32 -> float32"),
        (None, after.calls[3], "only after", "", "float32 -> float32"),
    ]
    assert [one["op"] for one in difference.to_dict()["changes"]] == ["aten::sin", "aten::cos", "aten::exp"]


def test_a_call_that_is_inserted_shifts_no_other() -> None:
    def run(inserted: bool) -> TraceReport:
        with tp.trace() as report:
            y = X.double() * 3 if inserted else X
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                y = X.to(dtype) * 2
                y.exp()
        return report

    difference = run(False).diff(run(True))
    assert not difference.only_in_a
    assert [call.op for call in difference.only_in_b] == ["aten::mul"]


def test_what_was_not_kept_is_not_missed() -> None:
    def few(most: int) -> TraceReport:
        with tp.trace(max_calls=most) as report:
            for _ in range(5):
                X.exp()
        return report

    difference = few(2).diff(few(10))
    assert difference.equal
    assert (difference.compared, difference.dropped) == (2, 3)
    assert "3 (not stored; see max_calls)" in str(difference)


# --- what one run alone updates, and in what order


def in_steps(
    change: Callable[[nn.Sequential, int], None], last: Callable[[int], bool] = lambda step: True
) -> TraceReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model[k].parameters(), 0.1) for k in (0, 2)]
    with tp.trace(values=True) as report:
        for step in range(3):
            change(model, step)
            model(torch.ones(3, 4)).square().mean().backward()
            for optimizer in optimizers if last(step) else optimizers[:1]:
                optimizer.step()
                optimizer.zero_grad()
    return report


def test_parameters_that_one_run_alone_updates_differ() -> None:
    """They have no contents at the end of that step in the other run, which has left them as they were."""

    def freeze(model: nn.Sequential, step: int) -> None:
        model[0].requires_grad_(step < 2)

    found = in_steps(lambda *_: None).diff(in_steps(freeze))
    assert "equal after every step" not in str(found), str(found)
    first = next(one for one in found.steps if one.parameters)
    assert first.worst_parameter.startswith("0.")


def test_a_run_with_fewer_steps_is_told() -> None:
    found = in_steps(lambda *_: None).diff(in_steps(lambda *_: None, last=lambda step: step < 2))
    assert found.step_counts == (6, 5)
    assert " A has 6 steps, B 5." in found.content().verdict


def test_contents_that_something_unrecorded_has_changed() -> None:
    def run(changes: bool) -> TraceReport:
        x = torch.ones(4, 4)
        shared = x.numpy()
        with tp.trace(values=True) as report:
            x.add_(1.0)
            if changes:
                shared[:] = 5.0
            x.mul(2.0)
        return report

    found = run(False).diff(run(True))
    assert not found.equal
    assert "other elements" not in str(found), str(found)


def test_a_detach_that_one_run_lacks_is_named_where_the_backward_goes_on() -> None:
    def run(detaches: bool) -> TraceReport:
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        with tp.trace(values=True) as report:
            fake = generator(torch.ones(2, 4))
            critic(fake.detach() if detaches else fake).mean().backward()
        return report

    text = " ".join(str(run(True).diff(run(False))).split())
    assert "Only A calls aten::detach in " in text, text
