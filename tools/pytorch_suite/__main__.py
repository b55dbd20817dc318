"""`make test-pytorch PYTORCH=...`: runs PyTorch's own tests of autocast under stock and with install() in force.

Each file runs twice, in separate processes, and each test must have the same outcome. Exit status: 0 all have, or
explained.toml has a reason; 1 a test fails only under ours without an explanation, an explained test passes, a test ran
under only one of the two, or no region became ours; 2 something is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from comparison import Explanation, Result, compare, read_explanations
from running import Run, run_file
from selection import chosen_tests, files_about_autocast

_HERE = Path(__file__).parent
_SOURCES = """Name PyTorch's sources, of the release that is installed ({release}):

    git clone --depth 1 --branch v{release} --filter=blob:none --sparse https://github.com/pytorch/pytorch
    git -C pytorch sparse-checkout set test
    make test-pytorch PYTORCH=pytorch"""


def main() -> int:
    """Runs the command; see the module."""
    options = _options()
    release = version("torch").partition("+")[0]
    if options.pytorch is None:
        return _refuse(_SOURCES.format(release=release))
    tests = (options.pytorch / "test").resolve()
    if not tests.is_dir():
        return _refuse(f"{options.pytorch} has no folder `test`. {_SOURCES.format(release=release)}")
    if missing := [name for name in ("rich", "pytest", "expecttest", "numpy") if find_spec(name) is None]:
        return _refuse(f"{sys.executable} lacks {', '.join(missing)}: pip install {' '.join(missing)}.")
    try:
        explained = read_explanations(_HERE / "explained.toml")
    except ValueError as error:
        return _refuse(str(error))
    files, messages = _files(options, tests)
    if not files:
        return _refuse(f"{tests} has none of the files: {', '.join(messages)}")
    messages += _other_release(options.pytorch, release)
    out = options.out or Path(tempfile.mkdtemp(prefix="torch_promote-pytorch-"))
    out.mkdir(parents=True, exist_ok=True)
    run = Run(tests, out, options.limit, options.cuda_stand_in)
    found = {file: _both(options, run, file, explained) for file in files}
    messages += [f"{file} has no test to run here." for file, results in found.items() if not results]
    found = {file: results for file, results in found.items() if results}
    return _finish(options, release, found, [*messages, f"Logs: {out}"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-pytorch", description="Runs PyTorch's own tests of autocast.")
    parser.add_argument("pytorch", nargs="?", type=Path, help="PyTorch's sources: the folder that holds `test`")
    parser.add_argument("--only", metavar="FILE", nargs="+", help="run these files, named as below `test`")
    parser.add_argument("--all", action="store_true", help="run the tests of every file that mentions autocast (hours)")
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


def _files(options: argparse.Namespace, tests: Path) -> tuple[list[str], list[str]]:
    """The files to run, and messages about files that these sources lack."""
    listed = options.only or tomllib.loads((_HERE / "files.toml").read_text(encoding="utf-8"))["files"]
    files = [file for file in listed if (tests / file).is_file()]
    lacking = [f"These sources lack {file}." for file in listed if file not in files]
    if options.all:
        files += [file for file in files_about_autocast(tests) if file not in files]
    return files, lacking


def _other_release(sources: Path, release: str) -> list[str]:
    file = sources / "version.txt"
    if not file.is_file():
        return [f"{sources} does not tell its release. Tests of another release may fail under both."]
    found = file.read_text(encoding="utf-8").strip()
    if found.split(".")[:2] == release.split(".")[:2]:
        return []
    return [f"The tests are those of {found}, PyTorch is {release}: tests may fail under both."]


def _both(options: argparse.Namespace, run: Run, file: str, explained: dict[str, Explanation]) -> list[Result]:
    chosen = options.k or chosen_tests(run.tests / file)
    if chosen == []:
        return []
    outcomes = []
    for name, install in (("stock", None), ("ours", {"policy": options.policy} if options.policy else {})):
        begin = time.monotonic()
        outcomes.append(run_file(run, file, chosen, install))
        took = time.monotonic() - begin
        print(f"{file} under {name}: {len(outcomes[-1])} tests, {took:.0f} s", file=sys.stderr, flush=True)
    return compare(*outcomes, explained)


def _finish(options: argparse.Namespace, release: str, files: dict[str, list[Result]], messages: Sequence[str]) -> int:
    from rich.console import Console

    from report import as_json, opened, show

    results = [result for found in files.values() for result in found]
    wrong = sum(result.is_wrong for result in results)
    verdict = [f"{wrong} tests do not end as they should."] if wrong else []
    if not opened(results):
        verdict.append("No region of torch.autocast became one of ours: nothing was compared.")
    show(Console(width=None if sys.stdout.isatty() else 140), files, [*messages, *verdict])
    if options.json:
        options.json.write_text(json.dumps(as_json(release, files, messages), indent=1), encoding="utf-8")
    return 1 if verdict else 0


if __name__ == "__main__":
    sys.exit(main())
