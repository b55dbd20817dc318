"""Writes the tables and derivations of docs/promotion.md and docs/promotion_rules.md from the code that they document.

`python docs/generators/promotion_page.py` rewrites the text between the `<!-- begin: name -->` and `<!-- end: name -->`
lines of both pages. With `--check`, it only reports whether they are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from torch_promote.checking.why import why
from torch_promote.reference.dtypes import TYPECODES, dtype_name, typecode
from torch_promote.reference.ops.infer import rule_table
from torch_promote.reference.promotion import (
    TABLE_DTYPES,
    Casting,
    Operand,
    PromotionError,
    can_cast,
    promote_types,
    result_type,
)
from torch_promote.reference.promotion_rules.jax_rule import FLOAT8, LATTICE
from torch_promote.reference.promotion_rules.named_rules import ARRAY_API_TABLE, NUMPY_TABLE, RULE_NAMES, promotion_rule
from torch_promote.reference.promotion_rules.rule import CODES, NUMBER_TYPES
from torch_promote.reference.strides import suggest_memory_format
from torch_promote.reference.tensor_iterator import PRESETS, TensorIteratorConfig, infer_elementwise

__all__ = ["PAGES", "main", "rendered"]

_DOCS = Path(__file__).parents[1]
_EXCEPTIONS = _DOCS.parent / "tests" / "reference" / "golden" / "exceptions.toml"

#: Python's operators and the ops that they call.
OPERATORS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "true_divide",
    "//": "floor_divide",
    "%": "remainder",
    "**": "pow",
    "&": "bitwise_and",
    "|": "bitwise_or",
    "^": "bitwise_xor",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "==": "eq",
    "!=": "ne",
}

#: The expressions that promotion.md explains, in its order.
PUZZLES = (
    "int32[3] + 5.5",
    "int8[3] * int64[]",
    "uint8[2] + 1000",
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


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(items: Sequence[object]) -> list[str]:
    return [f"`{dtype_name(item) if isinstance(item, torch.dtype) else item}`" for item in items]


def _derivation(expression: str, rule: str = "torch") -> str:
    return _text(str(why(expression, default_dtype=torch.float32, rule=rule)))


def _text(text: str) -> str:
    return f"```text\n{text}\n```"


def _matrix(rows: Sequence[Sequence[str]]) -> str:
    """A matrix of short words, as text: a table of Markdown has as many bars as words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return _text("\n".join(aligned))


def _typecodes() -> str:
    return ", ".join(f"`{typecode(dtype)}` {dtype_name(dtype)}" for dtype in TABLE_DTYPES)


def _promotion() -> str:
    codes = [code for code in TYPECODES if TYPECODES[code] in TABLE_DTYPES]
    rows = [[a, *(str(typecode(promote_types(TYPECODES[a], TYPECODES[b]))) for b in codes)] for a in codes]
    return _matrix([["", *codes], *rows])


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
    return _table(["", "itself", *(f"`{dtype_name(d)}`" for d in others)], rows)


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
    return _table(["", *(f"`{name}`" for name, _ in weak)], rows)


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
    return _table(["", *(f"`{rule}`" for rule in rules)], rows)


def _presets() -> str:
    rows = []
    for name, config in PRESETS.items():
        values = {flag.name: getattr(config, flag.name) for flag in fields(TensorIteratorConfig)}
        dtype = [f"static_dtype={dtype_name(v)}" for v in values.values() if isinstance(v, torch.dtype)]
        rows.append([f"`{name}`", ", ".join([*(flag for flag, value in values.items() if value is True), *dtype])])
    return _table(["preset", "flags"], rows)


def _operators() -> str:
    found: dict[str, list[str]] = {}
    for symbol, op in OPERATORS.items():
        presets = (rule_table().get(f"aten::{op}{overload}") for overload in (".Tensor", ".Tensor_Tensor", ""))
        found.setdefault(str(next(filter(None, presets))), []).append(f"`{symbol}`")
    return "; ".join(f"{', '.join(symbols)}: `{preset}`" for preset, symbols in found.items()) + "."


