"""Compares the outcomes of PyTorch's tests under stock and with install() in force."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from running import Outcome

__all__ = ["DIFFERENCES", "VERDICTS", "Explanation", "Result", "compare", "read_explanations"]

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"

VERDICTS = (
    "same",
    "fails under both",
    "fails only under ours",
    "passes only under ours",
    "skipped under one",
    "not run under one",
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a test may fail under ours.

    Attributes:
        reason: The reason, in a sentence.
        row: The first words of its row or item in docs/differences.md.
    """

    reason: str
    row: str


@dataclass(frozen=True, slots=True)
class Result:
    """A test under both.

    Attributes:
        test: Its id, below the folder `test` of PyTorch.
        stock, ours: Its outcomes; None if it did not run.
        explanation: The known reason for which it may fail under ours.
    """

    test: str
    stock: Outcome | None
    ours: Outcome | None
    explanation: Explanation | None = None

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.stock is None or self.ours is None:
            return "not run under one"
        match self.stock.outcome == "failed", self.ours.outcome == "failed":
            case True, True:
                return "fails under both"
            case False, True:
                return "fails only under ours"
            case True, False:
                return "passes only under ours"
        return "same" if self.stock.outcome == self.ours.outcome else "skipped under one"

    @property
    def is_stale(self) -> bool:
        """Whether it is explained, and passes."""
        return self.explanation is not None and self.ours is not None and self.ours.outcome in ("passed", "xfailed")

    @property
    def is_wrong(self) -> bool:
        """Whether the command fails because of it."""
        if self.verdict == "fails only under ours":
            return self.explanation is None
        return self.is_stale or self.verdict in ("skipped under one", "not run under one")


def compare(
    stock: Mapping[str, Outcome], ours: Mapping[str, Outcome], explained: Mapping[str, Explanation]
) -> list[Result]:
    """Returns a result for each test that ran under one of the two, in their order."""
    return [Result(test, stock.get(test), ours.get(test), explained.get(test)) for test in {**stock, **ours}]


def read_explanations(file: Path, differences: Path = DIFFERENCES) -> dict[str, Explanation]:
    """Reads the list of tests that may fail under ours.

    Args:
        file: A TOML file with an array `test` of tables with `id`, `reason` and `row`.
        differences: The page that has to hold the rows.

    Raises:
        ValueError: A table lacks a key or has another one, a test is listed twice, or no row begins with the words.
    """
    rows = [_words(line) for line in differences.read_text(encoding="utf-8").splitlines()]
    explained: dict[str, Explanation] = {}
    for table in tomllib.loads(file.read_text(encoding="utf-8")).get("test", []):
        if sorted(table) != ["id", "reason", "row"]:
            raise ValueError(f"{file.name}: a test has the keys id, reason and row, not {', '.join(sorted(table))}.")
        test, reason, row = table["id"], table["reason"], table["row"]
        if test in explained:
            raise ValueError(f"{file.name} lists {test} twice.")
        if not any(line.startswith(row) for line in rows):
            raise ValueError(
                f"{file.name}: no row or item of {differences.name} begins with {row!r}, which {test} names."
            )
        explained[test] = Explanation(reason, row)
    return explained


def _words(line: str) -> str:
    return line.lstrip("|-* ").strip()
