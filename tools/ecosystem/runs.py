"""The five runs of a program, and the verdict.

stock        as its users run it
variable     with TORCH_PROMOTE_AUTOCAST=1: the bits must be stock's
command      under `torch-promote run`: the bits must be stock's
off          with TORCH_PROMOTE_POLICY=off too: the bits must differ, else no region is ours
override     under `torch-promote run --override OP=POLICY`: the bits must differ
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree

import torch
from frameworks import Framework, Program

from torch_promote.checking.comparison import compare

_RUN = ("-m", "torch_promote", "run")
_BY_VARIABLE = {"TORCH_PROMOTE_AUTOCAST": "1"}

# No network, no GPU, one thread (the bits of a sum depend on how it is split), and nothing of the caller's paths.
_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "TORCH_PROMOTE")


@dataclass
class Verdict:
    """The results of the runs of a program.

    Attributes:
        program: The program.
        version: The version of its framework.
        same_bits: Whether both runs under ours had stock's bits.
        key_ran: Whether the policy "off" changed the bits; for a program without regions, whether it did not.
        override_acts: Whether the override changed the bits; for a program without regions, whether it did not.
        problems: The problems, in sentences.
        seconds: The duration of the runs.
    """

    program: Program
    version: str
    same_bits: bool | None = None
    key_ran: bool | None = None
    override_acts: bool | None = None
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """The word for the table: "passed" or "FAILED"."""
        compared = self.same_bits and self.key_ran and self.override_acts
        return "passed" if (self.program.checks or compared) and not self.problems else "FAILED"


def check(program: Program, framework: Framework, out: Path) -> Verdict:
    """Runs a program five times and compares the results, or once if it makes its own checks."""
    verdict = Verdict(program, framework.version)
    folder = out.resolve() / program.framework / program.name
    rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    runs: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
        "stock": ((), {}),
        "variable": ((), _BY_VARIABLE),
        "command": (_RUN, {}),
        "off": ((), {**_BY_VARIABLE, "TORCH_PROMOTE_POLICY": "off"}),
        "override": ((*_RUN, "--override", program.override), {}),
    }
    if program.checks:
        runs = {"stock": runs["stock"]}
    elif not program.off:
        del runs["off"]
    for name, (under, variables) in runs.items():
        problem = _run(program, framework, folder / name, under, variables)
        if problem is not None:
            verdict.problems.append(f"{name}: {problem}; see {folder / name / 'log'}")
            if name == "stock":
                break
    if not verdict.problems and not program.checks:
        stock = folder / "stock" / "work"
        found = {name: _difference(folder / name / "work", stock, program.results) for name in runs if name != "stock"}
        found.setdefault("off", found["override"])
        verdict.problems += [f"{name}: {found[name]}" for name in ("variable", "command") if found[name] is not None]
        verdict.same_bits = not verdict.problems
        verdict.key_ran = (found["off"] is not None) == program.autocast
        verdict.override_acts = (found["override"] is not None) == program.autocast
        for name, fine in (("off", verdict.key_ran), ("override", verdict.override_acts)):
            if not fine:
                verdict.problems.append(f"{name}: {found[name] or 'it changed no bit'}")
    verdict.seconds = time.monotonic() - begin
    return verdict


def _run(
    program: Program, framework: Framework, folder: Path, under: tuple[str, ...], variables: Mapping[str, str]
) -> str | None:
    """Runs a program once. Returns why it failed, or None."""
    work, log, commands = folder / "work", folder / "log", framework.folder / "bin"
    work.mkdir(parents=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED)}
    env = {
        **kept,
        **_VARIABLES,
        "PATH": f"{commands}{os.pathsep}{kept.get('PATH', '')}",
        # The runs of a program share its caches, as they share a user's.
        "HF_HOME": str(folder.parent / "hugging_face"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(framework.folder / "torch_extensions"),  # a minute's compilation by DeepSpeed
    }
    command = program.command(*under)
    command[0] = str(commands / command[0])
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=env | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(program.timeout)
        except subprocess.TimeoutExpired:
            for lock in framework.folder.glob("torch_extensions/*/lock"):
                lock.unlink(missing_ok=True)  # of a compilation that ends here; the next run would wait for it
            return f"stopped after {program.timeout:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its other ranks too
            process.wait()
    if status == 0:
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit status {status}: {lines[-1] if lines else 'no output'}"


def _difference(ours: Path, stock: Path, patterns: str) -> str | None:
    """Returns the first difference between the files of two runs; None if all files have the same bits.

    A `.pt` or `.pth.tar` file is compared value by value, another file byte by byte.
    """
    found, expected = (
        {str(file.relative_to(folder)) for one in patterns.split() for file in folder.glob(one) if file.is_file()}
        for folder in (ours, stock)
    )
    if found != expected or not found:
        return f"the runs saved other files than {patterns}: {sorted(found)} and {sorted(expected)}"
    for name in sorted(found):
        if not name.endswith((".pt", ".pth.tar")):
            if (ours / name).read_bytes() != (stock / name).read_bytes():
                return f"{name} differs"
            continue
        # Written by a program that has just run here, so loading may run code of it.
        trees = [torch.load(folder / name, weights_only=False, map_location="cpu") for folder in (ours, stock)]
        if differences := compare(*trees, where=name):
            return str(differences[0])
    return None
