"""The promotions of NumPy, JAX and array-api-strict: the source of the golden tables and of the live tests.

With numpy, jax[cpu], array-api-strict and ml_dtypes installed, from tests/: `python -m helpers.array_libraries` writes
the golden tables.

An answer table has sections. Each maps operands in words ("int32, float") to the name of a dtype, or to "raises":

- pairs: two arrays
- numbers: an array and a Python number
- division: true division of two arrays
- division_by_numbers: true division of an array by a Python number
- functions: atan2 of two arrays of a dtype; it is not defined for complex ones
- triples: three arrays of different dtypes, in any order
- pairs_with_numbers: two arrays of different dtypes and a Python number
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: The folder of the golden tables.
GOLDEN = Path(__file__).parents[1] / "reference" / "golden"
RAISES = "raises"
NUMBERS = {"bool": True, "int": 1, "float": 1.0, "complex": 1j}
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
    return {
        "pairs": {f"{a}, {b}": _answer(add, arrays[a], arrays[b]) for a in arrays for b in arrays},
        "numbers": {f"{a}, {n}": _answer(add, arrays[a], number) for a in arrays for n, number in NUMBERS.items()},
        "division": {f"{a}, {b}": _answer(divide, arrays[a], arrays[b]) for a in arrays for b in arrays},
        "division_by_numbers": {
            f"{a}, {n}": _answer(divide, arrays[a], number) for a in arrays for n, number in NUMBERS.items()
        },
        "functions": {a: _answer(atan2, arrays[a], arrays[a]) for a in arrays if "complex" not in a},
        "triples": {
            ", ".join(names): _in_any_order(many, [arrays[name] for name in names])
            for names in itertools.combinations(of_many, 3)
        },
        "pairs_with_numbers": {
            f"{a}, {b}, {n}": _in_any_order(many, [arrays[a], arrays[b], number])
            for a, b in itertools.combinations(of_many, 2)
            for n, number in NUMBERS.items()
        },
    }


def _in_any_order(function: Callable[..., Any], operands: Sequence[Any]) -> str:
    found = {_answer(function, *order) for order in itertools.permutations(operands)}
    return " or ".join(sorted(found))


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


def array_api_answers() -> tuple[dict[str, str], Answers]:
    """array-api-strict's."""
    import array_api_strict as xp

    arrays = {name: xp.ones(2, dtype=getattr(xp, name)) for name in STANDARD}
    versions = {"array-api-strict": version("array-api-strict"), "standard": xp.__array_api_version__}
    return versions, _answers(arrays, xp.result_type, xp.divide, xp.atan2, xp.result_type, STANDARD)


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
    "array_api": (array_api_answers, "array_api", "float32"),
}


#: Dtypes as the golden tables spell them; the others, and the Python numbers, by their names.
CODES = {
    "bool": "b1",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "raises": "--",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "bfloat16": "bf",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c4",
    "complex128": "c8",
    **{name: name for name in SMALL_INTEGERS},
    **{name: name.removeprefix("float8_") for name in FLOAT8},
}
NAMES = {code: name for name, code in CODES.items()}
#: The sections whose last operand is a Python number.
WITH_NUMBER = ("numbers", "division_by_numbers", "pairs_with_numbers")


def golden_text(versions: dict[str, str], answers: Answers) -> str:
    """A table as text: a matrix for each section, with the last operand in the columns and the others in the rows."""
    lines = [f"# {', '.join(f'{library} {number}' for library, number in versions.items())}"]
    for section, table in answers.items():
        places = {operands: operands.rpartition(", ")[::2] for operands in table}
        cells = {places[operands]: CODES[answer] for operands, answer in table.items()}
        rows, columns = (list(dict.fromkeys(place[k] for place in places.values())) for k in (0, 1))
        header = columns if section in WITH_NUMBER else [CODES[column] for column in columns]
        matrix = [[f"[{section}]", *header]]
        for row in rows:
            spelled = ",".join(CODES[name] for name in row.split(", ") if name) or "*"
            matrix.append([spelled, *(cells.get((row, column), ".") for column in columns)])
        lines += ["", *("  ".join(f"{cell:<7}" for cell in line).rstrip() for line in matrix)]
    return "\n".join(lines) + "\n"


def golden_answers(text: str) -> Answers:
    """Reads a table that `golden_text` has written."""
    answers: Answers = {}
    for block in text.split("\n\n")[1:]:
        (section, *columns), *rows = (line.split() for line in block.splitlines())
        section = section.strip("[]")
        if section not in WITH_NUMBER:
            columns = [NAMES[column] for column in columns]
        answers[section] = {
            ", ".join([*(NAMES[code] for code in row.split(",") if code != "*"), column]): NAMES[cell]
            for row, *cells in rows
            for column, cell in zip(columns, cells, strict=True)
            if cell != "."
        }
    return answers


def main() -> None:
    for name, (answers, _, _) in LIBRARIES.items():
        (GOLDEN / f"{name}.txt").write_text(golden_text(*answers()), encoding="utf-8")


if __name__ == "__main__":
    main()
