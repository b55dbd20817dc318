"""`torch-promote trace` and `find-nan`: the program runs as under `run`, its reports are in the files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.autoloading import entry_point, folder
from helpers.command_line import Capture, error_of, terminal_of_80_columns, text_of
from helpers.traced_commands import TRAINING, command_run, line_of, warm
from torch_promote.cli.program import main
from torch_promote.cli.user_program import Outcome, report_each
from torch_promote.numerics.find_nonfinite import NonfiniteReport
from torch_promote.numerics.traced_process import Record
from torch_promote.observe.call import Call, Unseen
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.file import SUFFIX

RECORD = f"run{SUFFIX}"

__all__ = ["entry_point", "folder", "terminal_of_80_columns", "warm"]  # fixtures

#: Before step 2: the logarithm of a negative number.
NAN = "step == 2 and torch.log(torch.ones(2) - step)"


@pytest.fixture
def script(folder: Path, warm: None) -> Path:
    (folder / "train.py").write_text(TRAINING)
    return folder


def steps_in(report: TraceReport) -> int:
    """The number of steps, by the calls of an op that is called once in each."""
    return len(report.calls.where(op="softmax"))


# The program and its files


def test_the_program_and_the_files(script: Path, capfd: Capture) -> None:
    files = ["--json", "run.json", "--html", "run.html", "--record", RECORD]
    status, out, err = command_run(capfd, "trace", *files, "train.py", "2")
    assert (status, out) == (0, "ended\n")
    report = tp.load(script / RECORD)
    assert report.steps == steps_in(report) == 2
    assert {call.policy_source for call in report.calls.where(op="linear")} == {"PyTorch's table"}
    assert report.calls.where(op="softmax")[0].line == f"train.py:{line_of('loss = ')}"
    assert set(str(report).split()) <= set(err.split())
    assert f"torch-promote: recorded {RECORD}\n" in err
    assert err.endswith("torch-promote: wrote run.html, run.json\n")
    assert (script / "run.html").read_text().startswith("<!")
    assert len(json.loads((script / "run.json").read_text())["calls"]) == len(report.calls)


def test_the_options_of_regions(script: Path, capfd: Capture) -> None:
    overrides = ["--override", "linear=fp32", "--override", "exp=fp32"]
    status, _, err = command_run(capfd, "trace", "--record", RECORD, *overrides, "train.py", "1")
    assert status == 0
    [call, _] = tp.load(script / RECORD).calls.where(op="linear")
    assert (call.policy, call.policy_source) == (CastPolicy.fp32, f"install, region at train.py:{line_of('autocast')}")
    assert ["exp", "fp32", "cpu,", "cuda,", "xpu,", "mps", "install", "none"] in [
        line.split() for line in err.splitlines()
    ]


def test_stock_values_and_max_calls(script: Path, capfd: Capture) -> None:
    asks = "import torch_promote; print(torch_promote.installed())"
    options = ("--stock", "--values", "--max-calls=20", "--json", "run.json")
    assert command_run(capfd, "trace", *options, "train.py", "1", asks)[:2] == (0, "None\nended\n")
    data = json.loads((script / "run.json").read_text())
    assert len(data["calls"]) == 20
    assert data["dropped"] == data["totals"]["calls"] - 20 > 0
    assert any(data["values"].values())
    assert next(call for call in data["calls"] if call["op"] == "aten::linear")["policy_source"] == "PyTorch's table"


def test_losses_that_are_nan(script: Path, capfd: Capture) -> None:
    code = "if step == 2: torch.nn.init.constant_(model[2].bias, float('nan'))"
    status, _, err = command_run(capfd, "trace", "--record", RECORD, "train.py", "4", code)
    assert status == 0
    what = "2 of 4 losses are NaN, from step 2"
    _, title, verdict = err.splitlines()[:3]
    assert title.endswith(what)
    assert verdict.startswith(f"{what}. The first inf or NaN: aten::fill_.Scalar, forward, (model), ")
    status, out, _ = command_run(capfd, "trace", "--read", RECORD, "(model)")
    assert status == 0
    assert what in " ".join(out.split())


@pytest.mark.parametrize(("steps", "count", "between"), [("1:3", 2, 2), ("3:", 1, 2), ("2", 1, 1)])
def test_steps(script: Path, capfd: Capture, steps: str, count: int, between: int) -> None:
    """A step is what runs after the one before, up to the end of its optimizer's step.

    PyTorch calls the hooks of optimizers one after the other. A trace begins and ends among the program's own.
    """
    hook = "from torch.optim import optimizer as o; o.register_optimizer_step_post_hook(lambda *args: None)"
    found = command_run(capfd, "trace", "--steps", steps, "--record", RECORD, "train.py", "4", hook)
    assert found[:2] == (0, "ended\n")
    report = tp.load(script / RECORD)
    assert report.steps == steps_in(report) == count
    assert len(report.calls.where(op="sign")) == between
    assert len(report.calls.where(op="sub_")) == 4 * count


def test_find_nan_of_an_origin(script: Path, capfd: Capture) -> None:
    """The error comes from the line, and the report is written. A worker does not report what its parent found."""
    worker = "m.get_context('fork').Process(target=torch.ones, args=(2,))"
    code = f"{NAN}; import multiprocessing as m; worker = {worker}; worker.start(); worker.join()"
    status, out, err = command_run(capfd, "find-nan", "--json", "nan.json", "train.py", "4", code)
    assert (status, out) == (1, "ended\n")
    assert "aten::log" in err
    assert [file.name for file in script.glob("nan*")] == ["nan.json"]
    origin = json.loads((script / "nan.json").read_text())["origin"]
    assert (origin["op"], origin["kind"], origin["phase"]) == ("aten::log", "mathematics", "forward")
    status, _, err = command_run(capfd, "find-nan", "--raise-at-first", "train.py", "4", NAN)
    assert status == 1
    assert "Traceback" in err
    assert "NonfiniteError" in err
    clean = ("find-nan", "--steps", ":2", "--json", "clean.json", "train.py", "4", NAN)
    assert command_run(capfd, *clean)[:2] == (0, "ended\n")
    assert json.loads((script / "clean.json").read_text())["origin"] is None


def test_find_nan_names_the_override_to_try(script: Path, capfd: Capture) -> None:
    arguments = "(torch.full((2, 2), 300.0).half(), torch.full((2, 2), 300.0).half())"
    code = f"step == 1 and torch.autocast('cpu', torch.float16)(torch.mm){arguments}"
    status, _, err = command_run(capfd, "find-nan", "train.py", "2", code)
    assert status == 1
    cure = "to see whether it cures it:\n  torch-promote find-nan"
    assert f"{cure} --override mm.default=fp32 train.py 2 " in err
    outside = command_run(capfd, "find-nan", "train.py", "2", f"step == 1 and torch.mm{arguments}")
    assert (outside[0], cure in outside[2]) == (1, False)  # no region, in which an override would act
    assert cure not in command_run(capfd, "find-nan", "--override=exp=fp32,mm=fp16", "train.py", "2", code)[2]


def test_find_nan_prefers_the_module_and_tells_of_skipped_steps(script: Path, capfd: Capture) -> None:
    in_half = "torch.nn.init.constant_(model[0].weight, 3e4)\nwith torch.autocast('cpu', torch.float16)"
    overflow = f"{in_half}: model(torch.ones(2, 4))"
    status, _, err = command_run(capfd, "find-nan", "train.py", "2", overflow)
    assert status == 1
    cures = [
        'tp.set_module_policy(model, {"0": {"linear": "fp32"}})',
        'tp.my_autocast(..., overrides={"linear": "fp32"})',
    ]
    assert "To try, the narrowest first\n  " + "\n  ".join(cures) in err
    assert " --override linear=fp32 train.py 2 " in err
    scaled = (
        "s = torch.amp.GradScaler('cpu', init_scale=2.0**100); o = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "for _ in range(3):\n"
        "    with torch.autocast('cpu', torch.float16): y = model(torch.ones(2, 4)).float().mean()\n"
        "    s.scale(y).backward(); s.step(o); s.update(); o.zero_grad()\n"
        "raise SystemExit"
    )
    status, _, err = command_run(capfd, "find-nan", "--json", "nan.json", "train.py", "1", scaled)
    assert status == 1
    assert "\nGradScaler skipped all 3 steps, which changed no weight; otherwise no inf or NaN" in err
    assert "GradScaler(init_scale=" in err
    data = json.loads((script / "nan.json").read_text())
    assert (data["scaler"]["skipped"], data["origin"]) == (3, None)


MOVED = """\
import torch
x = torch.zeros(2).half().requires_grad_()
with torch.autocast("cpu", torch.float16):
    y = (torch.nn.Linear(2, 2, bias=False)(x).relu() / x.clamp(1e-16)).sum()
