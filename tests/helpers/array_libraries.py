"""The promotions of NumPy, JAX and array-api-strict: the source of the golden tables and of the live tests.

With numpy, jax[cpu] and ml_dtypes installed, from tests/: `python -m helpers.array_libraries` writes
the golden tables.

An answer table has sections. Each maps operands in words ("int32, Python float") to the name of a dtype, or "raises":

- sums: two arrays, or an array and a Python number
- quotients: true division of the same
- functions: atan2 of two arrays of a dtype; it is not defined for complex ones
- three: arrays of different dtypes, or two of them and a Python number, in any order
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: The folder of the golden tables.
GOLDEN = Path(__file__).parents[1] / "reference" / "golden"
RAISES = "raises"
NUMBERS: dict[str, Any] = {"Python bool": True, "Python int": 1, "Python float": 1.0, "Python complex": 1j}
Answers = dict[str, dict[str, str]]

STANDARD = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float32", "float64", "complex64", "complex128"),
)
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
SMALL_INTEGERS = ("int2", "int4", "uint2", "uint4")


def _answer(function: Callable[..., Any], *args: Any) -> str:
    try:
        result = function(*args)
    except (TypeError, ValueError):  # NumPy's DTypePromotionError is the first, JAX's TypePromotionError the second
        return RAISES
    return str(getattr(result, "dtype", result)).rpartition(".")[2]


def _answers(
    arrays: dict[str, Any],
    add: Callable[..., Any],
    divide: Callable[..., Any],
    atan2: Callable[..., Any],
    many: Callable[..., Any],
    of_many: Sequence[str],
) -> Answers:
    """The whole table. Adds two operands, and calls `many` for more than two, with the dtypes `of_many`."""
    values = arrays | NUMBERS

    def in_any_order(names: Sequence[str]) -> str:
        orders = itertools.permutations([values[name] for name in names])
        return " or ".join(sorted({_answer(many, *order) for order in orders}))

    return {
        "sums": {f"{a}, {b}": _answer(add, arrays[a], values[b]) for a in arrays for b in values},
        "quotients": {f"{a}, {b}": _answer(divide, arrays[a], values[b]) for a in arrays for b in values},
        "functions": {a: _answer(atan2, arrays[a], arrays[a]) for a in arrays if "complex" not in a},
        "three": {", ".join(names): in_any_order(names) for names in _threes(of_many)},
    }


def _threes(names: Sequence[str]) -> list[tuple[str, ...]]:
    with_numbers = itertools.product(itertools.combinations(names, 2), NUMBERS)
    return [*itertools.combinations(names, 3), *((*pair, number) for pair, number in with_numbers)]


def numpy_answers() -> tuple[dict[str, str], Answers]:
    """NumPy's, with ml_dtypes for missing dtypes. Uses sums, because numpy.result_type ignores ml_dtypes' ufuncs."""
    import ml_dtypes
    import numpy as np

    names = (*STANDARD, "float16", "bfloat16", *FLOAT8, *SMALL_INTEGERS)
    arrays = {name: np.ones(2, getattr(ml_dtypes, name, None) or name) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _answers(arrays, np.add, np.true_divide, np.arctan2, np.result_type, (*STANDARD, "float16"))
    return {"numpy": version("numpy"), "ml_dtypes": version("ml_dtypes")}, found


def numpy_answers_without_ml_dtypes() -> Answers:
    """NumPy's without ml_dtypes, for environments in which it is not installed."""
    import numpy as np

    arrays = {name: np.ones(2, name) for name in (*STANDARD, "float16")}
    return _answers(arrays, np.add, np.true_divide, np.arctan2, np.result_type, tuple(arrays))


def array_api_answers() -> Answers:
    """array-api-strict's."""
    import array_api_strict as xp

    arrays = {name: xp.ones(2, dtype=getattr(xp, name)) for name in STANDARD}
    return _answers(arrays, xp.result_type, xp.divide, xp.atan2, xp.result_type, STANDARD)


def jax_answers(x64: bool = True) -> tuple[dict[str, str], Answers]:
    """JAX's, with its 64-bit dtypes or without them, on its CPU build."""
    import jax
    import jax.numpy as jnp

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", x64)
    try:
        own = [name for name in STANDARD if x64 or not name.endswith("64") or name == "complex64"]
        names = [name for name in (*own, "float16", "bfloat16") if x64 or name != "complex128"]
        arrays = {name: jnp.ones(2, name) for name in (*names, *FLOAT8, *SMALL_INTEGERS)}
        found = _answers(
            arrays, jnp.result_type, jnp.true_divide, jnp.arctan2, jnp.result_type, (*names, "float8_e5m2")
        )
    finally:
        jax.config.update("jax_enable_x64", before)
    return {"jax": version("jax"), "jaxlib": version("jaxlib")}, found


