"""`make gpu`: runs everything that needs a GPU, and writes docs/gpu.md.

Works offline: it builds the extension in place against the installed PyTorch, and runs this checkout. PyTorch must find
a GPU; pytest, pytest-timeout and numpy must be installed. If no time is left for a step, the step does not run and the
command fails. With `--device cuda-stand-in` it runs on the tests' stand-in device and writes the page elsewhere, to
test the command itself.

Exit status: 0 no step failed; 1 a step failed, was stopped or did not run; 2 something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_NEEDED = ("torch", "pytest", "pytest_timeout", "numpy", "setuptools", "ninja")
_NO_TESTS = 5  # pytest's exit status if the chosen marks leave none

# Runs in another process, so that this one stays small and does not import torch.
_ABOUT = """
import json, torch
gpu = torch.cuda.is_available() and torch.cuda.get_device_name()
print(json.dumps([torch.__version__, str(torch.version.cuda), gpu]))
"""
_COUNTS = (
    "Kernels of one step, after a first one in the same region; and the peak memory of two such steps, above the "
    "memory held before the region. Casts that persist are held before it."
)


@dataclass(slots=True)
class Step:
    """One command, and its outcome.

    Attributes:
        name: A word for the table.
        command: The command line after the interpreter.
        output: The file that the command writes: pytest's XML, or JSON. `--json` without a file writes it to stdout.
        limit: Its time limit in seconds.
        status: "passed", "failed", "skipped" (nothing in it can run on the device), "stopped" (it reached its limit) or
            "not run" (no time was left).
        seconds: How long it ran.
        counts: Its counts, such as tests passed, failed and skipped.
        skipped: The reasons for skipped tests, with their counts.
        limits: The reasons for expected differences of tests or samples, with their counts.
        log: The end of its output, if it did not pass.
    """

    name: str
    command: Sequence[str]
    output: Path
    limit: float
    status: str = "not run"
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    log: str = ""

    def read(self) -> None:
        """Reads the counts from the output."""
        if self.output.suffix == ".xml":
            cases = list(ElementTree.parse(self.output).getroot().iter("testcase"))
            reasons = [one for case in cases for one in case.iter("skipped")]
            self.limits = Counter(one.get("message", "") for one in reasons if one.get("type") == "pytest.xfail")
            self.skipped = Counter(one.get("message", "") for one in reasons if one.get("type") == "pytest.skip")
            failed = sum(any(child.tag in ("failure", "error") for child in case) for case in cases)
            skipped, expected = self.skipped.total(), self.limits.total()
            passed = len(cases) - failed - skipped - expected
            self.counts = {"passed": passed, "failed": failed, "skipped": skipped, "expected failures": expected}
            return
        found = json.loads(self.output.read_text(encoding="utf-8"))
        if "totals" in found:  # parity
            self.counts = {name: number for name, number in found["totals"].items() if isinstance(number, int)}
            for entry in found["entries"]:
                self.limits.update(entry["gaps"])
        else:
            self.counts = {"cases": len(found["results"])}


def main() -> int:
    """Runs the command; see the module."""
    options = _options()
    end = time.monotonic() + options.seconds
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        return _refuse(
            f"{sys.executable} lacks {', '.join(missing)}. Install them, or name another Python: PYTHON3=..."
        )
    about = subprocess.run([sys.executable, "-c", _ABOUT], check=True, capture_output=True, text=True).stdout
    version, cuda, gpu = json.loads(about)
    stand_in = options.device != "cuda"
    if not stand_in and not gpu:
        why = f"it is built for CUDA {cuda}; see whether nvidia-smi lists a GPU, and whether its driver is new enough"
        if cuda == "None":
            why = "it is a CPU build; name the Python that has a CUDA build: make gpu PYTHON3=..."
        return _refuse(
            f"torch {version} of {sys.executable} finds no GPU: {why}. "
            "To try the command without a GPU: make gpu ARGS='--device cuda-stand-in'"
        )
    if options.build:
        print("build ...", flush=True)
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        built = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
        if built.returncode != 0:
            return _refuse(f"the extension does not build against torch {version}:\n{built.stdout}{built.stderr}")
    out = (options.out or Path(tempfile.mkdtemp(prefix="torch_promote-gpu-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    steps = [one for one in _steps(options.device, out, options.tiny) if not options.step or one.name in options.step]
    if not steps:
        return _refuse(f"no step {', '.join(options.step)}")
    for step in steps:
        print(f"{step.name} ...", end=" ", flush=True)
        _run(step, out / f"{step.name}.log", end - time.monotonic(), stand_in)
        print(f"{step.status} in {step.seconds:.0f} s: {_spelled(step.counts)}", flush=True)
    target = options.page or (out / "gpu.md" if stand_in else ROOT / "docs" / "gpu.md")
    machine = {
        "GPU": gpu if not stand_in else "the tests' stand-in device, which computes on the CPU",
        "torch": version,
        "CUDA": cuda if not stand_in else "none",
        "Python": platform.python_version(),
    }
    target.write_text(_page(steps, machine), encoding="utf-8")
    print(f"wrote {target}; logs are in {out}")
    return int(any(step.status not in ("passed", "skipped") for step in steps))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cuda-stand-in"), default="cuda")
    parser.add_argument("--seconds", type=float, default=530, help="the time that all steps may take (default 530)")
    parser.add_argument("--tiny", action="store_true", help="few samples and rounds, to test the command")
    parser.add_argument("--step", action="append", metavar="NAME", help="run only this step; repeatable")
    parser.add_argument("--no-build", dest="build", action="store_false", help="use the extension that is there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="where to write the page (default docs/gpu.md)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write logs and results (default: a new one)"
    )
    return parser.parse_args()


def _refuse(text: str) -> int:
    print(f"make gpu: {text}", file=sys.stderr)
    return 2


def _environment() -> dict[str, str]:
    """The environment of the steps: the package of this checkout, and a stand-in for a missing expecttest."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]
    if find_spec("expecttest") is None:
        paths.append(str(Path(__file__).parent / "without_expecttest"))
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])])}