y.backward()
"""


def test_find_nan_points_to_fix_where_a_cure_moves_the_origin(script: Path, capfd: Capture) -> None:
    (script / "moved.py").write_text(MOVED)
    _, _, err = command_run(capfd, "find-nan", "moved.py")
    assert err.endswith("if there is one:\n  torch-promote find-nan --fix mine.toml moved.py\n")
    _, _, err = command_run(capfd, "find-nan", "--override", "clamp.default=fp32", "moved.py")
    assert "backward, step 0" in err
    status, _, err = command_run(capfd, "find-nan", "--fix", "mine.toml", "moved.py")
    assert status == 0, err
    assert len(tp.Policy.load(script / "mine.toml").changes) > 1


FIXED = """\
import torch
x = torch.zeros(2)
with torch.autocast("cpu", torch.float16):
    y = torch.nn.Linear(2, 2, bias=False)(x)
    z = y / (y + 1e-8)
print("finite" if z.isfinite().all() else "not finite")
"""


def test_find_nan_tries_the_cures_and_writes_the_policy(script: Path, capfd: Capture) -> None:
    (script / "fixed.py").write_text(FIXED)
    status, out, err = command_run(capfd, "find-nan", "--fix", "mine.toml", "--html", "nan.html", "fixed.py")
    assert (status, out) == (0, "not finite\nfinite\n")
    assert "torch-promote: runs it again with --override add.Tensor=fp32\n" in err
    assert err.endswith("torch-promote: to use it:\n  torch-promote run --policy mine.toml fixed.py\n")
    assert tp.Policy.load(script / "mine.toml") == tp.Policy.stock().override({"add.Tensor": "fp32"})
    assert command_run(capfd, "run", "--policy", "mine.toml", "fixed.py")[1] == "finite\n"
    assert "torch-promote: wrote mine.toml." in err
    status, _, err = command_run(capfd, "find-nan", "--fix", "fixed.py")
    assert status == 0
    assert "torch-promote: replaced mine.toml." in err
    _, _, err = command_run(capfd, "find-nan", "--override=add.Tensor=fp32", "fixed.py")
    assert err.endswith("torch-promote: to use it:\n  torch-promote run --override add.Tensor=fp32 fixed.py\n")
    assert "no inf or NaN" in (script / "nan.html").read_text()

    _, _, err = command_run(
        capfd, "find-nan", "--override=clamp.default=fp32", "fixed.py", "--fix", "--lr", "1", "--override", "x=y", "z"
    )
    assert err.endswith("\n  torch-promote find-nan --fix mine.toml fixed.py --lr 1 z\n")
    (script / "none.py").write_text("import torch\ntorch.ones(2, 2) @ torch.ones(2, 2)\n")
    _, _, err = command_run(capfd, "find-nan", "--override=mm=fp32", "none.py")
    assert "the override mm=fp32 never acted." in err
    assert "to use it" not in err

    (script / "hopeless.py").write_text("import torch\ntorch.zeros(2).log() * 0\n")
    status, _, err = command_run(capfd, "find-nan", "--fix", "other.toml", "hopeless.py")
    assert status == 1
    assert "other.toml is not written: the report names no override to try.\n" in err
    assert not (script / "other.toml").exists()


SILENCED = """\
import torch
w = torch.full((1, 2), 0.5 - 2**-14, requires_grad=True)
with torch.autocast("cpu", torch.float16):
    angle = {0}.minimum(torch.tensor(0.9999999)).acos().sum()
