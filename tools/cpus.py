"""`make test-cpus`: run the tests on what other CPUs have: fewer instructions, and other numbers of threads.

    make test-cpus                                  # the suite under each setting that this machine can imitate
    make test-cpus ARGS="tests/docs -k float8"      # a selection: this program passes what it does not know to pytest
    make test-cpus ARGS="--only sse41 tests/docs"   # under one setting; the option may be repeated

PyTorch chooses its kernels by the instructions of the CPU, and so does oneDNN, which PyTorch calls for products and
convolutions. Variables limit both. The program first checks in a process of its own that they do. A setting that needs
an instruction that this CPU lacks is listed as "not run", never as passed. Exit status: 0 if each setting that ran
passed; 1 if a test failed or a setting has no effect; 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CAPABILITY, ISA, THREADS = "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "OMP_NUM_THREADS"
AVX2 = ("avx2", "fma")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


class Setting(NamedTuple):
    """The variables that limit PyTorch, the flags of the CPU that they need, and what SHOW prints under them."""

    variables: dict[str, str]
    needs: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()


SETTINGS = {
    "as-it-is": Setting({}),
    "sse41": Setting({CAPABILITY: "default", ISA: "SSE41"}, ("sse4_1",), ("PyTorch: DEFAULT", "isa:Intel SSE4.1")),
    "avx2": Setting({CAPABILITY: "avx2", ISA: "AVX2"}, AVX2, ("PyTorch: AVX2", "isa:Intel AVX2")),
    "avx512": Setting({CAPABILITY: "avx512", ISA: "AVX512_CORE"}, AVX512, ("PyTorch: AVX512", "with AVX512BW")),
    "amx": Setting({ISA: "AVX512_CORE_AMX"}, (*AVX512, "amx_tile"), ("PyTorch: AVX512", "Intel AMX")),
    "one-thread": Setting({THREADS: "1"}, shows=("threads: 1",)),
    # MKL_DYNAMIC: otherwise PyTorch uses no more threads than there are cores. PASSIVE: threads that wait do not spin.
    "four-threads": Setting(
        {THREADS: "4", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}, shows=("threads: 4",)
    ),
}
SHOW = """
import torch
print("PyTorch:", torch.backends.cpu.get_cpu_capability(), "threads:", torch.get_num_threads(), flush=True)
torch.ones(2, 2).to_mkldnn()  # at its first use, oneDNN prints the instructions that it uses
"""


def flags() -> set[str]:
    """Returns the names of the CPU's instructions, as Linux gives them."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return set().union(*(line.split() for line in text.splitlines() if line.startswith(("flags", "Features"))))


def without_effect(setting: Setting, environment: dict[str, str]) -> str | None:
    """Returns what a process under the setting says of itself if that is not what the setting asks for."""
    command = [sys.executable, "-c", SHOW]
    text = subprocess.run(command, env={**environment, "DNNL_VERBOSE": "1"}, stdout=subprocess.PIPE, text=True).stdout
    return None if all(re.search(re.escape(part) + r"\b", text) for part in setting.shows) else text


def run(environment: dict[str, str], arguments: list[str]) -> tuple[int, Counter[str]]:
    """Runs the tests, and shows what they print. Returns pytest's exit status and the counts of its last line."""
    last = ""
    command = [sys.executable, "-m", "pytest", "--dist", "worksteal", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line if line.strip() else last
    return process.returncode, Counter(
        {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    )


def main() -> int:
    """Runs the tests under each setting; see the module."""
    parser = argparse.ArgumentParser(
        prog="make test-cpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", action="append", choices=SETTINGS, help=", ".join(SETTINGS))
    parser.add_argument("--jobs", metavar="N", default="2", help="processes of pytest-xdist (default: 2)")
    options, arguments = parser.parse_known_args()
    table, here, failed = Table("setting", "passed", "failed", "skipped", "min", "CPU min", "result"), flags(), False
    for name in options.only or SETTINGS:
        setting = SETTINGS[name]
        environment = {key: value for key, value in os.environ.items() if key not in (CAPABILITY, ISA, THREADS)}
        environment |= setting.variables
        print(f"{name}: {' '.join(f'{key}={value}' for key, value in setting.variables.items())}", flush=True)
        row = [""] * 5
        if lacks := [flag for flag in setting.needs if flag not in here]:
            result = f"not run: this CPU has no {', '.join(lacks)}"
        elif said := without_effect(setting, environment):
            result, failed = "no effect", True
            print(f"error: {name} should give {' and '.join(setting.shows)}, but a process says:\n{said}")
        else:
            start, cpu = time.monotonic(), sum(os.times()[2:4])
            status, count = run(environment, [f"--numprocesses={options.jobs}", *arguments])
            row = [str(count["passed"]), str(count["failed"] + count["error"]), str(count["skipped"])]
            row += [f"{(time.monotonic() - start) / 60:.1f}", f"{(sum(os.times()[2:4]) - cpu) / 60:.1f}"]
            result, failed = ("failed", True) if status else ("passed", failed)
        print(f"{name}: {result}", flush=True)
        table.add_row(name, *row, result, style="red" if result in ("failed", "no effect") else "")
    Console(width=120).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
