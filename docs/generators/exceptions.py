"""Where a rule deliberately differs from the library that it is named after, and why: exceptions.toml beside this file.

Each exception is held against the golden tables in tests/reference/promotion_rules: what it names differs as it says,
and nothing else does.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

__all__ = ["EXCEPTIONS", "DeliberateException"]


class DeliberateException(NamedTuple):
    """Operands for which a rule and its library differ on purpose.

    Attributes:
        library: The golden table.
        section: Its section, a regular expression.
        operands: The operands as the table spells them, a regular expression.
        theirs: What the library gives, a regular expression.
        ours: What the rule gives, a regular expression.
        shown: The operands in words.
        reason: Why, in a sentence or two.

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
        """Whether this is the exception for a difference.

        Args:
            library: The golden table.
            section: Its section.
            operands: The operands as the table spells them.
            theirs: What the library gives.
            ours: What the rule gives.

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