optimizer = torch.optim.SGD([w], 1e-3)
angle.backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("argument", "cure"),
    [("torch.nn.functional.linear(torch.ones(1, 2), w)", "linear"), ("(2 * w).half()", None)],
)
def test_find_nan_takes_no_cure_that_leaves_no_gradient(
    script: Path, capfd: Capture, argument: str, cure: str | None
) -> None:
    """In float32, minimum passes no gradient on for a cosine of 1, which float16 has made of a smaller one."""
    (script / "silenced.py").write_text(SILENCED.format(argument))
    status, _, err = command_run(capfd, "find-nan", "--fix", "mine.toml", "silenced.py")
    assert "with --override minimum=fp32, the gradients of 1 of 1 parameters are all 0 from step 0 on.\n" in err
    assert status == (cure is None)
    if cure is None:
        assert "mine.toml is not written: no gradient is left. Tried: --override minimum=fp32\n" in err
    else:
        assert tp.Policy.load(script / "mine.toml") == tp.Policy.stock().override({cure: "fp32"})


def test_find_nan_says_what_cures_the_error_that_ends_a_program(script: Path, capfd: Capture) -> None:
    program = "import torch\ntorch.mm(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2), out=torch.ones(2, 2))\n"
    (script / "out.py").write_text(program)
    status, _, err = command_run(capfd, "find-nan", "out.py")
    assert status == 1
    assert "out.py:2" in err
    assert "Calls with out= have no gradient." in err
    assert "no inf or NaN" in err


