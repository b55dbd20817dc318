"""The steps of `make gpu`: commands, order, and time limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "Step", "environment", "run", "steps"]

ROOT = Path(__file__).parents[2]
_TESTS = ROOT / "tests"
_NO_TESTS = 5  # pytest's exit status if the chosen marks leave none
_WITHOUT_EXPECTTEST = Path(__file__).parent / "without_expecttest"


@dataclass(frozen=True, slots=True)
class Step:
    """One command.

    Attributes:
        name: A word for the table.
        command: The command line after the interpreter.
        output: The file that the command writes.
        read: Reads the file: counts by name, for the table.
        limit: Its time limit in seconds.
        may_be_empty: Whether the step is skipped, and has not failed, if it runs no test: on the stand-in device, which
            cannot run tests that need a GPU.
    """

    name: str
    command: Sequence[str]
    output: Path
    read: Callable[[Path], Mapping[str, int]]
    limit: float
    may_be_empty: bool = False


@dataclass(slots=True)
class Outcome:
    """The outcome of a step.

    Attributes:
        step: The step.
        status: "passed", "failed", "skipped" (nothing in it can run on the device), "stopped" (it reached its limit) or
            "not run" (no time was left).
        seconds: How long it ran.
        counts: Its counts, such as tests passed, failed and skipped.
        skipped: The reasons for skipped tests, with their counts.
        limits: The reasons for expected differences of tests or samples, with their counts.
        log: The end of its output, if it did not pass.
    """

    step: Step
    status: str
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    log: str = ""


def environment() -> dict[str, str]:
    """Returns the environment of the steps: the package of this checkout, and a stand-in for a missing expecttest."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]
    if find_spec("expecttest") is None:
        paths.append(str(_WITHOUT_EXPECTTEST))
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])])}


def steps(device: str, out: Path, *, tiny: bool) -> Iterator[Step]:
    """Yields the steps in their order. The benchmark comes last, when nothing else uses the machine.

    Args:
        device: "cuda" or "cuda-stand-in".
        out: The folder for their output.
        tiny: Whether to take few samples and rounds, for a test of this command.
    """
    for file in _files(device):
        name = file.stem.removeprefix("test_").removesuffix("_on_cuda")
        output = out / f"{name}.xml"
        options = ["--quiet", "--device", device, "-p", "_torch_promote_hooks", f"--junitxml={output}"]
        if not tiny:
            options += ["-m", ""]
        yield Step(name, ["-m", "pytest", str(file), *options], output, _tests, 240, may_be_empty=device != "cuda")
    output = out / "parity.json"
    chosen = ["--quick", *(["--ops", "aten::mm", "nn.functional.linear"] if tiny else [])]
    started = [] if device == "cuda" else ["-m", "cuda_stand_in"]  # the process then has the device, as "cuda"
    command = [*started, "-m", "torch_promote", "parity", "--device", "cuda", *chosen, f"--json={output}"]
    yield Step("parity", command, output, _parity, 240)
    output = out / "bench.json"
    rounds = "2" if tiny else "11"
    suites = ["--suite", "models", *([] if tiny else ["--suite", "caches", "--suite", "region"])]
    cases = ["--case", "MLP, forward"] if tiny else []
    command = ["-m", "benchmarks", "--device", device, "--rounds", rounds, "--json", *suites, *cases]
    yield Step("bench", command, output, _bench, 180)


def _files(device: str) -> list[Path]:
    files = sorted(_TESTS.glob("cuda/test_*.py"))
    if device != "cuda":
        return files
    about_the_stand_in = [file for file in files if file.stem.endswith("stand_in")]
    return [*(file for file in files if file not in about_the_stand_in), *sorted(_TESTS.glob("gpu/test_*.py"))]


def run(step: Step, log: Path, seconds: float) -> Outcome:
    """Runs a step.

    Args:
        step: The step.
        log: The file for its output. A command with `--json` and no file writes its JSON to stdout, which goes to
            `step.output`.
        seconds: The time limit.
    """
    if seconds <= 0:
        return Outcome(step, "not run")
    writes_to_stdout = "--json" in step.command
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as text, step.output.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output if writes_to_stdout else text,
            stderr=text,
            start_new_session=True,  # to stop the workers with it
        )
        try:
            code = process.wait(min(seconds, step.limit))
            status = "passed" if code == 0 or (code == _NO_TESTS and step.read is _tests) else "failed"
        except subprocess.TimeoutExpired:
            status = "stopped"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outcome = Outcome(step, status, time.monotonic() - begin)
    try:
        outcome.counts = step.read(step.output)
    except (OSError, ValueError, KeyError, ElementTree.ParseError):
        outcome.status = "failed" if status == "passed" else status  # it wrote no result
    if step.read is _parity and outcome.counts:
        outcome.limits = _known_gaps(step.output)
    if step.read is _tests and outcome.counts:
        outcome.skipped = _reasons(step.output, "pytest.skip")
        outcome.limits = _reasons(step.output, "pytest.xfail")
        if outcome.counts["passed"] == 0 and status == "passed":
            outcome.status = "skipped" if step.may_be_empty else "failed"  # nothing was tested
    if outcome.status not in ("passed", "skipped"):
        outcome.log = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
    return outcome


def _suites(file: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(file).getroot().iter("testsuite"))


def _tests(file: Path) -> dict[str, int]:
    total = {name: sum(int(suite.get(name, "0")) for suite in _suites(file)) for name in _XML_COUNTS}
    failed = total["failures"] + total["errors"]
    expected = sum(_reasons(file, "pytest.xfail").values())  # pytest counts them as skipped
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"] - expected,
        "expected_failures": expected,
    }


_XML_COUNTS = ("tests", "failures", "errors", "skipped")


def _reasons(file: Path, kind: str) -> dict[str, int]:
    found = ElementTree.parse(file).getroot().iter("skipped")
    return Counter(skipped.get("message", "") for skipped in found if skipped.get("type") == kind)


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _parity(file: Path) -> dict[str, int]:
    return {name: number for name, number in _json(file)["totals"].items() if isinstance(number, int)}


def _known_gaps(file: Path) -> dict[str, int]:
    found: Counter[str] = Counter()
    for entry in _json(file)["entries"]:
        found.update(entry["gaps"])
    return found


def _bench(file: Path) -> dict[str, int]:
    return {"cases": len(_json(file)["results"])}
