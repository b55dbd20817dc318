"""Tables of promotions as text, in short typecodes: read, and checked as they are read."""

from __future__ import annotations

import torch

from torch_promote.errors import RuleDefinitionError
from torch_promote.reference.dtypes import TYPECODES

__all__ = ["CODES", "NONE", "read_table"]

#: The typecodes of PyTorch's table, and those of the unsigned dtypes that it has no rows for.
CODES: dict[str, torch.dtype] = TYPECODES | {"u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64}

#: Stands in a table where two dtypes have no common one.
NONE = "--"


def read_table(text: str) -> dict[tuple[torch.dtype, torch.dtype], torch.dtype | None]:
    """Returns a square table as a mapping of ordered pairs.

    Args:
        text: A header of typecodes, and below it a row for each of them, in the same order, that starts with it.

    Raises:
        RuleDefinitionError: The table is not square, not symmetric, has an unknown typecode, or has a dtype that does
            not promote to itself with itself.

    Example:
        >>> table = read_table('''
        ...      i4 f4
        ... i4   i4 --
        ... f4   -- f4
        ... ''')
        >>> table[torch.int32, torch.float32] is None
        True
    """
    header, *rows = (line.split() for line in text.strip().splitlines())
    if [row[0] for row in rows] != header or any(len(row) != len(header) + 1 for row in rows):
        raise RuleDefinitionError("a table has one row for each typecode of its header, in its order.")
    found = {(row, column): code for row, *codes in rows for column, code in zip(header, codes, strict=True)}
    for (row, column), code in found.items():
        if code not in CODES and code != NONE:
            raise RuleDefinitionError(f"no dtype has the typecode {code}.")
        if found[column, row] != code:
            raise RuleDefinitionError(f"the table says {code} for {row} with {column}, and not the other way round.")
        if row == column and code != row:
            raise RuleDefinitionError(f"the table says {code} for {row} with itself.")
    return {(CODES[row], CODES[column]): CODES.get(code) for (row, column), code in found.items()}
