"""The deliberate differences between a rule and the library that it is named after: reads exceptions.toml.

Tests compare the rules with the golden tables in tests/reference/promotion_rules: the exceptions have to be exactly the
differences.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

__all__ = ["EXCEPTIONS", "DeliberateException"]


class DeliberateException(NamedTuple):
    """Operands for which a rule deliberately differs from its library.

    Attributes:
        library: The golden table.
        section: A regular expression for its section.
        operands: A regular expression for the operands, as written in the table.
        theirs: A regular expression for the library's result.
        ours: A regular expression for the rule's result.
        shown: A description of the operands, for the documentation.
        reason: The reason, in one or two sentences.

    Example:
        >>> EXCEPTIONS[0].covers("numpy", "numbers", "bfloat16, float", theirs="float32", ours="bfloat16")
        True
    """

    library: str
    section: str
    operands: str
    theirs: str
    ours: str
    shown: str
    reason: str

    def covers(self, library: str, section: str, operands: str, theirs: str, ours: str) -> bool:
        """Whether this exception covers a difference.

        Args:
            library: The golden table.
            section: Its section.
            operands: The operands, as written in the table.
            theirs: The library's result.
            ours: The rule's result.

        Example:
            >>> EXCEPTIONS[0].covers("numpy", "numbers", "float16, float", theirs="float32", ours="float16")
            False
        """
        asked = (section, operands, theirs, ours)
        patterns = (self.section, self.operands, self.theirs, self.ours)
        return library == self.library and all(map(re.fullmatch, patterns, asked))


def _read() -> tuple[DeliberateException, ...]:
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["exception"]
    return tuple(DeliberateException(**{**entry, "reason": entry["reason"].strip()}) for entry in entries)


#: Every deliberate exception.
EXCEPTIONS: tuple[DeliberateException, ...] = _read()
