"""Reads which lines of the measured copy were executed: of Python with coverage.py, of C++ with gcovr."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from coverage import Coverage
from coverage_report import Lines
from measured_copy import CoverageError

__all__ = ["lines_of_cpp", "lines_of_python"]


def lines_of_python(copy: Path, settings: Path, html: Path) -> list[Lines]:
    """Returns the lines of the package and of the modules beside it, also of files that no process imported."""
    coverage = Coverage(config_file=str(settings))
    coverage.set_option("run:plugins", [])  # for the processes of the tests
    coverage.combine(keep=True)
    files = [*copy.glob("torch_promote/**/*.py"), *copy.glob("torch_promote_*.py")]
    found = []
    for file in sorted(files):
        _, statements, left_out, missing, _ = coverage.analysis2(str(file))
        executed = frozenset(statements) - frozenset(missing)
        found.append(Lines(str(file.relative_to(copy)), executed, frozenset(missing), frozenset(left_out)))
    coverage.html_report(morfs=[str(file) for file in files], directory=str(html), title="torch_promote: Python")
    return found


def lines_of_cpp(copy: Path, objects: Path, html: Path) -> list[Lines]:
    """Returns the lines of csrc. A line of a template ran if it did for any of its arguments."""
    html.mkdir(parents=True, exist_ok=True)
    results = html.with_suffix(".json")
    command = [sys.executable, "-m", "gcovr", "--exclude-noncode-lines"]
    command += ["--root", str(copy), "--filter", f"{copy}/csrc/"]
    command += ["--json", str(results), "--html-details", str(html / "index.html"), str(objects)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CoverageError(f"gcovr ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    found = []
    for file in json.loads(results.read_text(encoding="utf-8"))["files"]:
        counts: dict[int, int] = defaultdict(int)
        left_out = set()
        for line in file["lines"]:
            if line.get("gcovr/excluded"):
                left_out.add(line["line_number"])
            elif not line.get("gcovr/noncode"):
                counts[line["line_number"]] += line["count"]
        executed = frozenset(number for number, count in counts.items() if count)
        found.append(Lines(file["file"], executed, frozenset(counts) - executed, frozenset(left_out)))
    return found
