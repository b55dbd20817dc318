"""Writes the tables and derivations of docs/promotion.md and docs/promotion_rules.md from the code that they document.

`python docs/generators/promotion_page.py` rewrites the text between the `<!-- begin: name -->` and `<!-- end: name -->`
lines of both pages. With `--check`, it only reports whether they are up to date.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_promote.checking.why import why
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion import (
    CODES,
    PROMOTION_TABLE,
    Operand,
    PromotionError,
    promote_types,
    result_type,
)
from torch_promote.reference.promotion_rules.named_rules import (
    FLOAT8,
    LATTICE,
    NUMPY_TABLE,
    RULE_NAMES,
    RuleName,
    promotion_rule,
)
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES
from torch_promote.reference.tensor_iterator import infer_elementwise

__all__ = ["PAGES", "main", "rendered"]

_DOCS = Path(__file__).parents[1]

#: The expressions that promotion.md explains, in its order.
PUZZLES = (
    "int32[3] + 5.5",
    "uint8[2] + 1000",
    "int64[3] / 5",
)

#: Expressions for which the rules give different results.
TELLING = (
    *("int32[3] + 5.5", "int32[3] + float32[3]", "int64[3] + float16[3]", "float16[3] + bfloat16[3]"),
    *("int8[3] + int64[]", "bfloat16[3] + 1.5"),
    *("uint64[3] + int64[3]", "bool[3] + 1", "int32[3] / int32[3]"),
    *("int64[3] / int64[3]", "bool[3] / 3", "3 / bool[3]", "float32[3] + 1j"),
)

#: Shape and strides of two operands, for examples of result strides.
STRIDES = (
    (((2, 3, 4, 5), (60, 1, 15, 3)), ((3, 4, 5), (20, 5, 1))),
    (((2, 3, 1, 1), (3, 1, 3, 3)), ((3, 1, 1), (1, 1, 1))),
    (((2, 3, 1, 1), (3, 1, 3, 3)), ((3, 1, 3), (1, 3, 3))),
)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def _code(items: Iterable[object], none: str = "raises") -> list[str]:
    """The items as code; dtypes by their names."""
    names = (dtype_name(item) if isinstance(item, torch.dtype) else item for item in items)
    return [none if name is None else f"`{name}`" for name in names]


def _names(dtypes: Iterable[torch.dtype | None]) -> list[str]:
    return ["raises" if dtype is None else dtype_name(dtype) for dtype in dtypes]


def _text(text: str) -> str:
    return f"```text\n{text}\n```"


def _matrix(rows: Sequence[Sequence[str]]) -> str:
    """A matrix of short words, as text: a table of Markdown has as many bars as words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return _text("\n".join(aligned))


def _square(text: str) -> str:
    """A table in typecodes."""
    header, *rows = (line.split() for line in text.strip().splitlines())
    return _matrix([["", *header], *rows])


def _codes(text: str) -> str:
    """The typecodes of a table."""
    return ", ".join(f"`{code}` {dtype_name(CODES[code])}" for code in text.split("\n")[1].split())


def _promoted(a: str, b: str) -> torch.dtype | None:
    try:
        return promote_types(a, b)
    except PromotionError:
        return None


def _younger() -> str:
    """Promotions of one dtype of each family outside the table, with itself and with others."""
    others = ("bool", "int32", "uint32", "float16", "complex64")
    families = ("uint16", "int4", "float8_e5m2", "qint8")
    rows = [_code([a, *(_promoted(a, b) for b in (a, *others))], "error") for a in families if hasattr(torch, a)]
    return _table(["", "itself", *_code(others)], rows)


def _states() -> str:
    """A row for the operand with dimensions, a column for a weaker one."""
    zeros = {f"{name}[]": Operand(getattr(torch, name)) for name in ("int64", "float64", "complex128")}
    weak: dict[str, Any] = {**zeros, "1": 1, "1.0": 1.0, "1j": 1j}
    rows = []
    for strong in ("bool", "int8", "int64", "float16", "float64", "complex64"):
        results = (result_type(strong, operand, default_dtype=torch.float32) for operand in weak.values())
        rows.append(_code([f"{strong}[3]", *results]))
    return _table(["", *_code(weak)], rows)