# How it ends


def test_what_there_is_is_kept(script: Path, capfd: Capture) -> None:
    arguments = ("trace", "--record", RECORD, "train.py", "5", "if step == 2: raise KeyboardInterrupt")
    status, out, err = command_run(capfd, *arguments)
    assert (status, out, "Traceback" in err) == (130, "", True)
    assert steps_in(tp.load(script / RECORD)) == 2


@pytest.mark.parametrize("options", [[], ["--fix", "mine.toml"]], ids=len)
def test_find_nan_of_a_program_that_ctrl_c_ends(script: Path, capfd: Capture, options: list[str]) -> None:
    """It says what to type next, and runs nothing again."""
    mm = "torch.autocast('cpu', torch.float16)(torch.mm)(torch.ones(2, 2) * 300, torch.ones(2, 2) * 300)"
    (script / "stopped.py").write_text(f"import torch\n{mm}\nraise KeyboardInterrupt\n")
    status, _, err = command_run(capfd, "find-nan", *options, "stopped.py")
    lines = err.splitlines()[-3 - len(options[1:]) :]
    assert status == 130
    assert lines.pop(0) == "  torch-promote find-nan --override mm.default=fp32 stopped.py"
    assert lines.pop(0).endswith("if there is one:")
    assert lines.pop(0) == "  torch-promote find-nan --fix mine.toml stopped.py"
    assert lines == ["torch-promote: mine.toml is not written: SIGINT ended the program."][: len(lines)]
    assert len(lines) == len(options[1:])
    assert not (script / "mine.toml").exists()


