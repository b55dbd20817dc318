"""Writes the tables and examples of docs/promotion.md from the code that they document.

`python docs/generators/promotion_page.py` rewrites the text between the page's `<!-- begin: name -->` and
`<!-- end: name -->` lines. With `--check`, it only reports whether the page is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from pages import rendered, rewrite, table
from torch_promote.reference.derivation.derivation import why
from torch_promote.reference.derivation.operators import OPERATORS
from torch_promote.reference.dtypes import TYPECODES, dtype_name, typecode
from torch_promote.reference.promotion import (
    TABLE_DTYPES,
    Casting,
    Operand,
    PromotionError,
    can_cast,
    promote_types,
    promotion_table,
    result_type,
)
from torch_promote.reference.strides import suggest_memory_format
from torch_promote.reference.tensor_iterator import PRESETS, TensorIteratorConfig, infer_elementwise

__all__ = ["BLOCKS", "main", "render"]

_FILE = Path(__file__).parents[1] / "promotion.md"

#: The expressions that the page explains, in its order.
PUZZLES = (
    "int32[3] + 5.5",
    "int8[3] * int64[]",
    "int8[3] * float64[]",
    "int32[3] + int64[]",
    "uint8[2] + 1000",
    "bfloat16[3] + float16[3]",
    "int64[3] / 5",
)

#: Shape and strides of two operands, for examples of result strides.
STRIDES = (
    (((2, 3, 4, 5), (60, 1, 15, 3)), ((3, 4, 5), (20, 5, 1))),
    (((2, 3, 1, 1), (3, 1, 3, 3)), ((3, 1, 1), (1, 1, 1))),
    (((2, 3, 1, 1), (3, 1, 3, 3)), ((3, 1, 3), (1, 3, 3))),
)

#: Shapes and strides that fit both memory formats.
FORMATS = (
    ((2, 1, 4, 4), (16, 16, 4, 1)),
    ((2, 1, 4, 4), (16, 1, 4, 1)),
    ((2, 4, 1, 1), (4, 1, 1, 1)),
    ((2, 4, 1, 1), (4, 1, 4, 4)),
    ((2, 1, 1, 1), (1, 1, 1, 1)),
    ((2, 3, 4, 4), (96, 1, 24, 6)),
)


#: One dtype for each family outside the table.
_FAMILY_NAMES = ("uint16", "uint4", "int4", "float8_e5m2", "float4_e2m1fn_x2", "bits8", "qint8")


def _typecodes() -> str:
    return table(["typecode", "dtype"], [[f"`{typecode(d)}`", f"`{dtype_name(d)}`"] for d in TABLE_DTYPES])


def _promotion() -> str:
    codes = [code for code in TYPECODES if TYPECODES[code] in TABLE_DTYPES]
    promoted = promotion_table()
    rows = [[f"**{a}**", *(str(typecode(promoted[TYPECODES[a], TYPECODES[b]])) for b in codes)] for a in codes]
    return table(["", *(f"**{code}**" for code in codes)], rows)


def _younger() -> str:
    """Promotions of one dtype of each family outside the table, with itself and with others."""
    families = tuple(getattr(torch, name) for name in _FAMILY_NAMES if hasattr(torch, name))
    others = (torch.bool, torch.int32, torch.uint32, torch.float16, torch.complex64)
    rows = []
    for dtype in families:
        results = []
        for other in (dtype, *others):
            try:
                results.append(f"`{dtype_name(promote_types(dtype, other))}`")
            except PromotionError:
                results.append("error")
        rows.append([f"`{dtype_name(dtype)}`", *results])
    return table(["", "itself", *(f"`{dtype_name(d)}`" for d in others)], rows)


def _states() -> str:
    """A row for the operand with dimensions, a column for a weaker one."""
    strong = (torch.bool, torch.int8, torch.int64, torch.float16, torch.float64, torch.complex64)
    weak: tuple[tuple[str, Operand | float | complex | int], ...] = (
        ("int64[]", Operand(torch.int64)),
        ("float64[]", Operand(torch.float64)),
        ("complex128[]", Operand(torch.complex128)),
        ("1", 1),
        ("1.0", 1.0),
        ("1j", 1j),
    )
    rows = [
        [f"`{dtype_name(d)}[3]`", *(f"`{dtype_name(result_type(d, w, default_dtype=torch.float32))}`" for _, w in weak)]
        for d in strong
    ]
    return table(["", *(f"`{name}`" for name, _ in weak)], rows)


def _casting() -> str:
    rules: tuple[Casting, ...] = ("torch", "no", "safe", "same_kind", "unsafe")
    casts = (
        (torch.int64, torch.int8),
        (torch.int8, torch.uint8),
        (torch.int64, torch.bool),
        (torch.int64, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.int64),
        (torch.complex64, torch.float64),
    )
    rows = [
        [f"`{dtype_name(a)}` to `{dtype_name(b)}`", *("yes" if can_cast(a, b, rule) else "no" for rule in rules)]
        for a, b in casts
    ]
    return table(["", *(f"`{rule}`" for rule in rules)], rows)


def _presets() -> str:
    names = list(PRESETS)
    rows = []
    for flag in fields(TensorIteratorConfig):
        values = [getattr(PRESETS[name], flag.name) for name in names]
        cells = [dtype_name(v) if isinstance(v, torch.dtype) else {True: "yes", False: "", None: ""}[v] for v in values]
        rows.append([f"`{flag.name}`", *cells])
    return table(["", *(f"`{name}`" for name in names)], rows)


def _operators() -> str:
    return table(
        ["operator", "op", "preset"], [[f"`{s}`", f"`{o.op}`", f"`{o.preset}`"] for s, o in OPERATORS.items()]
    ).replace("`|`", "`\\|`")


def _puzzles() -> str:
    return "\n\n".join(f"```text\n{why(puzzle, default_dtype=torch.float32)}\n```" for puzzle in PUZZLES)


def _strides() -> str:
    rows = []
    for operands in STRIDES:
        result = infer_elementwise(*(Operand(torch.float32, *layout) for layout in operands))
        described = [f"{list(shape)}, strides {list(strides)}" for shape, strides in operands]
        rows.append([*described, f"{list(result.shape)}, strides {list(result.strides)}"])
    return table(["first", "second", "result"], rows)


def _formats() -> str:
    rows = []
    for shape, strides in FORMATS:
        formats = [suggest_memory_format(shape, strides, exact_match=exact) for exact in (False, True)]
        rows.append([str(list(shape)), str(list(strides)), *(f"`{str(f).removeprefix('torch.')}`" for f in formats)])
    return table(["sizes", "strides", "suggested", "with `exact_match`"], rows)


#: The blocks of the page, by name.
BLOCKS: dict[str, Callable[[], str]] = {
    "typecodes": _typecodes,
    "promotion": _promotion,
    "younger": _younger,
    "states": _states,
    "casting": _casting,
    "presets": _presets,
    "operators": _operators,
    "puzzles": _puzzles,
    "strides": _strides,
    "formats": _formats,
}


def render(text: str) -> str:
    r"""Returns the page with all blocks rewritten.

    Args:
        text: The page, with its begin and end lines.

    Raises:
        ValueError: The page's blocks are not those of `BLOCKS`.

    Example:
        >>> render("<!-- begin: nothing -->\n<!-- end: nothing -->")
        Traceback (most recent call last):
        ...
        ValueError: the page's blocks are not those of BLOCKS: nothing.
    """
    return rendered(text, BLOCKS)


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
    return rewrite(argv, "docs/generators/promotion_page.py", __doc__, _FILE, BLOCKS)


if __name__ == "__main__":
    sys.exit(main())
