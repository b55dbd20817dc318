"""`make size`: lines of the tracked files by folder, and the modules of the package that one other module imports.

    make size                  # tables for people
    make size ARGS=--json      # the same figures for a machine

`.ci/run` calls it. The budgets are a ratchet (CONTRIBUTING.md, principle 3). Exit status: 0 within the budgets; 1 over
one of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
#: What is counted: its name, the folders, the suffixes of its files, the unit, and the budget: what there was
#: when somebody last changed it, without headroom.
KINDS = (
    ("package", ("torch_promote",), (".py",), "lines", 42_688),
    ("modules of the package", ("torch_promote",), (".py",), "files", 133),
    ("C++", ("csrc",), (".cpp", ".h"), "lines", 8_500),
    ("tests, tools, benchmarks", ("tests", "tools", "benchmarks"), (), "lines", 61_545),
    ("docs", ("docs", "README.md", "CONTRIBUTING.md"), (".md",), "words", 43_249),
)
MEASURES = {"lines": lambda text: text.count("\n"), "words": lambda text: len(text.split()), "files": lambda text: 1}


def tracked(*places: str) -> list[Path]:
    """Returns the tracked text files below the places, in the order of their names."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *places], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def measured(unit: str, places: tuple[str, ...], suffixes: tuple[str, ...] = ()) -> int:
    """Returns the lines, words or files of the tracked files below the places."""
    files = [file for file in tracked(*places) if not suffixes or file.suffix in suffixes]
    return sum(MEASURES[unit](file.read_bytes().decode("utf-8", "replace")) for file in files)


def folders() -> dict[str, tuple[int, int]]:
    """Returns the number of files and lines of each folder of the sources and the tests."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file in tracked("torch_promote", "csrc", "tests", "tools", "benchmarks", "docs", "examples"):
        path = file.relative_to(ROOT)
        folder = "/".join(path.parts[: min(2, len(path.parts) - 1)])
        files, lines = found[folder]
        found[folder] = files + 1, lines + measured("lines", (str(path),))
    return dict(sorted(found.items()))


def importers() -> dict[str, list[str]]:
    """Returns the modules that import each module of the package."""
    names = {}
    for file in tracked("torch_promote"):
        if file.suffix == ".py":
            parts = file.relative_to(ROOT).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found: dict[str, list[str]] = {name: [] for name in names}
    for name, file in names.items():
        seen = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                seen |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                seen |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                seen.add(node.value)  # loaded on first use, by its name
        for target in seen & names.keys() - {name}:
            found[target].append(name)
    return found


def main() -> int:
    """Prints the figures; see the module."""
    parser = argparse.ArgumentParser(
        prog="make size", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    kinds = {name: measured(unit, places, suffixes) for name, places, suffixes, unit, _ in KINDS}
    alone = sorted(name for name, users in importers().items() if len(users) == 1)
    if options.json:
        found = {"totals": kinds, "folders": folders(), "imported_by_one": alone}
        print(json.dumps(found, indent=1))
    else:
        console = Console()
        totals = Table("", "unit", "now", "budget", title="Totals")
        for name, _, _, unit, budget in KINDS:
            totals.add_row(name, unit, f"{kinds[name]:,}", f"{budget:,}", style="red" if kinds[name] > budget else "")
        by_folder = Table("folder", "files", "lines", title="By folder")
        for name, (files, lines) in folders().items():
            by_folder.add_row(name, f"{files:,}", f"{lines:,}")
        console.print(totals, by_folder, f"{len(alone)} modules are imported by one other:", *alone, sep="\n")
    return int(any(kinds[name] > budget for name, _, _, _, budget in KINDS))


if __name__ == "__main__":
    sys.exit(main())
