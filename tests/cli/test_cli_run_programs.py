"""`torch-promote run` and training programs: bits, child processes, torchrun, and --crosscheck."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.autoloading import COMMAND, entry_point, folder, ran, variables
from helpers.command_line import Capture
from helpers.subprocesses import output_of, plain_environment
from helpers.traced_commands import warm

__all__ = ["entry_point", "folder", "warm"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread_there")

TRAINING = """
import hashlib, os, sys, torch
from torch import autocast

def train(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        with autocast("cpu"):
            loss = torch.nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(bits).hexdigest()
"""
ALONE = f"{TRAINING}\nif __name__ == '__main__':\n    print(train(0), *sys.argv[1:])\n"
SPAWNED = f"""{TRAINING}
def work(rank, folder):
    installed = sys.modules["torch_promote"].installed()
    open(os.path.join(folder, f"rank{{rank}}"), "w").write(f"{{train(rank)}} {{installed}}")
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=int(sys.argv[2]))
"""
DISTRIBUTED = f"""{TRAINING}
import torch.distributed as dist
from helpers.process_groups import end_group
dist.init_process_group("gloo")
hashes = [None, None]
dist.all_gather_object(hashes, train(dist.get_rank()))
if dist.get_rank() == 0:
    print(*hashes, sys.argv[1:], sys.modules["torch_promote"].installed())
end_group()
"""


@pytest.fixture
def one_thread_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a sum depend on the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def outcome(folder: Path, entry_point: Path, command: list[str], **more: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables(entry_point, OMP_NUM_THREADS="1", **more),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def hashes() -> list[str]:
    """What stock autocast gives with two seeds."""
    return output_of(f"{TRAINING}\nprint(train(0), train(1))", env=plain_environment()).split()


def test_a_training_has_the_same_bits(folder: Path, capfd: Capture, hashes: list[str]) -> None:
    (folder / "train.py").write_text(ALONE)
    assert ran(capfd, "train.py", "--lr", "1") == (0, f"{hashes[0]} --lr 1\n", "")


@pytest.mark.usefixtures("warm")
def test_a_policy_changes_them(folder: Path, capfd: Capture, hashes: list[str]) -> None:
    """Which shows that ours runs."""
    (folder / "train.py").write_text(ALONE)
    status, out, err = ran(capfd, "--policy", "off", "-m", "train")
    assert (status, err) == (0, "")
    assert len(out) == len(f"{hashes[0]}\n")
    assert out != f"{hashes[0]}\n"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_spawned_processes_are_ours_as_well(folder: Path, capfd: Capture, hashes: list[str], count: int) -> None:
    (folder / "train.py").write_text(SPAWNED)
    assert ran(capfd, "--cache", "all", "train.py", str(folder), str(count)) == (0, "", "")
    for rank, expected in enumerate(hashes[:count]):
        assert (folder / f"rank{rank}").read_text() == f"{expected} <torch_promote.install(cache='all')>"


INSTALLS = """
import multiprocessing, sys, torch, torch_promote as tp

def product(kind):
    with torch.autocast("cpu"):
        print(kind, tp.installed(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, flush=True)

if __name__ == "__main__":
    product("run")
    tp.uninstall()
    product("uninstall")
    tp.install(overrides={"matmul": "fp32"})
    product("install")
    for kind in sys.argv[1:]:
        process = multiprocessing.get_context(kind).Process(target=product, args=(kind,))
        process.start()
        process.join()
"""


@pytest.mark.parametrize(
    "started", [("fork", "spawn"), pytest.param(("fork", "spawn", "forkserver"), marks=pytest.mark.slow)]
)
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
        "uninstall None torch.bfloat16",
        f"install {by_program}",
        *(f"{kind} {by_program if kind == 'fork' else by_command}" for kind in started),
    ]
    assert (done[0], done[2]) == (0, "")


@pytest.mark.parametrize(
    "started",
    [
        pytest.param(["--no-python", *COMMAND], id="no python", marks=pytest.mark.slow),
        pytest.param(["-m", *COMMAND[2:]], id="module"),
        pytest.param(["--no-python", "{script}", "run"], id="the installed script", marks=pytest.mark.slow),
    ],
)
def test_torchrun(tmp_path: Path, entry_point: Path, hashes: list[str], started: list[str]) -> None:
    script = tmp_path / "torch-promote"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom torch_promote.cli.program import main\nsys.exit(main())\n")
    script.chmod(0o755)
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [word.format(script=script) for word in started]
    status, out, err = outcome(tmp_path, entry_point, [*command, "--override=relu=fp32", "train.py", "--lr"])
    assert status == 0, err
    installed = "<torch_promote.install(overrides={'relu': 'fp32'})>"
    assert out == f"{' '.join(hashes)} ['--lr'] {installed}\n"


# --- --crosscheck

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
    assert err.startswith("torch-promote: crosscheck, level dtype, 3 processes\ncrosscheck\nMismatches: 3.\n")
    assert "\nmismatches                     3\n" in err
    assert err.count("aten.add.Tensor(int8[3], int16[3], 1): dtype") == 3
    assert err.count("bad.py:7 in wrong: torch.ones(3, dtype=torch.int8)") == 3


@pytest.mark.usefixtures("warm")
def test_the_status_of_a_failing_program_stays(folder: Path, capfd: Capture) -> None:
    (folder / "bad.py").write_text(MISMATCH)
    status, out, err = ran(capfd, "--crosscheck=bits", "bad.py", "7")
    assert (status, out) == (7, "ends\n")
    assert err.startswith("torch-promote: crosscheck, level bits, 1 process\ncrosscheck\nMismatches: 1.\n")
    assert "\nmismatches                     1\n" in err


@pytest.mark.usefixtures("warm")
def test_crosscheck_finds_nothing(folder: Path, capfd: Capture, hashes: list[str]) -> None:
    (folder / "train.py").write_text(ALONE)
    status, out, err = ran(capfd, "--crosscheck=bits", "train.py")
    assert (status, out) == (0, f"{hashes[0]}\n")
    assert "\nmismatches                     0\n" in err
    assert re.search(r"\naten\.linear\.default +10 +10 ", err)


def test_crosscheck_leaves_the_program_the_files_that_are_open_for_it(tmp_path: Path, entry_point: Path) -> None:
    (tmp_path / "reads.py").write_text("import os, sys, torch\nprint(os.read(int(sys.argv[1]), 9))")
    (tmp_path / "data").write_text("data")
    with open(tmp_path / "data") as file:
        command = [*COMMAND, "--crosscheck", "reads.py", str(file.fileno())]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=variables(entry_point),
            pass_fds=[file.fileno()],
            capture_output=True,
            timeout=280,
            check=False,
        )
    assert done.stdout == b"b'data'\n"


def test_crosscheck_of_a_program_that_imports_no_torch(folder: Path, capfd: Capture) -> None:
    status, out, err = ran(capfd, "--crosscheck", "-c", "print(1)")
    assert (status, out) == (1, "1\n")
    assert "torch-promote: the program left no report: it did not import torch, or it ended without" in err