def _puzzles() -> str:
    return "\n\n".join(map(_derivation, PUZZLES))


def _strides() -> str:
    rows = []
    for operands in STRIDES:
        result = infer_elementwise(*(Operand(torch.float32, *layout) for layout in operands))
        described = [f"{list(shape)}, strides {list(strides)}" for shape, strides in operands]
        rows.append([*described, f"{list(result.shape)}, strides {list(result.strides)}"])
    return _table(["first", "second", "result"], rows)


def _formats() -> str:
    rows = []
    for shape, strides in FORMATS:
        formats = [suggest_memory_format(shape, strides, exact_match=exact) for exact in (False, True)]
        rows.append([str(list(shape)), str(list(strides)), *(f"`{str(f).removeprefix('torch.')}`" for f in formats)])
    return _table(["sizes", "strides", "suggested", "with `exact_match`"], rows)


def _result(expression: str, rule: str) -> str:
    derivation = why(expression, default_dtype=torch.float32, rule=rule)
    return "raises" if derivation.dtype is None else f"`{dtype_name(derivation.dtype)}`"


def _telling() -> str:
    rows = [[f"`{expression}`", *(_result(expression, rule) for rule in RULE_NAMES)] for expression in TELLING]
    return _table(["", *(f"`{rule}`" for rule in RULE_NAMES)], rows)


def _codes() -> str:
    used = NUMPY_TABLE.split("\n")[1].split()
    return ", ".join(f"`{code}` {dtype_name(CODES[code])}" for code in used)


def _square(text: str) -> str:
    header, *rows = (line.split() for line in text.strip().splitlines())
    return _matrix([["", *header], *rows])


def _lattice() -> str:
    """All float8 dtypes are one node, since PyTorch versions have different ones."""
    lines = []
    for node, above in LATTICE.items():
        names = dict.fromkeys("float8 (each by itself)" if up in FLOAT8 else str(up) for up in above)
        if node not in FLOAT8 and names:
            lines.append(f"{node} < {', '.join(names)}")
    return _text("\n".join(lines))


def _numbers() -> str:
    shown = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64)
    rows = []
    for name in RULE_NAMES:
        rule = promotion_rule(name, torch.float32)
        for number in NUMBER_TYPES:
            found = [rule.of_number(number, dtype) for dtype in shown]
            rows.append([name, number.__name__, *("raises" if d is None else dtype_name(d) for d in found)])
    return _matrix([["rule", "number", *map(dtype_name, shown)], *rows])


def _division() -> str:
    shown = (torch.bool, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.float16, torch.float32)
    rows = []
    for name in RULE_NAMES:
        found = [promotion_rule(name, torch.float32).of_float(dtype) for dtype in shown]
        rows.append([name, *("raises" if dtype is None else dtype_name(dtype) for dtype in found)])
    return _matrix([["rule", *map(dtype_name, shown)], *rows])


def _exceptions() -> str:
    libraries = {
        "numpy": "NumPy",
        "jax": "JAX",
        "jax_without_x64": "JAX without 64-bit dtypes",
        "array_api": "standard",
    }
    entries = tomllib.loads(_EXCEPTIONS.read_text(encoding="utf-8"))["exception"]
    rows = [[libraries[entry["library"]], entry["shown"], entry["reason"].strip()] for entry in entries]
    return _table(["library", "operands", "reason"], rows)


#: The pages, each with its blocks by name.
PAGES: dict[str, Mapping[str, Callable[[], str]]] = {
    "promotion.md": {
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
    },
    "promotion_rules.md": {
        "telling": _telling,
        "codes": _codes,
        "numpy": lambda: _square(NUMPY_TABLE),
        "array_api": lambda: _square(ARRAY_API_TABLE),
        "lattice": _lattice,
        "numbers": _numbers,
        "division": _division,
        "exceptions": _exceptions,
        "told": lambda: _derivation("int32[3] + 5.5", "jax"),
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