#: Finds a NaN and waits for a signal, which it may handle itself.
WAITS = """
import os, signal, sys, time, torch
if sys.argv[1:] == ["own"]:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
torch.zeros(2).log() * 0
print(flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("number", "arguments", "status"),
    [
        (signal.SIGINT, [], -signal.SIGINT),
        pytest.param(signal.SIGTERM, [], -signal.SIGTERM, marks=pytest.mark.slow),  # whose default no tool replaces
        pytest.param(signal.SIGTERM, ["own"], 3, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_keeps_the_report(script: Path, number: int, arguments: list[str], status: int) -> None:
    """Also one that reaches the program twice, from its group and from the command, as that of `timeout` does."""
    (script / "waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "torch_promote", "find-nan", "waits.py", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == status
    kept = number == signal.SIGINT
    assert ("aten::log" in err, "left no report" in err) == (kept, not kept), err
    assert ("SIGTERM ended it" in err) == (status == -signal.SIGTERM)
    assert "Exception ignored" not in err


def test_a_second_ctrl_c_leaves_the_report(script: Path, capfd: Capture) -> None:
    program = """
        import os, signal, torch
        from torch_promote.numerics import traced_process
        plain = traced_process.encode
        traced_process.encode = lambda record: (os.kill(os.getpid(), signal.SIGINT), plain(record))[1]
        torch.zeros(2).log() * 0
        raise KeyboardInterrupt
    """
    (script / "twice.py").write_text(textwrap.dedent(program))
    status, _, err = command_run(capfd, "find-nan", "twice.py")
    assert (status, "aten::log" in err, "Exception ignored" in err) == (130, True, False), err


def test_an_origin_is_told_while_the_program_runs_and_a_signal_leaves_the_report(script: Path, capfd: Capture) -> None:
    program = """
        import os, signal, torch
        from torch_promote.numerics import traced_process
        traced_process._SECONDS = -1
        weight = torch.ones(2, 2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = torch.mm(weight * 300, weight * 300).sum()
            loss.backward()
            optimizer.step()
        os.kill(os.getpid(), signal.SIGTERM)
    """
    (script / "killed.py").write_text(textwrap.dedent(program))
    status, _, err = command_run(capfd, "find-nan", "killed.py")
    told, *report = err.splitlines()
    assert told.startswith("torch-promote: overflow in the op: aten::mm in (model), killed.py:9, step 0. No more calls")
    assert err.count("No more calls") == 1
    assert (status, report[1]) == (128 + signal.SIGTERM, "overflow in the op: aten::mm in (model), killed.py:9"), err


def test_a_forked_process_without_a_report(script: Path, capfd: Capture) -> None:
    fork = "step == 0 and (os.fork() or os._exit(0)); step or os.wait()"
    _, _, err = command_run(capfd, "find-nan", "train.py", "1", f"import os; {fork}")
    assert err.endswith("torch-promote: forked processes that left no report (os._exit, a signal, exec): 1.\n")


def test_a_program_without_a_report(script: Path, capfd: Capture) -> None:
    end = "import os; print('lost', flush=True); os._exit(int(sys.argv[3]))"
    found = command_run(capfd, "trace", "--json", "run.json", "train.py", "1", end, "0")
    assert found[:2] == (1, "lost\n")
    assert found[2].startswith("torch-promote: the program left no report: it did not import torch, or it ended")
    assert not (script / "run.json").exists()


def test_steps_that_did_not_come(script: Path, capfd: Capture) -> None:
    status, _, err = command_run(capfd, "trace", "--steps", "5:", "--json", "run.json", "train.py", "2")
    assert status == 1
    assert err == (
        "torch-promote: the program ended before step 5. Optimizer steps: 2; a step that GradScaler skips does not "
        "count.\n"
    )


# Several processes


def test_processes_of_the_program(script: Path, capfd: Capture) -> None:
    """Ranks have files of their own, and so has a process that trains; a worker that loads data has none."""
    (script / "launch.py").write_text(
        "import multiprocessing, os, sys, torch, runpy\n"
        "def load():\n"
        "    torch.ones(2).exp()\n"
        "def train(rank=None):\n"
        "    if rank is not None:\n"
        "        os.environ.update(RANK=str(rank), WORLD_SIZE='2')\n"
        "        worker = multiprocessing.get_context('fork').Process(target=load)\n"
        "        worker.start(); worker.join()\n"
        "    with torch.autocast('cpu'):\n"
        "        torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "if __name__ == '__main__':\n"
        "    torch.ones(3).exp()\n"
        "    for arguments in ((0,), (1,), ()):\n"
        "        one = multiprocessing.get_context('fork').Process(target=train, args=arguments)\n"
        "        one.start(); one.join()\n"
    )
    status, _, err = command_run(capfd, "trace", "--record", RECORD, "--html", "run.html", "launch.py")
    assert status == 0
    names = sorted(re.sub("pid[0-9]+", "pid", file.name) for file in script.glob("run.*"))
    tags = ("pid", "rank0", "rank1")
    recorded = [RECORD, *(f"run.{tag}{SUFFIX}" for tag in tags[1:])]  # the worker's is gone with the command
    assert names == sorted([*recorded, *(f"run.{tag}.html" for tag in tags)])
    assert re.findall("^torch-promote: (rank0|rank1|pid)", err, re.M) == ["rank0", "rank1", "pid"]
    assert "Calls of other processes, such as workers that load data: " in " ".join(err.split())
    report = tp.load(script / f"run.rank1{SUFFIX}")
    assert {call.op for call in report.calls.where(policy="lower_precision_fp")} == {"aten::matmul"}
    assert not report.calls.where(op="exp")  # neither the parent's, nor the worker's


def traced(process: int, parent: int, rank: int | None, casts: bool) -> Record:
    report = TraceReport(10)
    policy = CastPolicy.fp32 if casts else None
    report.add(Call("aten::exp", "", "", "forward", "", (), (), (), (), policy, "", False, 1))
    return Record(process, parent, rank, report=report)


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([traced(1, 0, None, False)], {"": 1}),
        ([traced(1, 0, 3, True)], {"rank3": 1}),  # the command is started by torchrun
        ([traced(1, 0, None, True), traced(2, 1, None, True)], {"": 1, "pid2": 2}),
        ([traced(1, 0, None, False), traced(2, 1, 0, True), traced(3, 1, 1, True)], {"rank0": 2, "rank1": 3}),
        ([traced(1, 0, 1, True), traced(2, 1, 1, True)], {"rank1": 1, "rank1.pid2": 2}),
        ([traced(2, 9, 1, True), traced(3, 9, 1, True)], {"rank1": 2, "rank1.pid3": 3}),  # it was started again
        ([traced(1, 0, None, False), traced(7, 5, None, True)], {"pid7": 7}),
    ],
)
def test_names_of_processes(records: list[Record], expected: dict[str, int]) -> None:
    found = Outcome(0, 1, {one.process: one for one in records}).named()
    assert {tag: one.process for tag, one in found.items()} == expected


# Reports of programs that did not run

HERE = Namespace(is_process=False)


def nonfinite(process: int, found: bool | None, rank: int | None = None) -> Record:
    report = NonfiniteReport()
    report.not_seen = [Unseen("unknown", 0, f"text {process}")]
    return Record(process, 0, rank, steps=3, found=found, report=report)


def test_ranks_of_find_nan(capfd: Capture, folder: Path) -> None:
    """An origin on any rank counts. A worker without one is not reported."""
    records = [nonfinite(1, False), nonfinite(2, False, 0), nonfinite(3, True, 1), nonfinite(4, False)]
    by_process = {one.process: one for one in records}
    assert report_each(HERE, Outcome(-2, 1, by_process), {".json": None}) == -2
    capfd.readouterr()
    assert report_each(HERE, Outcome(0, 1, by_process), {".json": "nan.json"}) == 1
    err = re.sub(r".*wrote.*\n", "", capfd.readouterr().err)
    assert re.findall("torch-promote: .*|text .", err) == [
        "torch-promote: rank0",
        "text 2",
        "torch-promote: rank1",
        "text 3",
    ]
    assert json.loads((folder / "nan.rank1.json").read_text())["not_seen"][0]["text"] == "text 3"


def test_a_file_of_a_trace_that_cannot_be_written(capfd: Capture, folder: Path) -> None:
    """It is an error of the command at the end, and the report's other files are there."""
    (folder / "run.rank0.json").mkdir()
    files = {".json": "run.json", ".html": "run.html"}
    assert report_each(HERE, Outcome(0, 1, {1: traced(1, 0, 0, True)}), files) == 1
    assert "it is a folder. Name a file in it.\ntorch-promote: wrote run.rank0.html\n" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["trace", "compare", "tune --tolerance 1"])