def _strides() -> str:
    rows = []
    for operands in STRIDES:
        result = infer_elementwise(*(Operand(torch.float32, *layout) for layout in operands))
        layouts = [*operands, (result.shape, result.strides)]
        rows.append([f"{list(shape)}, strides {list(strides)}" for shape, strides in layouts])
    return _table(["first", "second", "result"], rows)


def _derivation(expression: str, rule: RuleName = "torch") -> str:
    return _text(str(why(expression, default_dtype=torch.float32, rule=rule)))


def _telling() -> str:
    rows = []
    for expression in TELLING:
        found = (why(expression, default_dtype=torch.float32, rule=rule).dtype for rule in RULE_NAMES)
        rows.append(_code([expression, *found]))
    return _table(["", *_code(RULE_NAMES)], rows)


def _lattice() -> str:
    """All float8 dtypes are one node, since PyTorch versions have different ones."""
    lines = []
    for node, above in LATTICE.items():
        names = dict.fromkeys("float8 (each by itself)" if up in FLOAT8 else str(up) for up in above)
        if node not in FLOAT8 and names:
            lines.append(f"{node} < {', '.join(names)}")
    return _text("\n".join(lines))


def _numbers() -> str:
    shown = [getattr(torch, name) for name in ["bool", "int64", "float16", "float64", "complex64"]]
    rows = []
    for name, number in itertools.product(RULE_NAMES, NUMBER_TYPES):
        rule = promotion_rule(name, torch.float32)
        rows.append([name, number.__name__, *_names(rule.of_number(number, dtype) for dtype in shown)])
    return _matrix([["rule", "number", *map(dtype_name, shown)], *rows])


#: The pages, each with its blocks by name.
PAGES: dict[str, Mapping[str, Callable[[], str]]] = {
    "promotion.md": {
        "typecodes": lambda: _codes(PROMOTION_TABLE),
        "promotion": lambda: _square(PROMOTION_TABLE),
        "younger": _younger,
        "states": _states,
        "puzzles": lambda: "\n\n".join(map(_derivation, PUZZLES)),
        "strides": _strides,
    },
    "promotion_rules.md": {
        "telling": _telling,
        "codes": lambda: _codes(NUMPY_TABLE),
        "numpy": lambda: _square(NUMPY_TABLE),
        "lattice": _lattice,
        "numbers": _numbers,
        "refused": lambda: _derivation("int8[3] * int64[]", "strict"),
    },
}


def rendered(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Returns a page with the text between the begin and end lines of each block rewritten.

    Args:
        text: The page.
        blocks: Maps names of blocks to functions that return their text.

    Raises:
        ValueError: The page has not exactly these blocks, once each.
    """
    pattern = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
    found = [match.group(2) for match in pattern.finditer(text)]
    # Exactly once each: without this check, text whose markers were lost would go stale unnoticed.
    if sorted(found) != sorted(blocks):
        raise ValueError(f"the page's blocks are {', '.join(found)}, and should be {', '.join(blocks)}, once each.")
    return pattern.sub(lambda match: f"{match.group(1)}\n{blocks[match.group(2)]()}\n\n{match.group(3)}", text)


def main(argv: Sequence[str] | None = None, folder: Path = _DOCS) -> int:
    """Rewrites or checks the pages. Returns 1 if `--check` finds one out of date, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(argv).check
    stale = []
    for name, blocks in PAGES.items():
        text = (folder / name).read_text(encoding="utf-8")
        written = rendered(text, blocks)
        if written != text:
            stale.append(name)
            if not check:
                (folder / name).write_text(written, encoding="utf-8")
    if check and stale:
        print(f"out of date: {', '.join(stale)}. Run python docs/generators/promotion_page.py.", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
