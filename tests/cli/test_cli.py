"""The command `torch-promote`: help, imports, exit statuses, output streams, and `info`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_promote as tp
from helpers.command_line import Capture, cells_of, error_of, json_of, terminal_of_80_columns, text_of, wide
from helpers.op_registrations import STRANGE_ROWS
from helpers.program_defaults import as_it_was
from helpers.subprocesses import environment, run_module, run_python
from torch_promote import _C
from torch_promote.cli import output
from torch_promote.cli.program import COMMANDS, main, make_parser, parse_arguments
from torch_promote.policy import op_table as registrations
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, missing_rows, op_table, unlisted_ops

__all__ = ["as_it_was", "terminal_of_80_columns", "wide"]  # fixtures

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")


# Help


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


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"torch-promote {tp.__version__} (torch {torch.__version__})\n"


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
    assert not any(name.startswith(("torch_promote.numerics", "torch_promote.observe.trace")) for name in own)


def test_importing_the_package_imports_no_rich() -> None:
    done = run_python("import sys, torch_promote; print('rich' in sys.modules)", env=environment())
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


# Exit statuses and errors


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "required: COMMAND"),
        ("polices", "invalid choice: 'polices'"),
        ("--bogus", "required: COMMAND"),
        ("info extra", "unrecognized arguments: extra"),
        ("policies --op", "expected one argument"),
        ("why", "required: expression"),
        ("why 1+1 --default-dtype int8", "'int8' is not a default dtype. Legal: float16, bfloat16, float32, float64"),
        ("run --crosscheck=bit x.py", "invalid choice: 'bit'"),
        ("run --pol cuda x.py", "unrecognized arguments: --pol"),
        ("tune train.py:make", "required: --tolerance"),
        ("tune train.py:make --tolerance 1 --dtype x", "invalid choice: 'x'"),
        ("compare train.py:make --tolerance =1", "expected a number, 0 or more, or NAME=NUMBER, such as 1e-3 or loss"),
        ("compare train.py:make --tolerance -1", "-1: expected a number, 0 or more"),
        ("parity --shard 3/2", "'3/2' is not a shard. Expected I/N with I from 1 to N, such as 1/4"),
        ("parity --jobs many", "invalid int value: 'many'"),
    ],
)
def test_an_invalid_command_line_is_one_line_and_status_2(capsys: Capture, arguments: str, complaint: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(arguments))
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out) == (2, "")
    command = next(iter(shlex.split(arguments)), "")
    asked = f"torch-promote {command}" if command in COMMANDS else "torch-promote"
    assert re.fullmatch(rf"torch-promote: error: .+[^.]\. See `{asked} --help`\.\n", captured.err)
    assert complaint in captured.err


@pytest.mark.parametrize("script", [False, True])
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


@needs_full
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
    narrow = text_of(capsys, "policies", "--op", "norm*")
    assert max(map(len, narrow.splitlines())) <= 60
    monkeypatch.delenv("COLUMNS")
    piped = text_of(capsys, "policies", "--op", "norm*")
    assert ["norm.Scalar", "fallthrough", "fp32_append_dtype", "norm.ScalarOpt_dtype"] in cells_of(piped)
    assert len(piped.splitlines()) < len(narrow.splitlines())


def test_policies_are_coloured_on_a_terminal_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in text_of(capsys, "policies", "--op", "bmm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[36mlower_precision_fp" in text_of(capsys, "policies", "--op", "bmm")


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
    assert ("parity: 2 of 2, two, 0 s\n" in text) is not (terminal or quiet)


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
        counting = [byte for byte in _C.stock_policy_bytes()[index] if byte != _C.POLICY_BYTES["unlisted"]]
        assert device == {
            "available": name == "cpu" or torch.cuda.is_available(),
            "default_dtype": {"cpu": "bfloat16", "cuda": "float16"}[name],
            "rows_with_policy": sum(row.policy(name) is not CastPolicy.fallthrough for row in op_table()),
            "rows_that_count": len(counting),
            "missing_rows": [row.name for row in missing_rows(name)],
            "unlisted_ops": list(unlisted_ops(name)),
        }
        assert device["rows_that_count"] == device["rows_with_policy"] - len(device["missing_rows"])


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
    with tp.installed_as(cache="all") as installation, tp.register_policy("relu", "fp32", device_type="cpu"):
        info = json_of(capsys, "info")
        text = text_of(capsys, "info")
    default = "Policy.named('cuda'), from TORCH_PROMOTE_POLICY=cuda"
    assert (info["installed"], info["default_policy"]) == (installation.info, default)
    assert info["registered_policies"] == [{"op": "aten::relu", "device": "cpu", "policy": "fp32"}]
    assert info["environment"] == {"TORCH_PROMOTE_POLICY": "cuda", "TORCH_PROMOTE_CACHE": "all"}
    assert info["autoloading"] == "works"
    lines = cells_of(text)
    for line in (
        f"torch {torch.__version__}, built with {torch.__version__}",
        f"torch.autocast {installation.info}",
        f"default policy {default}",
        "registered policies aten::relu on cpu: fp32",
        "environment TORCH_PROMOTE_POLICY=cuda",
        "autoloading works",
        "`torch-promote policies --diff` lists the missing rows and the unlisted ops.",
    ):
        assert line.split() in lines


def test_an_error_of_a_command_is_one_line_and_status_2(capsys: Capture) -> None:
    for as_json in ([], ["--json"]):
        assert error_of(capsys, "policies", "--op", "sofmax", *as_json) == (
            "torch-promote: error: --op 'sofmax': no op is called 'sofmax'. Closest: softmax. Ops are named as in "
            "torch.ops or in Python: 'softmax', 'aten::softmax.int', 'mylib::op', 'F.softmax', torch.mm. If a library "
            "defines the op, import it: --import MODULE.\n"
        )