def jax_answers_without_x64() -> tuple[dict[str, str], Answers]:
    """JAX's by default, where Python floats count as float32 and there are no 64-bit dtypes."""
    return jax_answers(x64=False)


#: Each golden table: how it is made, the rule that is compared with it, and the default dtype that the rule is for.
LIBRARIES: dict[str, tuple[Callable[[], tuple[dict[str, str], Answers]], str, str]] = {
    "numpy": (numpy_answers, "numpy", "float32"),
    "jax": (jax_answers, "jax", "float64"),
    "jax_without_x64": (jax_answers_without_x64, "jax", "float32"),
}


#: Operands and answers as the golden tables spell them.
CODES = {
    **dict(zip(STANDARD, ["b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8", "c4", "c8"], strict=True)),
    "float16": "f2",
    "bfloat16": "bf",
    RAISES: "--",
    **{name: name for name in SMALL_INTEGERS},
    **{name: name.removeprefix("float8_") for name in FLOAT8},
    **{name: name.removeprefix("Python ") for name in NUMBERS},
}
NAMES = {code: name for name, code in CODES.items()}


def golden_text(versions: dict[str, str], answers: Answers) -> str:
    """A table as text: a matrix each for sums and quotients, with the second operand in the columns, and lists.

    Of three operands, of the dtypes in the section's title, only those are listed whose answer is not that for the sum
    of the first two and the third.
    """
    lines = [f"# {', '.join(f'{library} {number}' for library, number in versions.items())}"]
    for section in ("sums", "quotients"):
        rows, columns = (list(dict.fromkeys(key.split(", ")[place] for key in answers[section])) for place in (0, 1))
        matrix = [[f"[{section}]", *(CODES[column] for column in columns)]]
        matrix += [[CODES[row], *(CODES[answers[section][f"{row}, {column}"]] for column in columns)] for row in rows]
        lines += ["", *(" ".join(f"{cell:<9}" for cell in line).rstrip() for line in matrix)]
    threes, folded = answers["three"], _folded(answers["sums"], answers["three"])
    of_many = dict.fromkeys(name for key in threes for name in key.split(", ") if name not in NUMBERS)
    listed = {
        "[functions]": answers["functions"],
        f"[three] {' '.join(CODES[name] for name in of_many)}": {
            key: found for key, found in threes.items() if found != folded[key]
        },
    }
    for title, table in listed.items():
        lines += ["", title]
        for answer in dict.fromkeys(table.values()):
            keys = (
                ",".join(CODES[name] for name in key.split(", ")) for key, found in table.items() if found == answer
            )
            lines.append(f"{CODES[answer]:<9} {' '.join(keys)}")
    return "\n".join(lines) + "\n"


def _folded(sums: dict[str, str], threes: Iterable[str]) -> dict[str, str]:
    """The answers for three operands, by the sum of the first two and the third."""
    found = {}
    for key in threes:
        a, b, c = key.split(", ")
        found[key] = sums.get(f"{sums[f'{a}, {b}']}, {c}", RAISES)
    return found


def golden_answers(text: str) -> Answers:
    """Reads a table that `golden_text` has written."""
    answers: Answers = {}
    for block in text.split("\n\n")[1:]:
        head, *lines = block.splitlines()
        section, _, header = head[1:].partition("]")
        columns = [NAMES[code] for code in header.split()]
        found = answers[section] = {}
        if section == "three":
            found |= _folded(answers["sums"], [", ".join(names) for names in _threes(columns)])
        for row, *cells in (line.split() for line in lines):
            if section in ("sums", "quotients"):
                found |= {f"{NAMES[row]}, {b}": NAMES[cell] for b, cell in zip(columns, cells, strict=True)}
            else:
                found |= {", ".join(NAMES[code] for code in cell.split(",")): NAMES[row] for cell in cells}
    return answers


def main() -> None:
    for name, (answers, _, _) in LIBRARIES.items():
        (GOLDEN / f"{name}.txt").write_text(golden_text(*answers()), encoding="utf-8")


if __name__ == "__main__":
    main()
