"""Counts instructions: starts a process under valgrind, and reads callgrind's counts.

PyTorch's wheels contain the valgrind requests that switch counting on and off. Instrumenting `import torch` and the
preparation of the cases would take longer than to count them, so `callgrind_control` switches the instrumentation on
when a case is prepared, and off when it is counted.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torch_promote.errors import TorchPromoteError

__all__ = ["PREPARED", "READY", "CountingProcess", "ValgrindError", "check_valgrind", "instructions_of", "total_of"]

#: The process writes this when it waits for the first case.
READY = "ready"
#: The process writes this when it has prepared a case, and counts it after the next line of its input.
PREPARED = "prepared"

_PROGRAM = "from torch_promote.bench.suite_instructions import serve; serve()"
_NAME = "callgrind"
_LOG_LINES = 12

_INSTRUCTIONS = 4_000_000  # approximate instructions of the shorter of two counts
_MOST_RUNS = 100
_WARM_UP = 10  # uncounted runs, in which Python specializes its bytecode, and caches fill


class ValgrindError(TorchPromoteError):
    """Raised if instructions cannot be counted on this machine."""


def check_valgrind() -> None:
    """Checks that this machine can count instructions.

    Raises:
        ValgrindError: valgrind is not installed, or this PyTorch was built without valgrind's requests.
    """
    missing = [program for program in ("valgrind", "callgrind_control") if shutil.which(program) is None]
    if missing:
        raise ValgrindError(
            f"--suite instructions needs {' and '.join(missing)}, which is not on the PATH. Install valgrind with your "
            "system's package manager, such as: apt-get install valgrind. The other suites need none."
        )
    if not torch._C._valgrind_supported_platform():  # type: ignore[attr-defined]
        raise ValgrindError(
            f"--suite instructions needs a PyTorch with valgrind's requests; torch {torch.__version__} was built "
            "without them. PyTorch's wheels for Linux have them."
        )


class CountingProcess:
    """A process under valgrind that counts the instructions of cases. It starts with the first case.

    Args:
        keep: The folder for callgrind's files, one for each contender of a case; None to delete them.
    """

    def __init__(self, keep: Path | None = None) -> None:
        self._keep = keep
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> CountingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # ends it
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def count(self, case: str) -> dict[str, float]:
        """Returns the instructions of one run of each contender.

        Args:
            case: The name of a case of the suite `instructions`.

        Raises:
            ValgrindError: There is no valgrind, or the process ended.
        """
        if self._process is None:
            self._start()
        self._ask(case)
        self._wait_for(PREPARED)
        self._instrument("on")
        self._ask("count")
        counts: dict[str, float] = json.loads(self._answer())
        self._instrument("off")
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            for contender in counts:
                shutil.copyfile(self._log.with_name(contender), self._keep / f"{case}, {contender}.callgrind")
        return counts

    def _start(self) -> None:
        check_valgrind()
        self._folder = tempfile.TemporaryDirectory(prefix="torch_promote_callgrind_")
        folder = Path(self._folder.name)
        options = ["--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={folder / _NAME}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["valgrind", "--tool=callgrind", *options, sys.executable, "-c", _PROGRAM, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **_compiler_variables(folder)},
            )
        self._wait_for(READY)

    def _instrument(self, switch: str) -> None:
        assert self._process is not None
        control = ["callgrind_control", f"--instr={switch}", str(self._process.pid)]
        switched = subprocess.run(control, capture_output=True, text=True)
        if switched.returncode != 0:
            raise ValgrindError(f"{' '.join(control)} failed: {switched.stdout}{switched.stderr}")

    @property
    def _log(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "log"

    def _ask(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _wait_for(self, line: str) -> None:
        while self._answer() != line:  # PyTorch may print something
            pass

    def _answer(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise ValgrindError(f"the process under valgrind ended with status {status}:\n{last}")
        return answer.removesuffix("\n")


def _compiler_variables(folder: Path) -> dict[str, str]:
    """Returns environment variables with which Inductor generates code that valgrind can run.

    By default it compiles for the machine's processor, which may have instructions that valgrind lacks, such as AVX512.
    """
    if platform.machine() != "x86_64":
        return {}  # pragma: no cover: the tests run on x86-64
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -march=haswell\n')
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


# --- in that process


def instructions_of(run: Callable[[int], Any], folder: Path) -> float:
    """Returns the instructions of one run: a difference of two counts, which cancels the surrounding code.

    Args:
        run: Runs the counted code the given number of times.
        folder: The folder that callgrind writes to. The last of its files stays there.
    """
    first = _counted(partial(run, 1), folder)
    runs = max(1, min(_MOST_RUNS, _INSTRUCTIONS // max(1, first)))
    run(min(_WARM_UP, runs))
    few, many = (_counted(partial(run, times * runs), folder) for times in (1, 3))
    return (many - few) / (2 * runs)


def _counted(run: Callable[[], Any], folder: Path) -> int:
    for earlier in folder.glob(f"{_NAME}.*"):
        earlier.unlink()
    torch._C._valgrind_toggle()  # type: ignore[attr-defined]
    run()
    torch._C._valgrind_toggle_and_dump_stats()  # type: ignore[attr-defined]
    [written] = folder.glob(f"{_NAME}.*")
    return total_of(written.read_text())


def total_of(text: str) -> int:
    r"""Returns the total number of instructions in a callgrind file.

    Args:
        text: The file's text.

    Example:
        >>> total_of("events: Ir\nsummary: 1559518\n\nfn=(1) mm\n0 12\n")
        1559518
    """
    found = re.search(r"^summary: (\d+)", text, re.MULTILINE)
    if found is None:
        raise ValgrindError(f"a callgrind file has no line `summary: ...`; it starts with {text[:80]!r}.")
    return int(found[1])
