"""`torch-promote run`: the program sees what it would see under python, trains with ours, and is crosschecked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.autoloading import COMMAND, entry_point, folder, ran, variables
from helpers.command_line import Capture, error_of, terminal_of_80_columns
from helpers.subprocesses import output_of, plain_environment, run_module
from helpers.traced_commands import warm
from torch_promote.cli.program import main

__all__ = ["entry_point", "folder", "terminal_of_80_columns", "warm"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread_there")

#: Prints what a program can see of how it was started.
SEEN = """
import sys, json, pickle, __main__
class Mine:
    pass
names = ("__name__", "__file__", "__package__", "__doc__", "__cached__")
seen = {name: globals().get(name) for name in names}
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, **options)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


# as under python


@pytest.mark.parametrize(
    "started",
    [["with a space/script.py"], ["-mpackage"], ["-m", "package.inner.module"], ["directory"], ["-c", SEEN]],
    ids=lambda started: " ".join(started)[:20],
)
def test_the_program_sees_what_it_sees_under_python(folder: Path, capfd: Capture, started: list[str]) -> None:
    for place in ("package/__init__.py", "package/inner/__init__.py"):
        program(folder / place, "")
    for place in ("with a space/script.py", "package/__main__.py", "package/inner/module.py", "directory/__main__.py"):
        program(folder / place, SEEN)
    arguments = [*started, "--help", "--policy", "x", "-m", "--", "--crosscheck", "a b", ""]
    expected = python(*arguments)
    assert expected[0] == 0
    assert json.loads(expected[1])["torch"] is False
    name = "the code" if started[0] == "-c" else started[-1].removeprefix("-m")
    said = "".join(
        f"torch-promote: {option} after {name} is {name}'s argument. Options of `run` stand before the program.\n"
        for option in ("--policy", "--crosscheck")
    )
    assert ran(capfd, *arguments) == (*expected[:2], said + expected[2])
    assert ran(capfd, "--policy", "cuda", "--override=softmax=fp16", "--cache", "all", "--", *arguments) == expected


@pytest.mark.parametrize("started", [["x.py"], ["-m", "x"], ["folder"], ["-c", "import a; x['--policy']"]], ids=str)
def test_an_option_that_the_program_declares_gets_no_note(folder: Path, capfd: Capture, started: list[str]) -> None:
    (folder / "a.py").write_text("import builtins; builtins.x = {'--policy': 0}")
    for name in ("x.py", "folder/__main__.py"):
        program(folder / name, "import argparse\nadd = argparse.ArgumentParser().add_argument\nadd('--policy')\n")
    assert ran(capfd, *started, "--policy", "1", "--policy-of") == (0, "", "")
    assert ran(capfd, *started, "--override", "1")[2].startswith("torch-promote: --override after ")


def test_a_program_in_a_pipe(folder: Path, capfd: Capture) -> None:
    """It is read once: by Python."""
    reader, writer = os.pipe()
    os.write(writer, b"print('read')")
    os.close(writer)
    os.set_inheritable(reader, True)
    assert ran(capfd, f"/dev/fd/{reader}", "--policy")[:2] == (0, "read\n")


