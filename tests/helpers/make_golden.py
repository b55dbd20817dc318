"""Writes the golden tables: the promotions of NumPy, JAX and array-api-strict, with the libraries' versions.

With numpy, jax[cpu], array-api-strict and ml_dtypes installed, from tests/: `python -m helpers.make_golden`.
With `--check`, nothing is written, and the exit status is 1 if a table would change.
"""

from __future__ import annotations

import json
import sys

from helpers.array_libraries import GOLDEN, LIBRARIES


def text_of(name: str) -> str:
    """One golden table as JSON."""
    versions, answers = LIBRARIES[name][0]()
    return json.dumps({"versions": versions, **answers}, indent=1) + "\n"


def main(arguments: list[str]) -> int:
    """Writes the tables, or reports which are out of date."""
    changed = 0
    for name in LIBRARIES:
        file, text = GOLDEN / f"{name}.json", text_of(name)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            changed += 1
            print(f"{file.name} {'would change' if '--check' in arguments else 'written'}")
            if "--check" not in arguments:
                file.write_text(text, encoding="utf-8")
    return 1 if changed and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