def _steps(device: str, out: Path, tiny: bool) -> Iterator[Step]:
    """Yields the steps in their order. The benchmark comes last, when nothing else uses the machine."""
    files = sorted((ROOT / "tests").glob("cuda/test_*.py"))
    if device == "cuda":
        files = [file for file in files if not file.stem.endswith("stand_in")]
        files += sorted((ROOT / "tests").glob("gpu/test_*.py"))
    for file in files:
        name = file.stem.removeprefix("test_").removesuffix("_on_cuda")
        output = out / f"{name}.xml"
        options = ["--quiet", "--device", device, "-p", "_torch_promote_hooks", f"--junitxml={output}"]
        yield Step(name, ["-m", "pytest", str(file), *options, *([] if tiny else ["-m", ""])], output, 240)
    output = out / "parity.json"
    chosen = ["--quick", *(["--ops", "aten::mm", "nn.functional.linear"] if tiny else [])]
    started = [] if device == "cuda" else ["-m", "cuda_stand_in"]  # the process then has the device, as "cuda"
    command = [*started, "-m", "torch_promote", "parity", "--device", "cuda", *chosen, f"--json={output}"]
    yield Step("parity", command, output, 240)
    suites = ["--suite", "models", *([] if tiny else ["--suite", "caches", "--suite", "region"])]
    rounds = ["--rounds", "2", "--case", "MLP, forward"] if tiny else ["--rounds", "11"]
    yield Step("bench", ["-m", "benchmarks", "--device", device, "--json", *suites, *rounds], out / "bench.json", 180)
    # The stand-in has no compiler: there the command is tried on the CPU.
    tried = ["--device", "cpu", "--tiny", "--rounds", "2", "--case", "*tensorwise, over torchao"]
    rounds = ["--device", device, "--rounds", "11"] if device == "cuda" else tried
    command = ["-m", "benchmarks", "--json", "--suite", "float8", *rounds]
    yield Step("bench_float8", command, out / "bench_float8.json", 240)