@pytest.mark.parametrize(
    ("other", "started", "is_found"),
    [
        ("torch_promote.py", ["-m", "x"], True),
        ("torch_promote.py", ["-c", "open('ran', 'w')"], True),
        ("torch_promote/__init__.py", ["x.py"], True),
        ("torch_promote/errors.py", ["x.py"], False),  # a namespace package comes after all others
        ("torch_promote.py", ["sub/x.py"], False),
        ("sub/torch_promote.py", ["link.py"], True),
        ("folder/torch_promote.py", ["folder"], True),
    ],
)
def test_another_module_of_the_name_of_this_package(
    folder: Path, capsys: Capture, other: str, started: list[str], is_found: bool
) -> None:
    """Python would import it in place of this package, which would act in nothing, without an error."""
    for name in ("x.py", "sub/x.py", "folder/__main__.py", other):
        program(folder / name, "open('ran', 'w')")
    (folder / "link.py").symlink_to(folder / "sub" / "x.py")
    if is_found:
        assert f"{folder / other} has its name, and comes first on the" in error_of(capsys, "run", *started)
    else:
        assert main(["run", *started]) == 0
    assert (folder / "ran").exists() is not is_found


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit('a text')", 1),
        ("def f():\n    1 / 0\nf()", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; print('lost'); os._exit(5)", 5),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_program_ends_as_under_python(folder: Path, capfd: Capture, code: str, status: int) -> None:
    program(folder / "script.py", code)
    expected = python("script.py")
    assert expected[0] == status
    assert ran(capfd, "script.py") == (status if status >= 0 else 128 - status, *expected[1:])


# a process of its own


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
    command = [interpreter, "-W", "ignore::FutureWarning", "-X", "utf8", "-um", *options[1:], "script.py"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    out, err = process.communicate("first\nrest", timeout=200)
    assert out == f"{process.pid} first rest True ['ignore::FutureWarning'] {{'utf8': True}}\n1"
    assert process.returncode == -signal.SIGINT
    assert "torch_promote" not in err
    assert err.endswith("raise KeyboardInterrupt\nKeyboardInterrupt\n")


@pytest.mark.parametrize(
    "options",
    # Without options, the command has become the program.
    [pytest.param([], marks=pytest.mark.slow, id=""), pytest.param(["--crosscheck"], id="crosscheck")],
)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
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


def test_a_program_that_a_signal_ends_under_crosscheck(folder: Path) -> None:
    """The command ends by the same signal."""
    program(folder / "script.py", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    status, _, err = python(*COMMAND[1:], "--crosscheck", "script.py")
    assert status == -signal.SIGKILL
    assert "the program left no report: SIGKILL ended it before Python's exit handlers ran.\n" in err


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


def test_the_options_become_variables(folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option takes precedence; overrides are added. The path of a file holds from anywhere."""
    program(
        folder / "x.py", "import os; print({k[14:]: v for k, v in os.environ.items() if k[:14] == 'TORCH_PROMOTE_'})"
    )
    assert eval(ran(capfd, "x.py")[1]) == {"AUTOCAST": "1", "ERRORS": "1"}
    monkeypatch.setenv("TORCH_PROMOTE_AUTOCAST", "0")
    monkeypatch.setenv("TORCH_PROMOTE_CACHE", "none")
    monkeypatch.setenv("TORCH_PROMOTE_OVERRIDES", "exp=fp32, mm=fp32")
    expected = {"AUTOCAST": "1", "ERRORS": "1", "CACHE": "none", "OVERRIDES": "exp=fp32,mm=fp32"}
    assert eval(ran(capfd, "x.py")[1]) == expected
    program(folder / "mine.toml", "format = 1\n[cpu]\nexp = 'fp32'\n")
    arguments = ["--policy", "mine.toml", "--cache", "all", "--override", "mm=fp16", "--override", "bmm=fp16"]
    expected |= {"POLICY": str(folder / "mine.toml"), "CACHE": "all", "OVERRIDES": "exp=fp32,mm=fp16,bmm=fp16"}
    _, out, err = ran(capfd, "-v", *arguments, "x.py")
    assert eval(out) == expected
    overrides = "{'exp': 'fp32', 'mm': 'fp16', 'bmm': 'fp16'}"
    assert err.startswith("torch-promote: Regions of torch.autocast for cpu, cuda, xpu, mps are run by torch_promote:")
    assert err.endswith(f", overrides {overrides}, cache 'all'.\n")


def test_policies_with_tables_for_modules(folder: Path, capfd: Capture) -> None:
    program(
        folder / "x.py",
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        with torch.autocast("cpu"):
            print(model[0](torch.ones(2, 2)).dtype, model(torch.ones(2, 2)).dtype)
        """,
    )
    program(folder / "mine.toml", 'format = 2\n[modules."1"]\npolicy = "fp32"\n')
    expected = (0, "torch.bfloat16 torch.float32\n")
    status, out, err = ran(capfd, "-v", "--policy", "mine.toml", "x.py")
    assert (status, out) == expected
    assert "The policy's tables for modules apply to the models that run: '1': {'policy': 'fp32'}.\n" in err
    assert ran(capfd, "--policy", "mine.toml", "--model", "Sequential", "x.py") == (*expected, "")


def test_a_model_without_a_policy_for_it(folder: Path, capsys: Capture) -> None:
    program(folder / "x.py", "")
    error = "torch-promote: error: --model Net is for a policy with tables for modules. Name one: --policy F.toml.\n"
    assert error_of(capsys, "run", "--model", "Net", "x.py") == error
    assert error_of(capsys, "run", "--policy", "cuda", "--model", "Net", "x.py") == error


def test_a_region_that_switches_the_cache_off_is_said_once(folder: Path, capfd: Capture) -> None:
    region = 'with torch.autocast("cpu", cache_enabled=False): pass\n'
    program(folder / "x.py", f"import torch\nfor _ in range(2):\n    {region}")
    _, _, err = ran(capfd, "--cache", "persistent", "x.py")
    assert err.count("cache='persistent' was asked for, and a region with cache_enabled=False reuses no casts.") == 1
    assert "x.py:3: UnusedOverrideWarning: " in err
    assert ran(capfd, "x.py") == (0, "", "")


# training programs: bits, child processes, torchrun

TRAINING = """
import hashlib, os, sys, torch
from torch import autocast

def train(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    for _ in range(5):
        with autocast("cpu"):
            loss = torch.nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,)))
        loss.backward()
        with torch.no_grad():  # an optimizer would import Dynamo, for two seconds
            for parameter in model.parameters():
                parameter -= parameter.grad
                parameter.grad = None
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(bits).hexdigest()
"""
ALONE = f"{TRAINING}\nif __name__ == '__main__':\n    print(train(0), *sys.argv[1:])\n"
DISTRIBUTED = f"""{TRAINING}
import torch.distributed as dist
from helpers.gloo_ranks import end_group
dist.init_process_group("gloo")
hashes = [None] * dist.get_world_size()
dist.all_gather_object(hashes, train(dist.get_rank()))
if dist.get_rank() == 0:
    print(*hashes, sys.argv[1:], sys.modules["torch_promote"].installed())
end_group()
"""


@pytest.fixture
def one_thread_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a sum depend on the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def outcome(folder: Path, entry_point: Path, command: list[str]) -> tuple[int, str, str]:
    return python(*command[1:], cwd=folder, env=variables(entry_point, OMP_NUM_THREADS="1"))


@pytest.fixture(scope="module")
def hashes() -> list[str]:
    """What stock autocast gives with two seeds."""
    return output_of(f"{TRAINING}\nprint(train(0), train(1))", env=plain_environment()).split()


INSTALLS = """
import multiprocessing, sys, torch, torch_promote as tp

def product(kind):
    with torch.autocast("cpu"):
        print(kind, tp.installed(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, flush=True)

if __name__ == "__main__":
    product("run")
    tp.installed().remove()
    product("remove")
    tp.install(overrides={"matmul": "fp32"})
    product("install")
    for kind in sys.argv[1:]:
        process = multiprocessing.get_context(kind).Process(target=product, args=(kind,))
        process.start()
        process.join()
"""


@pytest.mark.parametrize("started", [("fork",), pytest.param(("fork", "spawn"), marks=pytest.mark.slow)], ids=len)
def test_a_program_that_installs_and_uninstalls_itself(
    tmp_path: Path, entry_point: Path, started: tuple[str, ...]
) -> None:
    """Forked processes have what it has installed; others begin with what the command says."""
    (tmp_path / "installs.py").write_text(INSTALLS)
    done = outcome(tmp_path, entry_point, [*COMMAND, "--override", "matmul=float64", "installs.py", *started])
    by_command = "<torch_promote.install(overrides={'matmul': 'float64'})> torch.float64"
    by_program = "<torch_promote.install(overrides={'matmul': 'fp32'})> torch.float32"
    assert done[1].splitlines() == [
        f"run {by_command}",
        "remove None torch.bfloat16",
        f"install {by_program}",
        *(f"{kind} {by_program if kind == 'fork' else by_command}" for kind in started),
    ]
    assert (done[0], done[2]) == (0, "")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_torchrun(tmp_path: Path, entry_point: Path, hashes: list[str], ranks: int) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *COMMAND[2:]]
    options = {"cwd": tmp_path, "env": variables(entry_point, OMP_NUM_THREADS="1"), "timeout": 280}
    done = run_module(*torchrun, "--override=relu=fp32", "train.py", "--lr", **options)
    assert done.returncode == 0, done.stderr
    installed = "<torch_promote.install(overrides={'relu': 'fp32'})>"
    assert done.stdout == f"{' '.join(hashes[:ranks])} ['--lr'] {installed}\n"


# --crosscheck

#: A bug in the reference, and a call that shows it in this process, a forked and a spawned one.
MISMATCH = """
import sys, torch, torch.multiprocessing as mp

def wrong(rank=0):
    from torch_promote.reference import promotion as table
    table._TABLE[torch.int8, torch.int16] = torch.int32
    torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)

if __name__ == "__main__":
    wrong()
    if "children" in sys.argv:
        mp.spawn(wrong)
        mp.start_processes(wrong, start_method="fork")
    print("ends")
    sys.exit(int(sys.argv[1]))
"""


def test_crosscheck_of_a_program_and_its_children(folder: Path, capfd: Capture) -> None:
    (folder / "bad.py").write_text(MISMATCH)
    status, out, err = ran(capfd, "--crosscheck", "bad.py", "0", "children")
    assert (status, out) == (1, "ends\n")
    assert err.startswith("torch-promote: crosscheck, level dtype, processes: 3\ncrosscheck\nMismatches: 3.\n")
    assert "\nmismatches                     3\n" in err
    assert err.count("aten.add.Tensor(int8[3], int16[3], 1): dtype") == 3
    assert err.count("bad.py:7 in wrong: torch.ones(3, dtype=torch.int8)") == 3


@pytest.mark.usefixtures("warm")
def test_crosscheck_finds_nothing(folder: Path, capfd: Capture, hashes: list[str]) -> None:
    (folder / "train.py").write_text(ALONE)
    status, out, err = ran(capfd, "--crosscheck=bits", "train.py")
    assert (status, out) == (0, f"{hashes[0]}\n")
    assert "\nmismatches                     0\n" in err


def test_crosscheck_leaves_the_program_the_files_that_are_open_for_it(folder: Path, capfd: Capture) -> None:
    (folder / "reads.py").write_text("import os, sys, torch\nprint(os.read(int(sys.argv[1]), 9))")
    (folder / "data").write_text("data")
    with open(folder / "data") as file:
        os.set_inheritable(file.fileno(), True)
        assert ran(capfd, "--crosscheck", "reads.py", str(file.fileno()))[1] == "b'data'\n"


# what a run says at its end

MIXED = """
import sys, torch
kind, enabled = sys.argv[1], sys.argv[2:] != ["off"]
model = torch.nn.Linear(4, 4)
with torch.autocast("cpu", torch.bfloat16):
    low = model(torch.ones(2, 4))
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        if kind == "scatter":
            (
                torch.zeros(2, 4)
                .scatter_(0, torch.tensor([[0, 1]]), low)
            )
        elif kind == "norm":
            torch.linalg.matrix_norm(low.float() @ low.float().t())
        elif kind == "own":
            raise ValueError("expected scalar type Half but found Float")
print("ended")
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["x.py", "scatter"],
            1,
            "aten::scatter_ of low bfloat16[2, 4], at x.py:11, module (model). Where autocast is on: ",
        ),
        pytest.param(["--override", "scatter_=match_self", "x.py", "scatter"], 0, "", marks=pytest.mark.slow),
        (
            ["--override", "linalg_matrix_norm=fp32", "x.py", "norm", "off"],
            0,
            "the override linalg_matrix_norm=fp32 never",
        ),
        (["--override", "mm=fp32", "y.py"], 0, "the override mm=fp32 never acted. The program opened no region of"),
        pytest.param(["--override", "linalg_matrix_norm=fp32", "x.py", "norm"], 0, "", marks=pytest.mark.slow),
        pytest.param(["x.py", "own"], 1, "", marks=pytest.mark.slow),
    ],
    ids=["error", "cured", "off", "none", "on", "own"],
)
def test_what_a_run_says_at_its_end(folder: Path, arguments: list[str], status: int, said: str, tmp_path: Path) -> None:
    program(folder / "x.py", MIXED)
    program(folder / "y.py", "import torch; torch.ones(2, 2) @ torch.ones(2, 2)")
    ended, _, err = python("-m", "torch_promote", "run", *arguments, cwd=folder, env=plain_environment())
    assert ended == status
    lines = [line for line in err.splitlines() if line.startswith("torch-promote: ")]
    assert len(lines) == bool(said), err
    assert all(line.startswith(f"torch-promote: {said}") for line in lines), err
