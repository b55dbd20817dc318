"""Where a rule deliberately differs from the library that it is named after, and why.

Each exception is held against the golden tables in tests/reference/promotion_rules: what it names differs as it says,
and nothing else does.
"""

from __future__ import annotations

import re
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
        reason: Why, as a sentence.

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


_FLOAT8 = r"float8_\w+"
_SMALL = r"u?int[24]"
_LARGER = r"(?!float8)\w+"

#: Every deliberate exception.
EXCEPTIONS: tuple[DeliberateException, ...] = (
    DeliberateException(
        *("numpy", "numbers", "bfloat16, float", "float32", "bfloat16", "`bfloat16` with a Python float"),
        "NEP 50 has a Python float keep any floating dtype. NumPy does not know bfloat16 to be floating, and takes "
        "float32; with its own floating dtypes it keeps NEP 50.",
    ),
    DeliberateException(
        *("numpy", "functions", "bool|u?int8", "float16", "float64", "`atan2` of `bool`, `int8`, `uint8`"),
        "NumPy's functions take the smallest floating dtype that holds the integers, and its division takes float64. A "
        "rule here has one answer for both, and gives the more precise one.",
    ),
    DeliberateException(
        *("numpy", "functions", "u?int16", "float32", "float64", "`atan2` of `int16`, `uint16`"),
        "As above: one answer for division and functions.",
    ),
    DeliberateException(
        *("numpy", "pairs", rf"{_FLOAT8}, \w+|\w+, {_FLOAT8}", r"\w+", "raises", "float8 with any other dtype"),
        "NumPy has no float8. With ml_dtypes, a sum's dtype can depend on the order of the operands, and can be too "
        "small for both. PyTorch promotes no float8 either.",
    ),
    DeliberateException(
        *("numpy", "numbers", f"{_FLOAT8}, float", "float32", _FLOAT8, "float8 with a Python float"),
        "As for bfloat16: a Python float keeps the floating dtype.",
    ),
    DeliberateException(
        *("numpy", "numbers", f"{_FLOAT8}, complex", "complex64", "raises", "float8 with a Python complex"),
        "The rule has no row for float8, so only numbers of no higher kind go with it.",
    ),
    DeliberateException(
        *(
            "numpy",
            "pairs",
            rf"{_SMALL}, {_LARGER}|{_LARGER}, {_SMALL}",
            r"\w+",
            "raises",
            "`int2`, `int4`, `uint2`, `uint4` with others",
        ),
        "NumPy has no such dtypes, and PyTorch has no arithmetic on them.",
    ),
    DeliberateException(
        *("numpy", "numbers", f"{_SMALL}, int", "int8", _SMALL, "`int2`, `int4`, `uint2`, `uint4` with a Python int"),
        "NEP 50 has a Python int keep any integer dtype; NumPy does not know these to be integers.",
    ),
    DeliberateException(
        *("numpy", "numbers|division|functions", f"{_SMALL}(, (float|complex))?", r"float16|complex64", "raises"),
        *("`int2`, `int4`, `uint2`, `uint4` with a Python float or complex, and divided",),
        "The rule has no row for them, as above.",
    ),
    DeliberateException(
        *("jax", "division", "u?int2", "u?int2", "raises", "`int2`, `uint2` divided"),
        "JAX's list of what integers become in floating point lacks these two, and its division then returns integers.",
    ),
    DeliberateException(
        *("jax_without_x64", "division", "u?int2", "u?int2", "raises", "`int2`, `uint2` divided"),
        "As with 64-bit dtypes.",
    ),
    DeliberateException(
        *("jax_without_x64", "pairs|triples|pairs_with_numbers|numbers", r".*\buint32\b.*|bool, int", "int32", "int64"),
        *("what is `int64` with 64-bit dtypes: `uint32` with signed integers, `bool` with a Python int",),
        "PyTorch always has 64-bit dtypes, and has no setting for what a Python int counts as.",
    ),
)
