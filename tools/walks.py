"""`make walks`: the files of the package that a use of it runs through, and how they call each other.

    make walks                 # a table: files, pairs of files that call each other both ways, Python calls
    make walks ARGS=-v         # with the names of the files

A use is warm: it has run before, so that imports and caches do not count. The classes that stand for one call of an op
are counted, too. Exit status: 0 within the budgets; 1 over one of them. The budgets are a ratchet, as those of `make
size`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import torch_promote as tp

PACKAGE = str(Path(tp.__file__).parent)
#: The fields that make a class a record of a call, with their types, and how many such classes there may be.
OF_A_CALL = re.compile(r"(?:a|around|call|one|outer): (?:Open|Casting|Kept|Recent|Watched|_)?Call(?: \| None)?")
MOST_RECORDS = 13


class Walk(NamedTuple):
    """What a use runs through."""

    files: set[str]
    pairs: set[frozenset[str]]
    calls: int


def walk(use: Callable[[], Any]) -> Walk:
    """Runs a use, and counts."""
    files: set[str] = set()
    arrows: set[tuple[str, str]] = set()
    calls = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        calls += 1
        files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            arrows.add((caller.f_code.co_filename, file))

    use()
    sys.setprofile(profile)
    try:
        use()
    finally:
        sys.setprofile(None)
    short = {file: file.removeprefix(f"{PACKAGE}/") for file in files}
    both = {frozenset((short[a], short[b])) for a, b in arrows if (b, a) in arrows}
    return Walk(set(short.values()), both, calls)


def uses() -> dict[str, tuple[Callable[[], Any], tuple[int | None, int | None, int | None]]]:
    """The uses, with their budgets of files, pairs and Python calls; None for no budget."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    folder = tempfile.mkdtemp()
    recordings = [f"{folder}/{name}.jsonl.gz" for name in ("a", "b")]
    for factor, name in enumerate(recordings, 1):
        with tp.trace(model, record=name), tp.my_autocast("cpu"):
            (model(x) * factor).sum().backward()
    one, other = map(tp.load, recordings)

    def linear() -> None:
        with tp.trace(model), tp.my_autocast("cpu"):
            model(x)

    def step() -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return model(x).exp().sum()

    return {
        "diff": (lambda: tp.diff(one, other), (11, None, None)),
        "tune": (lambda: tp.tune(step, model=model, tolerance=1e-6, progress=False, budget=8), (36, None, None)),
        "trace of a Linear": (linear, (18, 8, None)),
    }


def records_of_a_call() -> list[str]:
    """The classes that stand for one call of an op: with its record, its arguments, or a subclass of such a one."""
    found: dict[str, str] = {}
    for file in sorted(Path(PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                annotated = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                fields = {ast.unparse(one.target): ast.unparse(one.annotation) for one in annotated}
                has_arguments = fields.get("args") == "list[Any]" or {"op", "arguments"} <= fields.keys()
                is_one = any(OF_A_CALL.fullmatch(f"{name}: {kind}") for name, kind in fields.items()) or has_arguments
                if is_one or any(f"{file.stem}.{ast.unparse(base)}" in found for base in node.bases):
                    found[f"{file.stem}.{node.name}"] = f"{file.relative_to(PACKAGE)}: {node.name}"
    return sorted(found.values())


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", action="store_true", help="name the files and pairs")
    arguments = parser.parse_args()
    table = Table("use", "files", "both ways", "Python calls")
    good, names = True, []
    for name, (use, budgets) in uses().items():
        found = walk(use)
        numbers = len(found.files), len(found.pairs), found.calls
        cells = []
        for number, budget in zip(numbers, budgets, strict=True):
            within = budget is None or number <= budget
            good &= within
            cells.append(f"{number:,}" + ("" if budget is None else f" of {budget:,}{'' if within else ' (over)'}"))
        table.add_row(name, *cells)
        names.append((name, sorted(found.files), sorted(map(sorted, found.pairs))))
    records = records_of_a_call()
    good &= len(records) <= MOST_RECORDS
    names.append(("records of a call", records, []))
    console = Console()
    console.print(table, f"records of one call of an op: {len(records)} of {MOST_RECORDS}")
    for name, files, pairs in names if arguments.v else ():
        console.print(f"[bold]{name}[/bold]", *files, *(f"{a} <-> {b}" for a, b in pairs), sep="\n  ")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
