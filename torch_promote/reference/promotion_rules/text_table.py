"""Reads and checks promotion tables written as text in typecodes."""

from __future__ import annotations

import torch

from torch_promote.errors import RuleDefinitionError
from torch_promote.reference.dtypes import TYPECODES

__all__ = ["CODES", "NONE", "read_table"]

#: The typecodes of PyTorch's table, and those of unsigned dtypes without a row in it.
CODES: dict[str, torch.dtype] = TYPECODES | {"u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64}

#: Marks a pair without a common dtype.
NONE = "--"


def read_table(text: str) -> dict[tuple[torch.dtype, torch.dtype], torch.dtype | None]:
    """Returns a square table as a mapping of ordered pairs.

    Args:
        text: A header of typecodes, followed by a row for each, in the same order. A row starts with its typecode.

    Raises:
        RuleDefinitionError: The table is not square or not symmetric, contains an unknown typecode, or promotes a dtype
            with itself to another one.

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
        raise RuleDefinitionError("a table has one row for each typecode of its header, in the same order.")
    found = {(row, column): code for row, *codes in rows for column, code in zip(header, codes, strict=True)}
    for (row, column), code in found.items():
        if code not in CODES and code != NONE:
            raise RuleDefinitionError(f"no dtype has the typecode {code}.")
        if found[column, row] != code:
            raise RuleDefinitionError(f"the table has {code} for {row} with {column}, but not for {column} with {row}.")
        if row == column and code != row:
            raise RuleDefinitionError(f"the table has {code} for {row} with itself.")
    return {(CODES[row], CODES[column]): CODES.get(code) for (row, column), code in found.items()}