def test_a_page_needs_jinja2(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    (folder / "x.py").write_text("open('ran', 'w')")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "torch_promote.report.page", raising=False)
    target = "x.py" if command == "trace" else "x.py:make"
    assert "jinja2" in error_of(capsys, *command.split(), "--html", "a.html", target)
    assert not (folder / "ran").exists()


# --read


def test_read_prints_what_the_report_says(folder: Path, capsys: Capture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    with tp.trace(model) as report, tp.my_autocast("cpu"):
        model(torch.ones(2, 4))
    report.save(RECORD)
    report = tp.load(RECORD)
    for pattern in ("0", "softmax", "aten::linear", "test_cli_trace.py"):
        explanation = report.explain(pattern)
        assert text_of(capsys, "trace", "--read", RECORD, pattern) == f"{explanation.text(None)}\n"
    assert main(["trace", "--read", RECORD, "--json", "run.json"]) == 0
    assert capsys.readouterr() == (f"{report.text(None)}\n", "torch-promote: wrote run.json\n")
    report.save("expected.json")
    assert Path("run.json").read_text() == Path("expected.json").read_text()
    for arguments, message in (
        ((RECORD, "sofmax"), "no module, op or line of this trace is 'sofmax'. Closest: softmax"),
        ((RECORD, ""), "explain what? Got ''. Legal: a module's path"),
        (
            (RECORD, "--steps", "3:5"),
            "it runs no program. Got --steps. Legal before the pattern: --html, --json",
        ),
        ((RECORD, "--cache=all", "--values", "0"), "Got --cache, --values."),
        ((RECORD, "--model", "Net"), "Got --model."),
        ((RECORD, "0", "--html", "run.html"), "Got --html behind the pattern. Legal before the pattern: --html"),
    ):
        assert message in error_of(capsys, "trace", "--read", *arguments)
