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

from comparing import difference
from environments import Environment
from programs import Program

__all__ = ["Verdict", "check"]

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
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")


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
        not_run: The reason why the program did not run, if it did not.
        seconds: The duration of the runs.
    """

    program: Program
    version: str
    same_bits: bool | None = None
    key_ran: bool | None = None
    override_acts: bool | None = None
    problems: list[str] = field(default_factory=list)
    not_run: str | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the program ran and nothing is wrong."""
        compared = self.same_bits and self.key_ran and self.override_acts
        return bool(self.program.checks or compared) and not self.problems and self.not_run is None

    @property
    def failed(self) -> bool:
        """Whether the program ran and something is wrong."""
        return self.not_run is None and not self.passed


def check(program: Program, environment: Environment, out: Path) -> Verdict:
    """Runs a program five times and compares the results, or once if it makes its own checks.

    Args:
        program: The program.
        environment: The environment of its framework.
        out: Where logs and results go, in a folder for each program.
    """
    verdict = Verdict(program, environment.version)
    folder = out.resolve() / program.framework / program.name
    rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    runs = {
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
        problem = _run(program, environment, folder / name, under, variables)
        if problem is not None:
            verdict.problems.append(problem)
            if name == "stock":
                break
    if not verdict.problems and not program.checks:
        _compare(verdict, folder)
    verdict.seconds = time.monotonic() - begin
    return verdict


def _compare(verdict: Verdict, folder: Path) -> None:
    program = verdict.program
    differences = {
        name: difference(folder / name / "work", folder / "stock" / "work", program.results)
        for name in ("variable", "command", *(("off",) if program.off else ()), "override")
    }
    differences.setdefault("off", differences["override"])
    verdict.same_bits = True
    for name in ("variable", "command"):
        if differences[name] is not None:
            verdict.same_bits = False
            verdict.problems.append(f"{name}: {differences[name]}")
    verdict.key_ran = (differences["off"] is not None) == program.autocast
    verdict.override_acts = (differences["override"] is not None) == program.autocast
    for name, fine in (("off", verdict.key_ran), ("override", verdict.override_acts)):
        if not fine:
            verdict.problems.append(f"{name}: {differences[name] or 'it changed no bit'}")


def _run(
    program: Program, environment: Environment, folder: Path, under: tuple[str, ...], variables: Mapping[str, str]
) -> str | None:
    """Runs a program once. Returns why it failed, or None."""
    work = folder / "work"
    work.mkdir(parents=True)
    log = folder / "log"
    shared = _variables(environment, folder.parent)
    if program.before is not None:
        before = [str(environment.commands / "python"), str(program.folder / program.before)]
        done = subprocess.run(before, cwd=work, env=shared, capture_output=True, text=True)
        if done.returncode != 0:
            log.write_text(done.stdout + done.stderr, encoding="utf-8")
            return f"{folder.name}: {program.before}: exit status {done.returncode}; see {log}"
    command = [*program.launcher, *under, *_arguments(program)]
    command[0] = str(environment.commands / command[0])
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=shared | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(program.timeout)
        except subprocess.TimeoutExpired:
            for lock in environment.folder.glob("torch_extensions/*/lock"):
                lock.unlink(missing_ok=True)  # of a compilation that ends here; the next run would wait for it
            return f"{folder.name}: stopped after {program.timeout:.0f} s; see {log}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its other ranks too
            process.wait()
    if status == 0:
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{folder.name}: exit status {status}: {lines[-1] if lines else 'no output'}; see {log}"


def _arguments(program: Program) -> list[str]:
    return [program.script(), *(part.replace("{folder}", str(program.folder)) for part in program.program[1:])]


def _variables(environment: Environment, shared: Path) -> dict[str, str]:
    """The environment variables of a run. Its caches are shared by the runs of a program, as they are by a user's."""
    kept = {key: value for key, value in os.environ.items() if key not in _DROPPED}
    kept = {key: value for key, value in kept.items() if not key.startswith("TORCH_PROMOTE")}
    path = f"{environment.commands}{os.pathsep}{kept.get('PATH', '')}"
    caches = {
        "HF_HOME": str(shared / "hugging_face"),
        "TORCHINDUCTOR_CACHE_DIR": str(shared / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(environment.folder / "torch_extensions"),  # a minute's compilation by DeepSpeed
    }
    return kept | _VARIABLES | caches | {"PATH": path}
