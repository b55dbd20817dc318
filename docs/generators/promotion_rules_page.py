"""Writes the tables and derivations of docs/promotion_rules.md from the rules.

`python docs/generators/promotion_rules_page.py` rewrites the text between the page's begin and end lines. With
`--check`, it only reports whether the page is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from exceptions import EXCEPTIONS
from pages import rewrite, table
from torch_promote.reference.derivation.derivation import why
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion_rules.jax_rule import FLOAT8, LATTICE
from torch_promote.reference.promotion_rules.named_rules import ARRAY_API_TABLE, NUMPY_TABLE, RULE_NAMES, promotion_rule
from torch_promote.reference.promotion_rules.rule import CODES, NUMBER_TYPES

__all__ = ["BLOCKS", "main"]

_FILE = Path(__file__).parents[1] / "promotion_rules.md"

#: Expressions for which the rules give different results.
TELLING = (
    "int32[3] + 5.5",
    "int32[3] + float32[3]",
    "int64[3] + float16[3]",
    "float16[3] + bfloat16[3]",
    "int8[3] + int64[]",
    "float16[3] * float32[]",
    "bfloat16[3] + 1.5",
    "uint8[3] + int8[3]",
    "uint16[3] + int32[3]",
    "uint64[3] + int64[3]",
    "bool[3] + 1",
    "int32[3] / int32[3]",
    "int64[3] / int64[3]",
    "float32[3] + 1j",
)


def _result(expression: str, rule: str) -> str:
    derivation = why(expression, default_dtype=torch.float32, rule=rule)
    return "raises" if derivation.dtype is None else f"`{dtype_name(derivation.dtype)}`"


def _telling() -> str:
    rows = [[f"`{expression}`", *(_result(expression, rule) for rule in RULE_NAMES)] for expression in TELLING]
    return table(["", *(f"`{rule}`" for rule in RULE_NAMES)], rows)


def _codes() -> str:
    used = NUMPY_TABLE.split("\n")[1].split()
    return table(["typecode", "dtype"], [[f"`{code}`", f"`{dtype_name(CODES[code])}`"] for code in used])


def _square(text: str) -> str:
    header, *rows = (line.split() for line in text.strip().splitlines())
    bold = [f"**{code}**" for code in header]
    return table(["", *bold], [[f"**{row}**", *codes] for row, *codes in rows])


def _lattice() -> str:
    """One row for all float8 dtypes, since PyTorch versions have different ones."""
    rows = []
    for node, above in LATTICE.items():
        names = dict.fromkeys("float8, each by itself" if up in FLOAT8 else f"`{up}`" for up in above)
        if node not in FLOAT8:
            rows.append([f"`{node}`", ", ".join(names) or "nothing"])
    return table(["node", "directly above it"], [*rows, ["float8", "nothing"]])


def _numbers() -> str:
    shown = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64)
    rows = []
    for name in RULE_NAMES:
        rule = promotion_rule(name, torch.float32)
        for number in NUMBER_TYPES:
            found = [rule.of_number(number, dtype) for dtype in shown]
            cells = ["raises" if dtype is None else f"`{dtype_name(dtype)}`" for dtype in found]
            rows.append([f"`{name}`", f"`{number.__name__}`", *cells])
    return table(["rule", "number", *(f"`{dtype_name(dtype)}`" for dtype in shown)], rows)


def _division() -> str:
    shown = (torch.bool, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.float16, torch.float32)
    rows = []
    for name in RULE_NAMES:
        found = [promotion_rule(name, torch.float32).of_float(dtype) for dtype in shown]
        rows.append([f"`{name}`", *("raises" if dtype is None else f"`{dtype_name(dtype)}`" for dtype in found)])
    return table(["rule", *(f"`{dtype_name(dtype)}`" for dtype in shown)], rows)


def _exceptions() -> str:
    libraries = {
        "numpy": "NumPy",
        "jax": "JAX",
        "jax_without_x64": "JAX without 64-bit dtypes",
        "array_api": "standard",
    }
    return table(["library", "operands", "reason"], [[libraries[e.library], e.shown, e.reason] for e in EXCEPTIONS])


def _derivation(expression: str, rule: str) -> Callable[[], str]:
    return lambda: f"```text\n{why(expression, default_dtype=torch.float32, rule=rule)}\n```"


#: The blocks of the page, by name.
BLOCKS: dict[str, Callable[[], str]] = {
    "telling": _telling,
    "codes": _codes,
    "numpy": lambda: _square(NUMPY_TABLE),
    "array_api": lambda: _square(ARRAY_API_TABLE),
    "lattice": _lattice,
    "numbers": _numbers,
    "division": _division,
    "exceptions": _exceptions,
    "told": _derivation("int32[3] + 5.5", "jax"),
    "refused": _derivation("int8[3] * int64[]", "strict"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites or checks the page.

    Args:
        argv: The arguments. None: those of the process.

    Returns:
        0, or 1 if `--check` finds the page out of date.

    Example:
        >>> main(["--check"])
        0
    """
    return rewrite(argv, "docs/generators/promotion_rules_page.py", __doc__, _FILE, BLOCKS)


if __name__ == "__main__":
    sys.exit(main())
