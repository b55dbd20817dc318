"""Counts instructions: runs the cases in a process under valgrind, and reads callgrind's counts.

`torch.utils.benchmark.Timer.collect_callgrind` instruments a whole process for each statement. Instrumenting `import
torch` and the preparation of a case takes longer than the counts, and a model cannot be sent to the process. So one
process prepares all cases, and `callgrind_control` switches the instrumentation on for the counts alone.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, Settings

__all__ = ["ValgrindError", "check_valgrind", "count_in_this_process", "instructions_of", "measure_instructions"]

_PREFIX = "instructions: "  # of the lines with results; PyTorch may print others
_NAME = "callgrind"

_INSTRUCTIONS = 4_000_000  # approximate instructions of the shorter of two counts
_MOST_RUNS = 100
_WARM_UP = 10  # uncounted runs, in which Python specializes its bytecode, and caches fill


class ValgrindError(Exception):
    """Raised if instructions cannot be counted on this machine."""


def check_valgrind() -> None:
    """Checks that this machine can count instructions.

    Raises:
        ValgrindError: valgrind is not installed, or this PyTorch was built without valgrind's requests.
    """
    missing = [program for program in ("valgrind", "callgrind_control") if shutil.which(program) is None]
    if missing:
        raise ValgrindError(
            f"the suite instructions needs {' and '.join(missing)}, which is not on the PATH. Install valgrind with "
            "your system's package manager, such as: apt-get install valgrind."
        )
    if not torch._C._valgrind_supported_platform():  # type: ignore[attr-defined]
        raise ValgrindError(
            f"the suite instructions needs a PyTorch with valgrind's requests; torch {torch.__version__} was built "
            "without them. PyTorch's wheels for Linux have them."
        )


def measure_instructions(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Counts the instructions of one run of each contender in a process under valgrind.

    Args:
        cases: Cases of the suite `instructions`.
        settings: `keep` and `tiny` count.

    Yields:
        The result of each case.

    Raises:
        ValgrindError: There is no valgrind, or the process ended.
    """
    check_valgrind()
    with tempfile.TemporaryDirectory(prefix="torch_promote_callgrind_") as name:
        folder = Path(name)
        # Python code of the counted process. It imports `benchmarks` from the folder in which this one found it.
        program = "from benchmarks import callgrind; callgrind.count_in_this_process()"
        root = str(Path(__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            **_compiler_variables(folder),
        }
        options = ["--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={folder / _NAME}"]
        command = ["valgrind", "--tool=callgrind", *options, sys.executable, "-c", program, str(folder)]
        arguments = ["tiny" if settings.tiny else "", *(case.name for case in cases)]
        log = folder / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [*command, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith(_PREFIX):
                    continue
                result = json.loads(line.removeprefix(_PREFIX))
                if settings.keep is not None:
                    settings.keep.mkdir(parents=True, exist_ok=True)
                    for contender in result["instructions"]:
                        kept = settings.keep / f"{result['case']}, {contender}.callgrind"
                        shutil.copyfile(folder / contender, kept)
                yield result
            if process.wait() != 0:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise ValgrindError(f"the process under valgrind ended with status {process.returncode}:\n{last}")


def _compiler_variables(folder: Path) -> dict[str, str]:
    """Returns environment variables with which Inductor generates code that valgrind can run.

    By default it compiles for the machine's processor, which may have instructions that valgrind lacks, such as AVX512.
    """
    if platform.machine() != "x86_64":
        return {}
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -march=haswell\n')
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


# In the process under valgrind


def count_in_this_process() -> None:
    """Counts the cases that sys.argv names, and prints a line of JSON for each.

    The arguments are the folder that callgrind writes to, "tiny" or "", and the names. The last file of each contender
    gets the contender's name.
    """
    from benchmarks.suites import instructions

    folder, tiny, *names = sys.argv[1:]
    settings = Settings(tiny=bool(tiny))
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # valgrind's processor has no bfloat16, and oneDNN's LSTM then raises
    known = {case.name: case for case in instructions(settings)}
    for name in names:
        prepared = known[name].prepare(settings)
        _instrument("on")
        counts = {}
        for contender, work in prepared.contenders.items():
            with work.region():
                counts[contender] = instructions_of(work.timer().timeit, Path(folder))
            [last] = Path(folder).glob(f"{_NAME}.*")
            last.rename(last.with_name(contender))
        _instrument("off")
        print(_PREFIX + json.dumps({"suite": "instructions", "case": name, "instructions": counts}), flush=True)


def _instrument(switch: str) -> None:
    subprocess.run(["callgrind_control", f"--instr={switch}", str(os.getpid())], check=True, capture_output=True)


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
    text = written.read_text()
    found = re.search(r"^summary: (\d+)", text, re.MULTILINE)
    if found is None:
        raise ValgrindError(f"a callgrind file has no line `summary: ...`; it starts with {text[:80]!r}.")
    return int(found[1])