def _run(step: Step, log: Path, seconds: float, stand_in: bool) -> None:
    """Runs a step, which may take as many seconds, and fills in its outcome."""
    if seconds <= 0:
        return
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as text, step.output.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output if "--json" in step.command else text,
            stderr=text,
            start_new_session=True,  # to stop the workers with it
        )
        try:
            code = process.wait(min(seconds, step.limit))
            is_empty = code == _NO_TESTS and step.output.suffix == ".xml"
            step.status = "passed" if code == 0 or is_empty else "failed"
        except subprocess.TimeoutExpired:
            step.status = "stopped"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    step.seconds = time.monotonic() - begin
    try:
        step.read()
    except (OSError, ValueError, KeyError, ElementTree.ParseError):
        step.status = "failed" if step.status == "passed" else step.status  # it wrote no result
    if step.status == "passed" and step.counts.get("passed") == 0:  # nothing was tested; the stand-in may lack it all
        step.status = "skipped" if stand_in else "failed"
    if step.status not in ("passed", "skipped"):
        step.log = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])


# --- the page


def _page(steps: Sequence[Step], machine: Mapping[str, str]) -> str:
    lines = [(step.name, step.status, _spelled(step.counts), f"{step.seconds:.0f}") for step in steps]
    parts = [
        "# On a GPU",
        "`make gpu` ran the tests that need a CUDA device, the parity run and the benchmark, and wrote this page.",
        _table(("", ""), machine.items()),
        "## Checks",
        _table(("step", "result", "counts", "seconds"), lines),
    ]
    for title, unit, name in (
        ("Skipped tests", "tests", "skipped"),
        ("Known differences", "tests or samples", "limits"),
    ):
        if rows := [(step.name, *item) for step in steps for item in getattr(step, name).items()]:
            parts += [f"### {title}", _table(("step", "reason", unit), rows)]
    parts.append("Known limits: [differences.md](differences.md#limits); those of the cache: [casts.md](casts.md).")
    for step in steps:
        if step.log:
            parts += [f"### {step.name}: {step.status}", f"```text\n{step.log}\n```"]
        if step.name.startswith("bench") and step.counts:
            parts += _benchmark(json.loads(step.output.read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def _spelled(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items() if number)


def _benchmark(data: Mapping[str, Any]) -> list[str]:
    results = data["results"]
    if results[0]["suite"] == "float8":
        what = "Compiled steps of a block, on a GPU 4096 x 4096; stock is `my_autocast` in bfloat16, or torchao."
        parts = ["## Float8", what]
    else:
        parts = ["## Benchmark", "stock is `torch.autocast`, ours is `my_autocast`; both alternate in one process."]
    timed = [
        (
            f"{result['suite']}: {result['case']}",
            *(f"{result['times_ns'][name]['median'] / 1e3:,.1f}" for name in ("stock", "ours")),
            f"{result['ratio']['median']:.2f} ({result['ratio']['low']:.2f} to {result['ratio']['high']:.2f})",
        )
        for result in results
        if {"stock", "ours"} <= result["times_ns"].keys()
    ]
    if timed:
        text = f"Wall-clock time of a step, the median of {data['rounds']} rounds; the ratio with its quartiles."
        parts += [text, _table(("case", "stock, us", "ours, us", "ours / stock"), timed)]
    counted = [
        (
            f"{result['suite']}: {result['case']}",
            *(result["kernels"][name] for name in ("stock", "ours")),
            *(f"{result['peak_bytes'][name] / 1024:,.1f}" for name in ("stock", "ours")),
        )
        for result in results
        if result["kernels"].get("stock") and result["kernels"].get("ours")
    ]
    if counted:
        head = ("case", "kernels, stock", "kernels, ours", "peak, stock, KiB", "peak, ours, KiB")
        parts += [_COUNTS, _table(head, counted)]
    return parts


def _table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
