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
import platform
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from page import page
from steps import ROOT, Outcome, environment, run, steps

_NEEDED = ("torch", "pytest", "pytest_timeout", "numpy", "setuptools", "ninja")
_PAGE = ROOT / "docs" / "gpu.md"

# Runs in another process, so that this one stays small and does not import torch.
_ABOUT = """
import json, torch
gpu = torch.cuda.is_available() and torch.cuda.get_device_name()
print(json.dumps([torch.__version__, str(torch.version.cuda), gpu]))
"""


def main() -> int:
    """Runs the command; see the module."""
    options = _options()
    end = time.monotonic() + options.seconds
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        return _refuse(
            f"{sys.executable} lacks {', '.join(missing)}. Install them, or name another Python: PYTHON3=..."
        )
    version, cuda, gpu = json.loads(_output(_ABOUT))
    stand_in = options.device != "cuda"
    if not stand_in and not gpu:
        return _refuse(
            f"torch {version} of {sys.executable} finds no GPU: {_why_no_gpu(cuda)}. "
            "To try the command without a GPU: make gpu ARGS='--device cuda-stand-in'"
        )
    if options.build:
        built = _build()
        if built.returncode != 0:
            return _refuse(f"the extension does not build against torch {version}:\n{built.stdout[-4000:]}")
    out = options.out or Path(tempfile.mkdtemp(prefix="torch_promote-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    chosen = list(steps(options.device, out.resolve(), tiny=options.tiny))
    names = [step.name for step in chosen]
    if unknown := set(options.step or ()).difference(names):
        return _refuse(f"no step {', '.join(sorted(unknown))}. The steps: {', '.join(names)}")
    outcomes = []
    for step in chosen:
        if options.step and step.name not in options.step:
            continue
        print(f"{step.name} ...", end=" ", flush=True)
        outcome = run(step, out / f"{step.name}.log", end - time.monotonic())
        outcomes.append(outcome)
        print(_summary(outcome), flush=True)
    target = options.page or (out / "gpu.md" if stand_in else _PAGE)
    machine = {
        "GPU": gpu if not stand_in else "the tests' stand-in device, which computes on the CPU",
        "torch": version,
        "CUDA": cuda if not stand_in else "none",
        "Python": platform.python_version(),
    }
    target.write_text(page(outcomes, machine), encoding="utf-8")
    print(f"wrote {target}; logs are in {out}")
    return int(any(outcome.status not in ("passed", "skipped") for outcome in outcomes))


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


def _why_no_gpu(cuda: str) -> str:
    if cuda == "None":
        return "it is a CPU build; name the Python that has a CUDA build: make gpu PYTHON3=..."
    return f"it is built for CUDA {cuda}; see whether nvidia-smi lists a GPU, and whether its driver is new enough"


def _refuse(text: str) -> int:
    print(f"make gpu: {text}", file=sys.stderr)
    return 2


def _output(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def _build() -> subprocess.CompletedProcess[str]:
    print("build ...", end=" ", flush=True)
    begin = time.monotonic()
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return built


def _summary(outcome: Outcome) -> str:
    counts = ", ".join(f"{number} {name}" for name, number in outcome.counts.items() if number)
    return f"{outcome.status} in {outcome.seconds:.0f} s" + (f": {counts}" if counts else "")


if __name__ == "__main__":
    sys.exit(main())
