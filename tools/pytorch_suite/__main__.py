"""`make test-pytorch PYTORCH=...`: runs PyTorch's own tests of autocast under stock and with install() in force.

Each file runs twice, in separate processes, and each test must have the same outcome. Of a file without "autocast" in
its name, the tests that mention autocast run, or that use helpers of the file which do.

Exit status: 0 all have, or `EXPLAINED` has a reason; 1 a test fails only under ours without an explanation, an
explained test passes, a test ran under only one of the two, or no region became ours; 2 something is missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: The files that run, below PyTorch's folder `test`.
FILES = (
    "test_autocast.py",
    "test_jit_autocast.py",
    "test_autograd.py",
    "test_cuda.py",
    "test_torch.py",
    "test_utils.py",
    "dynamo/test_ctx_manager.py",
    "dynamo/test_activation_checkpointing.py",
    "dynamo/test_aot_autograd_cache.py",
    "dynamo/test_autograd_function.py",
    "dynamo/test_functions.py",
    "dynamo/test_higher_order_ops.py",
    "dynamo/test_misc.py",
    "dynamo/test_pre_dispatch.py",
    "dynamo/test_repros.py",
    "export/test_export.py",
    "export/test_passes.py",
    "functorch/test_ac.py",
    "functorch/test_aotdispatch.py",
    "functorch/test_eager_transforms.py",
    "functorch/test_vmap.py",
    "distributed/test_data_parallel.py",
    "distributed/fsdp/test_fsdp_core.py",
    "distributed/fsdp/test_fsdp_mixed_precision.py",
    "distributed/_composable/fsdp/test_fully_shard_autograd.py",
    "distributed/_composable/fsdp/test_fully_shard_mixed_precision.py",
    "distributed/_composable/fsdp/test_fully_shard_training.py",
)
#: Tests that fail with install() in force on purpose, and the reasons.
EXPLAINED = {
    "test_autocast.py::TestAutocastGPU::test_cast_cache_is_global": "It counts casts of a weight with the emptying of "
    "the cache replaced: one in stock's cache of the process, two in ours, as the backward runs in another thread. "
    "(docs/differences.md, row 3)",
}
_SOURCES = """Name PyTorch's sources, of the release that is installed ({release}):

    git clone --depth 1 --branch v{release} --filter=blob:none --sparse https://github.com/pytorch/pytorch
    git -C pytorch sparse-checkout set test
    make test-pytorch PYTORCH=pytorch"""
_ABOUT = re.compile("autocast|custom_fwd", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        outcome: "passed", "failed", "skipped" or "xfailed" (it failed as PyTorch expects). A process that dies, or that
            is stopped at its limit, counts as the failure of the test that ran.
        message: The first line of the reason for a failure or skip.
        opened: The number of regions of ours that it opened in its own process.
    """

    outcome: str
    message: str = ""
    opened: int = 0


def verdict_of(test: str, stock: Outcome | None, ours: Outcome | None) -> tuple[str, bool]:
    """Returns the words for a pair of outcomes of a test, and whether the command fails because of it."""
    if stock is None or ours is None:
        return "not run under one", True
    if test in EXPLAINED:
        return (
            ("explained", False) if ours.outcome == "failed" else ("explained, but passes", ours.outcome != "skipped")
        )
    match stock.outcome == "failed", ours.outcome == "failed":
        case True, True:
            return "fails under both", False
        case False, True:
            return "fails only under ours", True
        case True, False:
            return "passes only under ours", False
    return ("same", False) if stock.outcome == ours.outcome else ("skipped under one", True)


