"""`torch-promote run`: the program sees what it would see under python, and what is wrong is one line."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.autoloading import COMMAND, entry_point, folder, ran
from helpers.command_line import Capture, error_of, terminal_of_80_columns
from torch_promote.cli import user_program as child_process
from torch_promote.cli.program import main

__all__ = ["entry_point", "folder", "terminal_of_80_columns"]  # fixtures

#: Prints what a program can see of how it was started.
SEEN = """
import sys, os, json, pickle, warnings, __main__
class Mine:
    pass
def plain(value):
    return value if value is None or isinstance(value, str) else type(value).__name__
names = ("__name__", "__file__", "__package__", "__spec__", "__doc__", "__builtins__", "__cached__", "__loader__")
seen = {name: plain(globals().get(name)) for name in names}
seen |= {"argv": sys.argv, "path": sys.path, "main": __main__.__dict__ is globals(), "options": sys.warnoptions}
seen |= {"pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine, "torch": "torch" in sys.modules}
seen |= {"spec": getattr(__spec__, "name", None), "optimize": sys.flags.optimize, "dev": sys.flags.dev_mode}
print(json.dumps(seen, indent=1))
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def python(*arguments: str, **options: object) -> tuple[int, str, str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


# --- as under python


def make_programs(folder: Path) -> None:
    program(folder / "with a space" / "script.py", SEEN)
    for place in ("package/__init__.py", "package/inner/__init__.py"):
        program(folder / place, "")
    for place in ("package/__main__.py", "package/inner/module.py", "directory/__main__.py"):
        program(folder / place, SEEN)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SEEN)
    (folder / "link.py").symlink_to(folder / "with a space" / "script.py")


@pytest.mark.parametrize(
    "started",
    [
        ["with a space/script.py"],
        ["link.py"],
        ["-m", "package"],
        ["-mpackage"],
        ["-m", "package.inner.module"],
        ["directory"],
        ["archive.zip"],
        ["-c", SEEN],
    ],
    ids=lambda started: " ".join(started)[:20],
)
def test_the_program_sees_what_it_sees_under_python(folder: Path, capfd: Capture, started: list[str]) -> None:
    make_programs(folder)
    arguments = [*started, "--help", "--policy", "x", "-m", "--", "--crosscheck", "a b", ""]
    expected = python(*arguments)
    assert expected[0] == 0
    assert json.loads(expected[1])["torch"] is False
    assert ran(capfd, *arguments) == expected
    assert ran(capfd, "--policy", "cuda", "--override=softmax=fp16", "--cache", "all", "--", *arguments) == expected


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('a text')", 1),
        ("def f():\n    1 / 0\nf()", 1),
        ("import sys\nsys.excepthook = lambda *error: print('mine', error[0])\nraise KeyError('x')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import threading\nthread = threading.Thread(target=exit, args=[3])\nthread.start(); thread.join()", 0),
        ("import atexit\natexit.register(print, 'at exit')\nraise SystemExit(4)", 4),
        ("import os; print('lost'); os._exit(5)", 5),
        ("def (", 1),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_program_ends_as_under_python(folder: Path, capfd: Capture, code: str, status: int) -> None:
    program(folder / "script.py", code)
    expected = python("script.py")
    assert expected[0] == status
    assert ran(capfd, "script.py") == (status if status >= 0 else 128 - status, *expected[1:])


# --- a process of its own


def test_the_command_becomes_the_program(folder: Path, entry_point: Path) -> None:
    """The same process id, stdin, options of the interpreter and end; the program's settings come before PyTorch."""
    program(
        folder / "script.py",
        """
        import os, sys
        os.environ["OMP_NUM_THREADS"] = "1"
        print(os.getpid(), input(), sys.stdin.read(), sys.stdout.write_through, sys.warnoptions, sys._xoptions)
        import torch
        print(torch.get_num_threads(), end="")
        raise KeyboardInterrupt
        """,
    )
    interpreter, *options = COMMAND
    assert options[0] == "-m"
    command = [interpreter, "-W", "ignore::FutureWarning", "-X", "mine", "-um", *options[1:], "script.py"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    out, err = process.communicate("first\nrest", timeout=200)
    assert out == f"{process.pid} first rest True ['ignore::FutureWarning'] {{'mine': True}}\n1"
    assert process.returncode == -signal.SIGINT
    assert "torch_promote" not in err
    assert err.endswith("raise KeyboardInterrupt\nKeyboardInterrupt\n")


def test_stdin_as_the_program(folder: Path) -> None:
    code = "import sys; print(sys.argv, __name__)"
    arguments = ["-", "-v", "run"]
    assert python(*COMMAND[1:], *arguments, input=code) == python(*arguments, input=code)


@pytest.mark.parametrize("options", [[], ["--crosscheck"]], ids=["", "crosscheck"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_program(folder: Path, options: list[str], number: int) -> None:
    program(
        folder / "script.py",
        """
        import os, signal, sys, time
        def end(number, frame):
            os.write(1, b"got %d\\n" % number)  # not print: the signal may come inside of the other one
            sys.exit(9)
        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        time.sleep(100)
        """,
    )
    command = [*COMMAND, *options, "script.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (9, f"got {int(number)}\n"), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_at_the_start_reach_the_program(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program exists, and the command does not yet know it."""
    as_it_is = child_process.start

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        started = as_it_is(*arguments)
        os.kill(os.getpid(), number)
        return started

    monkeypatch.setattr(child_process, "start", start)
    before = signal.getsignal(number)
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); signal.pause()"
    assert child_process.run_to_end([sys.executable, "-S", "-c", code], os.environ).returncode == -number
    assert signal.getsignal(number) is before


def test_ctrl_c_of_a_terminal_reaches_a_program_in_the_foreground_by_itself() -> None:
    """In the group to which the terminal sends it, in another group, and without a terminal."""
    child, terminal = pty.fork()
    if child == 0:
        status = 1
        try:
            in_front = child_process._in_foreground()
            if (grandchild := os.fork()) == 0:
                os.setpgid(0, 0)
                os._exit(child_process._in_foreground())
            status = 0 if in_front and os.waitpid(grandchild, 0)[1] == 0 else 2
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(terminal)
    assert ended == 0


def test_a_program_that_a_signal_ends_under_crosscheck(folder: Path) -> None:
    """The command ends by the same signal."""
    program(folder / "script.py", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    status, _, err = python(*COMMAND[1:], "--crosscheck", "script.py")
    assert status == -signal.SIGKILL
    assert "the program left no report" in err


# --- what is wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run what? Name a script, -m MODULE, -c CODE or -. See `torch-promote run --help`."),
        (["-m"], "-m needs a module after it."),
        (["-v", "-c"], "-c needs code after it."),
        (["gone.py", "--policy"], "there is no file 'gone.py' to run. For a module, write -m gone."),
        (["empty"], "the folder 'empty' has no __main__.py. Name a file in it."),
        (["-m", "no_such.module"], "there is no module 'no_such' to run. Python looks in '{folder}' and in sys.path."),
        (["-m", ".relative"], "there is no module '' to run. Python looks in '{folder}' and in sys.path."),
        (["--policy", "cudda", "x.py"], "--policy cudda: no policy is called 'cudda'. Closest: cuda."),
        (["--policy", "gone.toml", "x.py"], "--policy gone.toml: "),
        (["--cache", "al", "x.py"], "got 'al'. Legal: 'weights', 'persistent', 'all', 'none'. Closest: all."),
        (["--override", "softmax", "x.py"], "'softmax' is not an override. Write OP=POLICY, as in softmax=fp32."),
        (["--override", "sofmax=fp32", "x.py"], "no op is called 'sofmax'. Closest: softmax"),
        (["--override", "mm=fp23", "x.py"], "mm"),
        (["--override", "mm=fp32,mm=fp16", "x.py"], "'mm' has two policies, 'fp32' and 'fp16'. Name each op once."),
    ],
    ids=str,
)
def test_a_wrong_command_line_is_one_line_and_runs_nothing(
    folder: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    program(folder / "x.py", "open('ran', 'w')")
    (folder / "empty").mkdir()
    error = error_of(capsys, "run", *arguments)
    assert error.startswith("torch-promote: error: ")
    assert message.format(folder=folder) in error
    assert not (folder / "ran").exists()


def test_safe_path_leaves_out_the_working_directory(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `python -P`, with which the command also starts the program."""
    program(folder / "a_module_here.py", "")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith("_")}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**{**flags, "safe_path": True}))
    assert "there is no module 'a_module_here' to run." in error_of(capsys, "run", "-m", "a_module_here")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--crosscheck=bit", "x.py"], "invalid choice: 'bit'"),
        (["--polcy", "cuda", "x.py"], "unrecognized arguments: --polcy"),
        (["--pol", "cuda", "x.py"], "unrecognized arguments: --pol"),
        (["--policy"], "expected one argument"),
    ],
)
def test_a_wrong_option(folder: Path, capsys: Capture, arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_without_the_entry_point(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    program(folder / "x.py", "open('ran', 'w')")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert error_of(capsys, "run", "x.py") == (
        "torch-promote: error: the program would run without torch_promote: TORCH_DEVICE_BACKEND_AUTOLOAD keeps "
        "PyTorch from loading it. Unset that variable.\n"
    )
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert "has no entry point in the group torch.backends, or is not installed. Install it" in error_of(
        capsys, "run", "x.py"
    )
    assert not (folder / "ran").exists()


def test_verbose_says_what_is_installed(folder: Path, capfd: Capture) -> None:
    program(folder / "x.py", "print('ran')")
    status, out, err = ran(capfd, "-v", "--policy", "cuda", "--cache=all", "--override", "mm=fp32", "x.py")
    assert (status, out) == (0, "ran\n")
    assert err == (
        "torch-promote: Regions of torch.autocast for cpu and cuda are run by torch_promote: policy 'cuda', "
        "1 override, cache 'all'.\n"
    )


def test_the_options_become_variables(folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option takes precedence; overrides are added. The path of a file holds from anywhere."""
    program(
        folder / "x.py", "import os; print({k[14:]: v for k, v in os.environ.items() if k[:14] == 'TORCH_PROMOTE_'})"
    )
    assert ran(capfd, "x.py")[1] == "{'AUTOCAST': '1'}\n"
    monkeypatch.setenv("TORCH_PROMOTE_AUTOCAST", "0")
    monkeypatch.setenv("TORCH_PROMOTE_CACHE", "none")
    monkeypatch.setenv("TORCH_PROMOTE_OVERRIDES", "exp=fp32, mm=fp32")
    expected = {"AUTOCAST": "1", "CACHE": "none", "OVERRIDES": "exp=fp32,mm=fp32"}
    assert eval(ran(capfd, "x.py")[1]) == expected
    program(folder / "mine.toml", "format = 1\n[cpu]\nexp = 'fp32'\n")
    arguments = ["--policy", "mine.toml", "--cache", "all", "--override", "mm=fp16", "--override", "bmm=fp16"]
    expected |= {"POLICY": str(folder / "mine.toml"), "CACHE": "all", "OVERRIDES": "exp=fp32,mm=fp16,bmm=fp16"}
    assert eval(ran(capfd, *arguments, "x.py")[1]) == expected


def test_a_wrong_variable_is_one_line(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    program(folder / "x.py", "")
    monkeypatch.setenv("TORCH_PROMOTE_OVERRIDES", "exp")
    assert "the environment variable TORCH_PROMOTE_OVERRIDES is 'exp': 'exp' is not an override" in error_of(
        capsys, "run", "x.py"
    )
