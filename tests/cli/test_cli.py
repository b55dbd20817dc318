"""The command `torch-promote`: help, imports, exit statuses, output streams, `info` and `why`."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.autoloading import entry_point, folder
from helpers.command_line import Capture, cells_of, error_of, json_of, terminal_of_80_columns, text_of, wide
from helpers.op_registrations import STRANGE_ROWS
from helpers.program_defaults import as_it_was
from helpers.subprocesses import environment, run_module, run_python
from torch_promote import _C
from torch_promote.cli import output, program
from torch_promote.cli.program import COMMANDS, main, make_parser, parse_arguments
from torch_promote.cli.why import EXAMPLES, RULES
from torch_promote.policy import op_table as registrations
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, missing_rows, op_table, unlisted_ops
from torch_promote.regions.float8 import what_lacks

__all__ = ["as_it_was", "entry_point", "folder", "terminal_of_80_columns", "wide"]  # fixtures


# Help


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"torch-promote {tp.__version__} (torch {torch.__version__})\n"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, capsys: Capture) -> None:
    """It explains each option, fits into 80 columns, and its examples are valid command lines."""
    with pytest.raises(SystemExit) as caught:
        main([*([command] if command else []), "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert [line for line in text.splitlines() if len(line) > 80] == []
    parser = make_parser(command)
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
    examples = [line.strip() for line in text.splitlines() if line.startswith("  torch-promote ")]
    for example in examples:
        _, *words = shlex.split(example.partition("  ")[0].partition(" > ")[0])
        assert callable(parse_arguments(words).run)
    if not command:
        assert all(re.search(rf"^    {name} +{re.escape(summary)}$", text, re.M) for name, summary in COMMANDS.items())


# Imports


def modules_after(*arguments: str) -> set[str]:
    """The modules of a process that has run a command."""
    code = f"""
import sys, contextlib, io
from torch_promote.cli.program import main
with contextlib.redirect_stdout(io.StringIO()):
    main({list(arguments)})
print(*sys.modules)
"""
    return set(run_python(code, env=environment()).stdout.split())


def test_a_command_imports_no_other_command() -> None:
    loaded = modules_after("why", "bf16[2,3]+f4[3]")
    own = {name for name in loaded if name.startswith("torch_promote")}
    assert len(own) <= 120
    commands = {f"torch_promote.cli.{name.replace('-', '_')}" for name in COMMANDS}
    assert own & commands == {"torch_promote.cli.why"}
    assert not any(name.startswith(("torch_promote.numerics", "torch_promote.reading.trace")) for name in own)


#: Command lines that are answered in the time that Python takes to start: PyTorch takes more than a second.
WITHOUT_PYTORCH = [
    *("--help", "--version", "rum x.py", "--verison", "run gone.py", "trace --read gone.jsonl.gz", "tune gone.py:make"),
    "run --policy gone.toml x.py",
    *("diff a.jsonl.gz b.jsonl.gz", "compare gone.py:make", "find-nan -m gone", "parity --merge gone.json", "why"),
    *(f"{command} --help" for command in COMMANDS),
]


@pytest.mark.parametrize("start", ["-c", "-m"])
def test_help_and_errors_of_the_command_line_import_no_pytorch(start: str, tmp_path: Path) -> None:
    code = f"""
import sys, _torch_promote_hooks as hooks
for line in {WITHOUT_PYTORCH}:
    sys.argv[:] = ["torch-promote", *line.split()]
    try:
        status = hooks.main()
    except SystemExit as error:
        status = error.code
    assert status == (0 if "--help" in line or line == "--version" else 2), line
    assert not {{"torch", "rich", "torch_promote.loader"}} & sys.modules.keys(), line
