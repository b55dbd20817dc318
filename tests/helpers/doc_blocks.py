"""The code blocks of README.md and docs/, with the marker that says why one cannot run here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"^(?:<!-- (?P<marker>[^\n]*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks() -> tuple[Block, ...]:
    """The code blocks of all pages."""
    return tuple(block for page in PAGES for block in blocks_of(page))


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(
            name,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            (match["marker"] or "").removeprefix("not run: ") if (match["marker"] or "").startswith("not run:") else "",
        )
        for match in _BLOCK.finditer(text)
    ]


def commands(program: str) -> list[tuple[str, str]]:
    """The lines of blocks of commands that call a program, with the place of each: comments and prompts are cut off."""
    found = []
    for block in blocks():
        if block.language not in ("sh", "console"):
            continue
        for number, line in enumerate(block.text.splitlines(), start=block.line):
            line = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
            line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
            if line.split(" ")[0] == program:
                found.append((f"{block.page}:{number}", line))
    return found


def sessions() -> dict[str, list[tuple[str, str]]]:
    """The commands of blocks of consoles by page, each with the output below it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for block in blocks():
        if block.language == "console":
            for session in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = session.partition("\n")
                found.setdefault(block.page, []).append((command, output))
    return found
