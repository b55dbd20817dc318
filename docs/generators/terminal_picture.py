"""Draws what `torch-promote find-nan` prints in a terminal, for README.md: docs/images/find_nan.svg.

`python docs/generators/terminal_picture.py` runs the command on examples/overflow.py. `--check` compares instead: exit
status 1 if the picture shows other words. Numbers may differ, since CPUs round differently.
"""

from __future__ import annotations

import html
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

__all__ = ["COLUMNS", "PICTURE", "main"]

_ROOT = Path(__file__).parents[2]
PICTURE = _ROOT / "docs" / "images" / "find_nan.svg"
#: The width of the terminal: as wide as README.md is on GitHub, in a font that can be read.
COLUMNS = 84
_COMMAND = ("torch-promote", "find-nan", "overflow.py")


def printed() -> str:
    """Runs the command in a terminal of its own, and returns what it prints, with the codes of its colours."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(_ROOT / "examples" / "overflow.py", folder)
        ours, theirs = pty.openpty()
        settings = {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "COLORTERM": "truecolor", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch_promote", *_COMMAND[1:]]
        environment = {**os.environ, **settings, "PYTHONPATH": str(_ROOT)}
        environment.pop("NO_COLOR", None)
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text = b""
        try:
            while some := os.read(ours, 65536):
                text += some
        except OSError:  # the end of a terminal whose program has exited
            pass
        process.wait()
        os.close(ours)
    return text.decode().replace("\r\n", "\n")


def drawn(text: str) -> str:
    """Returns the picture of a command and what it has printed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "dim"), (" ".join(_COMMAND), "bold")))
    console.print(Text.from_ansi(text.rstrip()))
    # A page of GitHub loads no font for a picture.
    style = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="torch-promote", code_format=style, unique_id="find-nan")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def words_of(svg: str) -> list[str]:
    """The words of a picture, without their numbers and the build of PyTorch."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", svg.partition("</defs>")[2]))
    return re.sub(r"[\d.,]+(?:e[+-]\d+|\+c\w+)?", "#", text).split()


def main(arguments: Sequence[str]) -> int:
    """Writes the picture, or compares its words."""
    svg = drawn(printed())
    if list(arguments) == ["--check"]:
        same = PICTURE.exists() and words_of(PICTURE.read_text(encoding="utf-8")) == words_of(svg)
        if not same:
            print(f"{PICTURE.relative_to(_ROOT)} is not what find-nan prints: make docs-pages", file=sys.stderr)
        return int(not same)
    PICTURE.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