"""
    module = ["-X", "importtime", "-m", "torch_promote", "run", "gone.py"]
    command = [sys.executable, *(module if start == "-m" else [start, code])]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (2 if start == "-m" else 0), done.stderr
    assert not re.search(r"[|] +torch$", done.stderr, re.M)


def test_what_the_command_knows_without_pytorch() -> None:
    assert tp.reference.RULE_NAMES == RULES


def test_importing_the_package_imports_no_rich() -> None:
    done = run_python("import sys, torch_promote; print('rich' in sys.modules)", env=environment())
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


# Exit statuses and errors


#: Command lines that cannot be carried out, and a part of the message. "{folder}" is the working directory.
WRONG = [
    ("", "name a COMMAND. Legal: run, trace, find-nan, diff, compare,"),
    ("polices", "'polices' is not a command. Closest: policies. Legal: run, trace,"),
    ("rum x.py", "'rum' is not a command. Closest: run. Legal: run, trace,"),
    ("trce x.py", "Closest: trace."),
    ("find_nan x.py", "Closest: find-nan."),
    ("--verison", "unrecognized arguments: --verison. Closest: --version."),
    ("x.py --lr 1", "'x.py' is not a command. To run a program, write `torch-promote run x.py --lr 1`."),
    ("explain run.html", "`torch-promote trace --read F.jsonl.gz PATTERN` explains a module, an op or a line"),
    ("help run", "Write `torch-promote --help`, or `torch-promote COMMAND --help`."),
    ("version", "Write `torch-promote --version`."),
    ("nan x.py", "'nan' is not a command. `torch-promote find-nan train.py` finds where a NaN begins."),
    ("crosscheck x.py", "Write `torch-promote run --crosscheck train.py`."),
    ("monitor logs", "Write `torch-promote run --monitor logs train.py`."),
    ("record x.py", "Write `torch-promote trace --record F.jsonl.gz train.py`."),
    ("--policy cuda run x.py", "unrecognized arguments: --policy. Commands with this option: run, trace, find-nan, "),
    ("run --version", "Write `torch-promote --version`."),
    ("info x", "unrecognized arguments: x. This command takes options alone."),
    ("build --torch 2.14", "--torch. It compiles for the PyTorch that is installed beside it: install the other"),
    ("build --forse", "Closest: --force."),
    # run, trace, find-nan
    ("run --overide softmax=fp32 x.py", "unrecognized arguments: --overide. Closest: --override."),
    ("run --html run.html x.py", "unrecognized arguments: --html. Commands with this option: trace, "),
    ("run --crosscheck bits x.py", "there is no file 'bits' to run. To check bits, write --crosscheck=bits."),
    ("run python x.py", "there is no file 'python' to run. Leave python out."),
    ("run https://y/x.py", "there is no file 'https://y/x.py' to run.\n"),
    ("run --cache on x.py", "got 'on'. Legal: 'weights', 'persistent', 'all', 'none'."),
    (
        "find-nan x.py:make",
        "Name the file alone, x.py, which runs as a program. `compare` and `tune` call a",
    ),
    ("trace text.jsonl.gz", "is a recording, not a program. To see it: `torch-promote trace --read text.jsonl.gz`."),
    ("trace --steps 5 10 x.py", "there is no file '10' to run."),
    ("run xx.py", "there is no file 'xx.py' to run. Closest: x.py. For a module, write -m xx."),
    ("run --override softmax= x.py", "'softmax=' is not an override. Write OP=POLICY, as in softmax=fp32."),
    ("trace --value x.py", "Closest: --values."),
    ("trace --read texts.jsonl.gz", "there is no recording 'texts.jsonl.gz'. Closest: text.jsonl.gz."),
    ("trace --read x.py", "cannot read the recording 'x.py': its name does not end in .jsonl.gz."),
    ("find-nan --raise x.py", "Closest: --raise-at-first."),
    ("diff text.jsonl.gz", "required: B."),
    ("diff text.jsonl.gz text.jsonl.gz text.jsonl.gz", "This command takes A and B."),
    ("diff --tolerance text.jsonl.gz text.jsonl.gz", "text.jsonl.gz is not a relative L2 error, a number from 0 up."),
    ("compare text.jsonl.gz text.jsonl.gz", "`torch-promote diff A B` compares recordings, and"),
    ("diff texts.jsonl.gz text.jsonl.gz", "there is no file 'texts.jsonl.gz'. Closest: text.jsonl.gz."),
    ("diff text.json text.json", "'text.json' is not a recording, *.jsonl.gz."),
    ("run", "run what? Name a script, -m MODULE, -c CODE or -. See `torch-promote run --help`."),
    ("run --crosscheck=bit x.py", "invalid choice: 'bit'"),
    ("run --pol cuda x.py", "unrecognized arguments: --pol"),
    ("run -m", "-m needs a module after it."),
    ("run -m x.py", "-m takes the name of a module, and x.py is a file. Leave -m out, or leave .py out."),
    ("run -mno_such.module", "there is no module to run: -m no_such.module."),
    (
        "run --policy x.py",
        "taken as the value of --policy. Write it before the program: --policy NAME|F.toml x.py.",
    ),
    (
        "run --monitor x.py --lr 1",
        "taken as the value of --monitor. Write it before the program: --monitor DIR x.py.",
    ),
    ("trace --override x.py", "value of --override. Write it before the program: --override OP=POLICY x.py."),
    ("run --monitor locked/logs x.py", "--monitor locked/logs: it cannot be written (permission denied: 'locked')."),
    ("run shadowed/x.py", "without torch_promote: {folder}/shadowed/torch_promote.py has its name, and comes first on"),
    ("run gone.py --policy", "there is no file 'gone.py' to run. For a module, write -m gone."),
    ("run empty", "the folder 'empty' has no __main__.py. Name a file in it."),
    ("run -m no_such.module", "there is no module to run: -m no_such.module. Python looks in '{folder}' and in"),
    ("run --policy cudda x.py", "--policy cudda: no policy is called 'cudda'. Closest: cuda."),
    ("run --policy gone.toml x.py", "--policy gone.toml: "),
    ("run --cache al x.py", "got 'al'. Legal: 'weights', 'persistent', 'all', 'none'. Closest: all."),
    ("run --override softmax x.py", "'softmax' is not an override. Write OP=POLICY, as in softmax=fp32."),
    ("run --override sofmax=fp32 x.py", "no op is called 'sofmax'. Closest: softmax"),
    ("run --override mm=fp32,mm=fp16 x.py", "'mm' has two policies, 'fp32' and 'fp16'. Name each op once."),
    ("run --override mm=fp32 --override mm=fp16 x.py", "'mm' has two policies, 'fp32' and 'fp16'. Name each op once."),
    ("trace", "trace what? Name a script"),
    ("trace --html run.htm x.py", "argument --html: run.htm: the file's name has to end in .html."),
    ("trace --json a.json x.py", "argument --json: a.json: this is a folder. Name a file in it."),
    ("trace --json locked/a.json x.py", "locked/a.json: it cannot be written (permission"),
    ("trace --steps 3:3 x.py", "3:3: there is no step in it. B comes after A"),
    ("trace --steps a x.py", "a: not a range of steps. Write A:B, as in 10:12"),
    ("trace --max-calls -1 x.py", "-1 is not an integer, 0 or more"),
    ("trace --stock --cache all x.py", "--stock leaves torch.autocast PyTorch's, which has no"),
    ("find-nan", "find-nan what? Name a script"),
    ("find-nan --fix a.toml -", "--fix runs the program several times, and stdin can be read once. Save it in a file."),
    ("find-nan --fix a.toml pipe", "--fix runs the program several times, and pipe can be read once."),
    ("find-nan --fix a.toml --stock x.py", "--fix tries overrides, which --stock rules out. Leave one of them out."),
    # compare, tune
    ("compare x.py", "TARGET 'x.py': name a file or module and a function in it that returns (model, step), such as x"),
    ("compare x.py make", "unrecognized arguments: make. TARGET is one word, such as train.py:make."),
    ("compare x", "such as x:make. `torch-promote compare --help` shows such a function."),
    ("compare -m package.train", "unrecognized arguments: -m. TARGET of a module is its name and a function, such as "),
    ("compare x.py:make()", "such as x.py:make. `torch-promote compare --help`"),
    ("compare xx.py:make", "TARGET: there is no file 'xx.py'. Closest: x.py."),
    ("compare x.py:make --batches x", "argument --batches: x is not an integer, 0 or more."),
    ("compare x.py:make --policy cuda", "unrecognized arguments: --policy. Commands with this option: run, "),
    ("compare --level layer x.py:make", "unrecognized arguments: --level. Commands with this option: tune."),
    ("compare x.py::make", "such as x.py:make, with one colon."),
    ("compare empty:make", "TARGET: 'empty' is a folder. Name a file in it, such as empty/train.py:make."),
    ("tune x.py:make --json=run.json", "the following arguments are required: --tolerance."),
    ("tune --tolerence 1e-3 x.py:make", "unrecognized arguments: --tolerence. Closest: --tolerance."),
    (
        "run --policy empty x.py",
        "--policy empty: empty is there, but the name of a policy file ends in .toml. It is a folder: name",
    ),
    ("run --policy gone.toml x.py", "there is no policy file 'gone.toml'."),
    ("tune x.py:make --tolerance 1 --level layer", "'layer'. A layer is a module. Legal: op, module, site."),
    ("tune x.py:make --tolerance 1 --level modul", "Closest: module. Legal: op, module, site."),
    ("tune x.py:make --tolerance 1 --tolerence 1", "Closest: --tolerance."),
    ("compare x.py:make --html run.htm", "run.htm: the file's name has to end in .html."),
    ("compare x.py:make --json no/run.json", "no/run.json: there is no folder 'no'. Create it first."),
    ("compare x.py:make --tolerance 1 --tolerance a=1", "give one number for all metrics, or NAME=NUMBER for each"),
    ("compare x.py:make --tolerance =1", "expected a number, 0 or more, or NAME=NUMBER, such as 1e-3 or loss"),
    ("tune x.py:make", "required: --tolerance"),
    ("tune x.py:make --tolerance 1 --dtype x", "invalid choice: 'x'"),
    ("tune x.py:make --tolerance 1 -o mine.json", "mine.json: the file's name has to end in .toml."),
    # policies
    ("policies softmax mm", "mm. PATTERN is one word: for several ops, a shell pattern such as 'linalg_*'. See"),
    ("parity softmax", "To show only some ops, write --ops softmax."),
    ("policies --json softmax --jsn", "unrecognized arguments: --jsn. Closest: --json. See"),
    ("policies *zzzz*", "PATTERN '*zzzz*': "),
    ("policies --policy cdua", "no policy is called 'cdua'. Closest: cuda. Legal: stock, cpu, cuda, xpu, mps,"),
    ("policies --policy no.toml", "there is no policy file 'no.toml'. Policies that need no file: stock, cpu, cuda,"),
    ("policies --policy cuda --diff cpu stock", "argument --diff: not allowed with argument --policy."),
    ("policies --diff stock", "argument --diff: expected 2 arguments: --diff NAME|FILE NAME|FILE."),
    ("policies sofmax --json", "If a library defines the op, import it: --import MODULE."),
    ("policies --diff cpu mtia", "no policy is called 'mtia'. Legal: stock, cpu, cuda, xpu, mps,"),
    ("policies --diff stock fp32_saf", "no policy is called 'fp32_saf'. Closest: fp32_safe, fp32. Legal:"),
    ("policies --diff mine.toml other.toml", "there is no policy file 'mine.toml'."),
    ("policies --diff stock other.toml", "there is no policy file 'other.toml'."),
    ("policies --import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("policies --device gpu", "'gpu'. The device types of GPUs are cuda (also for ROCm), xpu (Intel) and mps (Apple)."),
    ("policies --polic cuda --opp softmax", "Closest: --op."),
    # parity
    ("parity --quik", "Closest: --quick."),
    ("parity --device gpu --list", "'gpu' is not a device. Legal: cpu, cuda, xpu, mps, fake-cuda, fake-xpu, fake-mps,"),
    ("parity --ops sofmax --list", "no op is called 'sofmax'. Closest: softmax"),
    ("parity --shard 3/2", "'3/2' is not a shard. Expected I/N with I from 1 to N, such as 1/4"),
    ("parity --jobs many", "argument --jobs: many is not an integer, 0 or more"),
    ("parity --ops bmm --shard 9/9", "--shard 9/9 is empty: the number of entries is 1."),
    ("parity --json /no/such/folder/a.json", "/no/such/folder/a.json: there is no folder '/no/such/folder'."),
    ("parity --merge /no/such/file", "cannot read /no/such/file:"),
    ("parity --merge a.json --quick", "--merge runs nothing, so the only other option that it accepts is --json"),
    ("parity --ops mm --sample float32/0/plain --quick", "--sample selects a single sample. Remove --quick and"),
    # why
    ("why f4[2] --rule numpi", "'numpi'. Closest: numpy. Legal: torch, jax, numpy, array_api, strict."),
    ("why f4[2] --default-dtype x", "'x' is not a dtype. Names are PyTorch's, or short ones: bf16, half, f4."),
    ("why 'x + 1'", "Tensors are written with their dtype and sizes, such as float32[2, 3]."),
    ("why", "required: expression"),
    (
        "why 1+1 --default-dtype int8",
        "default_dtype is the dtype of Python floats, got int8. Legal: float16, bfloat16, float32, float64.",
    ),
    ("why 'int8[3] + 1' --dtype half", "--dtype and --policy need --autocast."),
    ("why 'int8[3] + 1' --autocast cpu --policy no-such", "no-such"),
    ("why 'sofmax(f4[2])'", "no function of PyTorch is called 'sofmax'. Closest: softmax"),
    ("why 'int32[3] +'", "'int32[3] +' is not a valid expression"),
    ("why 'int8[3]' README.md docs", "The shell may have changed it: put the expression in quotes."),
    (
        "trace --read gone.jsonl.gz softmax",
        "there is no recording 'gone.jsonl.gz'. `torch-promote trace --record F.jsonl.gz train.py` writes one.",
    ),
    ("trace --read text.json softmax", "its name does not end in .jsonl.gz. Pass a file that trace(record="),
    ("trace --read text.jsonl.gz softmax", "it is not a gzip file"),
    ("trace --read other.jsonl.gz", 'its first line does not have "format": "torch_promote recording"'),
    ("trace --read text.jsonl.gz softmax mm", "it runs no program. Got 2 patterns."),
    ("trace --read text.jsonl.gz --stock", "it runs no program. Got --stock."),
]


@pytest.mark.parametrize(("arguments", "complaint"), WRONG)
def test_a_wrong_command_line_is_one_line_and_runs_nothing(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: str, complaint: str
) -> None:
    for name in ("a.json", "empty", "locked", "shadowed"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("x.py", "shadowed/x.py", "shadowed/torch_promote.py"):
        (folder / name).write_text("open('ran', 'w')\ndef make(): pass\n")
    for name in ("text.json", "text.jsonl.gz"):
        (folder / name).write_text("text")
    (folder / "other.jsonl.gz").write_bytes(gzip.compress(b"text\n"))
    allows = os.access
    # root may write all
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "locked" and allows(path, mode))
    error = error_of(capsys, *shlex.split(arguments))
    assert error.startswith("torch-promote")
    assert complaint.format(folder=folder) in error
    assert not (folder / "ran").exists()


def test_a_misspelt_environment_variable(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_PROMOTE_POLCY", "TORCH_PROMOTE_POLICY", "TORCH_PROMOTE_OF_MINE", "MY_TORCH_PROMOTE_POLCY"):
        monkeypatch.setenv(name, "stock")
    assert main(["policies", "softmax"]) == 0
    said = "nothing reads the environment variable TORCH_PROMOTE_POLCY. Closest: TORCH_PROMOTE_POLICY."
    assert capsys.readouterr().err == f"torch-promote: {said}\n"


def test_the_environment_variables_are_those_that_the_package_reads() -> None:
    package = Path(tp.__file__).parent
    files = [*package.rglob("*.py"), package.parent / "_torch_promote_hooks.py"]
    read = {name for file in files for name in re.findall(r"\bTORCH_PROMOTE_([A-Z_]+)\b", file.read_text())}
    assert read == {*program._VARIABLES}


@pytest.mark.parametrize("script", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_error_of_the_import_is_one_line_and_status_2(script: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_promote", "info"]
    if script:  # as pip makes it of the entry point
        (tmp_path / "command").write_text("from _torch_promote_hooks import main\nimport sys\nsys.exit(main())\n")
        command = [sys.executable, str(tmp_path / "command"), "info"]
    process = subprocess.run(
        command, env=environment(TORCH_PROMOTE_POLICY="cudda"), text=True, timeout=120, check=False, capture_output=True
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(
        "torch-promote: error: the environment variable TORCH_PROMOTE_POLICY is 'cudda': no policy is called 'cudda'."
    )
    assert process.stderr.count("\n") == 1


def test_ctrl_c_while_torch_is_imported() -> None:
    code = "import sys, _torch_promote_hooks as c; print('ready', flush=True); sys.exit(c.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "parity"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # `import torch` takes longer
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=100) == ("", "")
    assert process.returncode == 130


# Streams


@pytest.mark.parametrize("arguments", [["policies"], ["info", "--json"], ["--help"]], ids=" ".join)
def test_a_reader_that_has_exited_is_no_error(arguments: list[str]) -> None:
    """With a buffer, the text of --help is written at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = run_module(
            "torch_promote", *arguments, stdout=writer, finalize=True, env=environment(PYTHONUNBUFFERED="")
        )
    finally:
        os.close(writer)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line_and_status_2(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        process = run_module(
            "torch_promote", "info", stdout=full.fileno(), env=environment(PYTHONUNBUFFERED=unbuffered)
        )
    error = "torch-promote: error: cannot write to stdout: No space left on device.\n"
    assert (process.returncode, process.stderr) == (2, error)


def test_a_closed_stdout_is_one_line_and_status_2() -> None:
    command = ["sh", "-c", 'exec "$0" -W ignore -m torch_promote info >&-', sys.executable]
    process = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (process.returncode, process.stderr) == (2, "torch-promote: error: cannot write: stdout is closed.\n")


def test_a_pipe_has_a_line_for_each_row_and_a_terminal_wraps(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = text_of(capsys, "policies", "norm*")
    assert max(map(len, narrow.splitlines())) <= 60
    monkeypatch.delenv("COLUMNS")
    piped = text_of(capsys, "policies", "norm*")
    on_gpus = ["fp32_append_dtype", "fp32_append_dtype", "fallthrough"]
    assert ["norm.Scalar", "fallthrough", *on_gpus] in cells_of(piped)
    assert len(piped.splitlines()) < len(narrow.splitlines())
    assert [line.split() for line in narrow.splitlines()[3:5]] == [
        ["norm.ScalarOpt_dim", "cpu,", "mps", "fallthrough"],
        ["cuda,", "xpu", "fp32_append_dtype"],
    ]


def test_policies_are_coloured_on_a_terminal_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in text_of(capsys, "policies", "bmm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[36mlower_precision_fp" in text_of(capsys, "policies", "bmm", "--device", "cpu")


@pytest.mark.parametrize(("terminal", "quiet"), [(True, True), (False, False), (False, True)])
def test_progress(terminal: bool, quiet: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_LINES", 0.0)
    with output.progress("parity", 2, quiet=quiet) as step:
        step("one")
        step("two")
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert ("2/2" in text) is terminal
    assert ("parity: 2 of 2, two\n" in text) is not (terminal or quiet)


def test_a_reader_of_stderr_that_exits_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        output.say("a message")


# info


def test_info_as_json(capsys: Capture) -> None:
    info = json_of(capsys, "info")
    assert (info["torch_promote"], info["torch"], info["rows"]) == (tp.__version__, torch.__version__, len(op_table()))
    assert (info["dispatch_key"], info["registered_policies"]) == ("AutocastPrivateUse1", [])
    assert list(info["devices"]) == list(DEVICE_TYPES)
    for index, (name, device) in enumerate(info["devices"].items()):
        counting = [one for one in _C.stock_policy_bytes() if one[index] != _C.POLICY_BYTES["unlisted"]]
        assert device == {
            "available": name == "cpu" or (name == "cuda" and torch.cuda.is_available()),
            "default_dtype": "bfloat16" if name == "cpu" else "float16",
            "rows_with_policy": sum(row.policy(name) is not CastPolicy.fallthrough for row in op_table()),
            "rows_that_count": len(counting),
            "missing_rows": [row.name for row in missing_rows(name)],
            "unlisted_ops": list(unlisted_ops(name)),
            "float8": device["float8"] if device["available"] else None,  # its own test is below
        }
        assert device["rows_that_count"] == device["rows_with_policy"] - len(device["missing_rows"])


@pytest.mark.parametrize(
    ("capability", "text"),
    [((9, 0), "aten::_scaled_mm"), ((8, 0), "none, linear runs as under lower_precision_fp: a GPU has compute capab")],
)
def test_info_says_which_product_in_float8_a_gpu_has(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    what_lacks.cache_clear()
    assert json_of(capsys, "info")["devices"]["cuda"]["float8"].startswith(text)
    what_lacks.cache_clear()


def test_info_as_text(capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    """It says what the JSON says: what runs regions of torch.autocast, defaults, variables, devices, differences."""
    monkeypatch.setenv("TORCH_PROMOTE_CACHE", "all")
    monkeypatch.setenv("TORCH_PROMOTE_POLICY", "cuda")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [SimpleNamespace(module="_torch_promote_hooks")]
    )
    monkeypatch.setattr(registrations, "op_table", lambda: STRANGE_ROWS)
    monkeypatch.setattr(registrations, "registered", lambda device: frozenset({"aten::mm", "lib::op"}))
    tp.set_default_policy("cuda")
    with tp.install(cache="all") as installation, tp.register_policy("relu", "fp32", device_type="cpu"):
        info = json_of(capsys, "info")
        text, in_full = text_of(capsys, "info"), text_of(capsys, "info", "--all")
    default = "Policy.named('cuda'), from TORCH_PROMOTE_POLICY=cuda"
    assert (info["installed"], info["default_policy"]) == (installation.info, default)
    assert info["registered_policies"] == [{"op": "aten::relu", "device": "cpu", "policy": "fp32"}]
    assert info["environment"] == {"TORCH_PROMOTE_POLICY": "cuda", "TORCH_PROMOTE_CACHE": "all"}
    assert info["autoloading"] == "works"
    lines = cells_of(text)
    for line in (
        "float8 cpu: aten::mm, of the operands in float32",
        f"torch {torch.__version__}, built with {_C.TORCH_VERSION}",
        f"torch.autocast {installation.info}",
        f"default policy {default}",
        "registered policies aten::relu on cpu: fp32",
        "environment TORCH_PROMOTE_POLICY=cuda",
        "autoloading works",
    ):
        assert line.split() in lines
        assert line.split() in cells_of(in_full)
    assert "`torch-promote info --all` lists the missing rows and the unlisted ops." in text
    assert ["unlisted", "ops", "on", "cuda", "lib::op"] not in lines
    assert ["unlisted", "ops", "on", "cuda", "lib::op"] in cells_of(in_full)


@pytest.mark.parametrize("columns", [80, 120])
def test_info_fits_a_screen(capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Whatever is set, 30 lines of 80 columns; --all and --json shorten nothing."""
    long = ",".join(f"linalg_{letter}*=fp32" for letter in "abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setenv("COLUMNS", str(columns))
    for variable in ("POLICY", "OVERRIDES", "CACHE", "AUTOCAST"):
        monkeypatch.setenv(f"TORCH_PROMOTE_{variable}", long)
    policy = tp.Policy.stock().override({f"linalg_{op}": "fp64" for op in ("det", "inv", "norm", "svd", "qr", "eig")})
    tp.set_default_policy(policy)
    with contextlib.ExitStack() as stack:
        for op in ("relu", "gelu", "silu", "add", "mul"):
            stack.enter_context(tp.register_policy(op, "fp64"))
        stack.enter_context(tp.install(policy=policy, overrides={"mm": "fp64"}))
        text, in_full, info = text_of(capsys, "info"), text_of(capsys, "info", "--all"), json_of(capsys, "info")
    assert len(text.splitlines()) <= 30
    assert "(--all)" in text
    assert "(--all)" not in in_full
    assert len(in_full.splitlines()) > 40
    assert info["environment"]["TORCH_PROMOTE_OVERRIDES"] == long
    assert len(info["registered_policies"]) > 10
    for one in info["registered_policies"]:
        assert f"{one['op']} on {one['device']}: float64" in in_full


# why

LONG = "F.linear(f4[2, 3], f4[4, 3], f4[4]) + where(bool[2, 4], f8[2, 4], 1e300)"


def why(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    return (main(["why", *argv]), *capsys.readouterr())


@pytest.mark.parametrize(("line", "result"), EXAMPLES)
def test_the_examples_of_why(line: str, result: str, capsys: Capture, wide: None) -> None:
    status, out, _ = why(capsys, *shlex.split(line))
    assert (status, out.splitlines()[-1]) == (0, result)


@pytest.mark.parametrize("width", [60, 200])
def test_lines_are_as_wide_as_the_terminal(
    width: int, capsys: Capture, wide: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, piped, _ = why(capsys, LONG, "--autocast", "cpu")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = why(capsys, LONG, "--autocast", "cpu")
    assert max(map(len, out.splitlines())) <= width
    assert " ".join(out.split()) == " ".join(piped.split())


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (("--default-dtype", "float64"), {"default_dtype": torch.float64}),
        (("--rule", "numpy"), {"rule": "numpy"}),
        (("--autocast", "cpu", "--dtype", "half"), {"autocast": "cpu", "dtype": torch.float16}),
    ],
)
def test_it_prints_the_derivation(
    capsys: Capture, wide: None, options: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    expected = tp.why("int32[3] + 5.5", **arguments).text(None)
    assert why(capsys, "int32[3] + 5.5", *options) == (0, f"{expected}\n", "")


def test_an_expression_without_quotes(capsys: Capture, wide: None) -> None:
    assert why(capsys, "int8[3]", "+", "int64[]")[1] == why(capsys, "int8[3] + int64[]")[1]
    assert why(capsys, "-int8[3]")[1].endswith("Result: int8 of shape [3]\n")
    assert why(capsys, "-1", "*", "int8[3]")[1].endswith("Result: int8 of shape [3]\n")
    assert why(capsys, "-softmax(f2[3], 0)", "--json")[0] == 0


def test_why_with_a_policy_file(capsys: Capture, tmp_path: Path) -> None:
    tp.Policy.stock().override({"matmul": "fp32"}).save(tmp_path / "mine.toml")
    options = ("--autocast", "cpu", "--policy", str(tmp_path / "mine.toml"))
    status, out, _ = why(capsys, "f4[2, 2] @ f4[2, 2]", *options)
    assert (status, out.splitlines()[-1]) == (0, "Result: float32 of shape [2, 2]")


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (("int8[] + int16[]",), {"dtype": "int16", "shape": [], "error": None, "raised_by": None}),
        (("int8[3] + int16[]", "--rule", "strict"), {"rule": "strict", "dtype": None, "raised_by": "the rule"}),
        (("uint16[3] + int8[3]",), {"rule": "torch", "dtype": None, "raised_by": "PyTorch"}),
        (
            ("max(f2[2, 3], 1)", "--autocast", "cpu"),
            {
                "results": [{"dtype": "float16", "shape": [2]}, {"dtype": "int64", "shape": [2]}],
                "autocast": "under autocast on cpu with bfloat16",
            },
        ),
    ],
)
def test_why_as_json(arguments: tuple[str, ...], data: dict[str, Any], capsys: Capture) -> None:
    status, out, _ = why(capsys, *arguments, "--json")
    printed = json.loads(out)
    assert status == (0 if printed["error"] is None else 1)
    assert printed["steps"]
    assert printed | data == printed