def main() -> int:
    """Runs the command; see the module."""
    options = _options()
    release = version("torch").partition("+")[0]
    tests = options.pytorch / "test" if options.pytorch else Path("/nowhere")
    if not tests.is_dir():
        return _refuse(_SOURCES.format(release=release))
    if missing := [name for name in ("rich", "pytest", "expecttest", "numpy") if find_spec(name) is None]:
        return _refuse(f"{sys.executable} lacks {', '.join(missing)}: pip install {' '.join(missing)}.")
    tests = tests.resolve()
    files = [file for file in options.only or FILES if (tests / file).is_file()]
    if not files:
        return _refuse(f"{tests} has none of the files: {', '.join(options.only or FILES)}")
    out = options.out or Path(tempfile.mkdtemp(prefix="torch_promote-pytorch-"))
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, tuple[Outcome | None, Outcome | None]]] = {}
    for file in files:
        if (chosen := options.k or _chosen_tests(tests / file)) == []:
            continue
        both = []
        for name, install in (("stock", None), ("ours", {"policy": options.policy} if options.policy else {})):
            begin = time.monotonic()
            both.append(_run_file(options, tests, out, file, chosen, install))
            took = time.monotonic() - begin
            print(f"{file} under {name}: {len(both[-1])} tests, {took:.0f} s", file=sys.stderr, flush=True)
        found[file] = {test: (both[0].get(test), both[1].get(test)) for test in {**both[0], **both[1]}}
    sources = tests.parent / "version.txt"
    print(
        f"PyTorch {release}, tests of {sources.read_text('utf-8').strip() if sources.is_file() else '?'}; logs: {out}"
    )
    return _finish(options, release, found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make test-pytorch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pytorch", nargs="?", type=Path, help="PyTorch's sources: the folder that holds `test`")
    parser.add_argument("--only", metavar="FILE", nargs="+", help="run these files, named as below `test`")
    parser.add_argument("-k", metavar="NAME", nargs="+", help="run the tests whose names begin so")
    parser.add_argument("--cuda-stand-in", action="store_true", help="run tests of CUDA on the stand-in, without a GPU")
    parser.add_argument("--policy", help="install this policy; nearly every test has to fail under 'off'")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for a file, under each (1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the logs here")
    return parser.parse_args()


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


# --- which tests


def _chosen_tests(file: Path) -> list[str] | None:
    """Returns the names of the test functions that concern autocast; None for all, if the name of the file says so."""
    if _ABOUT.search(file.name):
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    sources: dict[str, str] = {}  # by name, the code of functions, methods and classes without tests
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            body = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            if not (isinstance(node, ast.ClassDef) and any(name.startswith("test") for name in body)):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                sources[node.name] = sources.get(node.name, "") + "\n".join(lines[first - 1 : node.end_lineno])
    about = {name for name, source in sources.items() if _ABOUT.search(source)}
    new = about
    while new := {name for name in new if not name.startswith(("test", "forward", "__"))}:
        used = re.compile(rf"\b({'|'.join(map(re.escape, new))})\b")
        new = {name for name, source in sources.items() if name not in about and used.search(source)}
        about |= new
    return sorted(name for name in about if name.startswith("test"))


# --- runs


def _run_file(
    options: argparse.Namespace,
    tests: Path,
    out: Path,
    file: str,
    chosen: Sequence[str] | None,
    install: Mapping[str, Any] | None,
) -> dict[str, Outcome]:
    """Returns the outcomes of the chosen tests of a file. A test for which no time was left has none."""
    name = f"{file.removesuffix('.py').replace('/', '.')}.{'stock' if install is None else 'ours'}"
    record, log, plan = (out.resolve() / f"{name}.{kind}" for kind in ("jsonl", "log", "plan.json"))
    for old in (record, log):
        old.unlink(missing_ok=True)
    stand_in = ["-m", "cuda_stand_in"] if options.cuda_stand_in else []
    arguments = ["-p", "recording_plugin", "--pytorch-plan", str(plan), "-p", "no:_torch_promote_hooks"]
    # Not PyTorch's settings and conftest, which are written for its own runner and version of pytest.
    arguments += ["-c", os.devnull, "--rootdir", str(tests), "--noconftest", "-p", "no:cacheprovider"]
    arguments += ["--quiet", "--tb=short", "--show-capture=no"]
    if find_spec("pytest_timeout") is not None:
        arguments += ["--timeout", "600"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_PROMOTE_")}
    paths = [str(HERE), str(HERE.parent), str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    if install is not None:
        env["TORCH_PROMOTE_AUTOCAST"] = "1"  # for processes that tests start
    end = time.monotonic() + options.limit
    outcomes: dict[str, Outcome] = {}
    while True:
        values = {"install": install, "chosen": chosen, "done": list(outcomes), "record": str(record)}
        plan.write_text(json.dumps(values), encoding="utf-8")
        with log.open("a", encoding="utf-8") as text:
            process = subprocess.Popen(
                # -P: the folder that holds the file comes first on the path, as if it were run as a program.
                [sys.executable, "-P", *stand_in, "-m", "pytest", *arguments, file],
                cwd=tests,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # to stop what it starts with it
            )
            try:
                died = f"the process died with exit status {process.wait(max(end - time.monotonic(), 0))}"
            except subprocess.TimeoutExpired:
                died = "stopped: the file has reached its limit"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        before, is_whole = len(outcomes), False
        for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
            found = json.loads(line)
            is_whole = "end" in found
            if not is_whole and (test := found.pop("test")) not in values["done"]:
                outcomes[test] = Outcome("failed", died) if found["outcome"] == "started" else Outcome(**found)
        if is_whole or time.monotonic() >= end:
            return outcomes
        if len(outcomes) == before:  # it died before it ran a test
            return {**outcomes, file: Outcome("failed", f"{died}: see {log}")}
        # Another process runs the tests after the one that it died of.


# --- results


def _finish(
    options: argparse.Namespace,
    release: str,
    files: Mapping[str, Mapping[str, tuple[Outcome | None, Outcome | None]]],
) -> int:
    """Prints a row for each file and every test with different outcomes; returns the exit status."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    table = Table("file", "tests", "same", "others", "regions of ours")
    opened, failed = 0, False
    data: dict[str, Any] = {}
    for file, results in files.items():
        verdicts = {test: verdict_of(test, *pair) for test, pair in results.items()}
        counts = Counter(words for words, _ in verdicts.values())
        regions = sum(ours.opened for _, ours in results.values() if ours is not None)
        opened += regions
        failed = failed or any(wrong for _, wrong in verdicts.values())
        others = ", ".join(f"{number} {words}" for words, number in counts.items() if words != "same")
        table.add_row(file, str(len(results)), str(counts["same"]), others, str(regions))
        data[file] = {
            test: {"verdict": verdicts[test][0], "stock": one and asdict(one), "ours": other and asdict(other)}
            for test, (one, other) in results.items()
        }
    console.print(table)
    for results in data.values():
        for test, result in results.items():
            if result["verdict"] != "same":
                console.print(f"{result['verdict']}: {test} {EXPLAINED.get(test, '')}", soft_wrap=True)
                for name in ("stock", "ours"):
                    said = result[name] or {"outcome": "did not run", "message": ""}
                    console.print(f"    {name}: {said['outcome']} {said['message']}", soft_wrap=True)
    if not opened:
        console.print("No region of torch.autocast became one of ours: nothing was compared.")
    if options.json:
        options.json.write_text(json.dumps({"torch": release, "regions": opened, "files": data}, indent=1), "utf-8")
    return int(failed or not opened)


if __name__ == "__main__":
    sys.exit(main())
