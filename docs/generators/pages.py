"""Rewrites blocks of documentation pages with the output of the code that they describe."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["rendered", "rewrite", "table"]

Blocks = Mapping[str, Callable[[], str]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as Markdown.

    Args:
        header: The columns' names.
        rows: The cells.

    Example:
        >>> print(table(["a", "b"], [["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rendered(text: str, blocks: Blocks) -> str:
    r"""Returns a page with the text between each `<!-- begin: name -->` and `<!-- end: name -->` rewritten.

    Args:
        text: The page.
        blocks: Maps names of blocks to functions that return their text.

    Raises:
        ValueError: A block of the page is not in `blocks`, or the reverse.

    Example:
        >>> print(rendered("<!-- begin: a -->\n<!-- end: a -->", {"a": lambda: "text"}))
        <!-- begin: a -->
        <BLANKLINE>
        text
        <BLANKLINE>
        <!-- end: a -->
    """
    pattern = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
    found = [match.group(2) for match in pattern.finditer(text)]
    # Exactly once each: without this check, text whose markers were lost would go stale unnoticed.
    strangers = [name for name in found if name not in blocks]
    if sorted(found) != sorted(blocks):
        wrong = strangers or sorted(set(blocks) - set(found)) or ["one occurs twice"]
        raise ValueError(f"the page's blocks are not those of BLOCKS: {', '.join(wrong)}.")
    return pattern.sub(lambda match: f"{match.group(1)}\n{blocks[match.group(2)]()}\n\n{match.group(3)}", text)


def rewrite(argv: Sequence[str] | None, module: str, description: str | None, file: Path, blocks: Blocks) -> int:
    """Rewrites or checks a page: the command line of a generator.

    Args:
        argv: The arguments. None: those of the process.
        module: The path of the generator, for messages.
        description: The description for --help.
        file: The page. The command line can name another.
        blocks: As for `rendered`.

    Returns:
        0, or 1 if `--check` finds the page out of date.

    Example:
        >>> rewrite(["no such file"], "module", None, Path("page"), {})
        Traceback (most recent call last):
        ...
        FileNotFoundError: [Errno 2] No such file or directory: 'no such file'
    """
    parser = argparse.ArgumentParser(prog=f"python {module}", description=description)
    parser.add_argument("file", nargs="?", type=Path, default=file)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args(argv)
    text = args.file.read_text(encoding="utf-8")
    written = rendered(text, blocks)
    if args.check and written != text:
        print(f"{args.file} is out of date. Run python {module}.", file=sys.stderr)
        return 1
    if written != text:
        args.file.write_text(written, encoding="utf-8")
    return 0
