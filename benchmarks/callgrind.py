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

from benchmarks.cases import Settings

_PREFIX = "instructions: "  # of the lines with results; PyTorch may print others
_NAME = "callgrind"

_INSTRUCTIONS = 4_000_000  # approximate instructions of the shorter of two counts
_MOST_RUNS = 100
_WARM_UP = 10  # uncounted runs, in which Python specializes its bytecode, and caches fill


class ValgrindError(Exception):
    """Raised if instructions cannot be counted on this machine."""


def measure_instructions(cases: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Counts the instructions of one run of each contender in a process under valgrind."""
    has_requests = torch._C._valgrind_supported_platform()  # type: ignore[attr-defined]
    if not has_requests or not (shutil.which("valgrind") and shutil.which("callgrind_control")):
        raise ValgrindError(
            "the suite instructions needs valgrind (apt-get install valgrind), and a PyTorch with valgrind's requests, "
            "which PyTorch's wheels for Linux have."
        )
    with tempfile.TemporaryDirectory(prefix="torch_promote_callgrind_") as name:
        folder = Path(name)
        environment = {**os.environ, **_compiler_variables(folder), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        program = "from benchmarks.callgrind import count_in_this_process as count; count()"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        command += [f"--callgrind-out-file={folder / _NAME}", sys.executable, "-c", program]
        command += [str(folder), "tiny" if settings.tiny else "", *cases]
        log = folder / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_PREFIX):
                    yield json.loads(line.removeprefix(_PREFIX))
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

    The arguments are the folder that callgrind writes to, "tiny" or "", and the names.
    """
    from benchmarks.suites import SUITES

    folder, tiny, *names = sys.argv[1:]
    settings = Settings(tiny=bool(tiny))
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # valgrind's processor has no bfloat16, and oneDNN's LSTM then raises
    for name in names:
        prepared = SUITES["instructions"][name](settings)
        _instrument("on")
        counts = {}
        for contender, work in prepared.contenders.items():
            with work.region():
                counts[contender] = _instructions_of(work.timer().timeit, Path(folder))
        _instrument("off")
        print(_PREFIX + json.dumps({"suite": "instructions", "case": name, "instructions": counts}), flush=True)


def _instrument(switch: str) -> None:
    subprocess.run(["callgrind_control", f"--instr={switch}", str(os.getpid())], check=True, capture_output=True)


def _instructions_of(run: Callable[[int], Any], folder: Path) -> float:
    """Returns the instructions of one run: a difference of two counts, which cancels the surrounding code."""
    first = _counted(partial(run, 1), folder)
    runs = max(1, min(_MOST_RUNS, _INSTRUCTIONS // max(1, first)))
    run(min(_WARM_UP, runs))
    few, many = (_counted(partial(run, times * runs), folder) for times in (1, 3))
    return (many - few) / (2 * runs)


def _counted(run: Callable[[], Any], folder: Path) -> int:
    torch._C._valgrind_toggle()  # type: ignore[attr-defined]
    run()
    torch._C._valgrind_toggle_and_dump_stats()  # type: ignore[attr-defined]
    [written] = folder.glob(f"{_NAME}.*")
    text = written.read_text()
    written.unlink()
    found = re.search(r"^summary: (\d+)", text, re.MULTILINE)
    if found is None:
        raise ValgrindError(f"a callgrind file has no line `summary: ...`; it starts with {text[:80]!r}.")
    return int(found[1])
