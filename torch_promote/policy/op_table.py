"""The op table: the rows of `op_policies.def`, which the C++ side expands too."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from torch_promote.errors import PolicyError
from torch_promote.policy.cast_policy import CastPolicy

__all__ = [
    "DEVICE_TYPES",
    "LEFT_TO_STOCK",
    "TABLE_VERSION",
    "Row",
    "op_table",
    "parse_table",
    "rows_by_name",
    "schema_of",
]

#: The device types that have a column in the table, in the order of the columns.
DEVICE_TYPES = ("cpu", "cuda")

#: The PyTorch version whose registrations the table describes. Other versions register other ops.
TABLE_VERSION = "2.13"
#: Ops that PyTorch registers and the table leaves to stock: stock's wrapper of this one re-flattens the weights.
LEFT_TO_STOCK = frozenset({"aten::_cudnn_rnn"})

_DEF_FILE = Path(__file__).with_name("op_policies.def")
_ROW = re.compile(r"^ROW\(\s*(\w+)\s*,\s*(\w*)\s*,\s*(\w+)\s*,\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)$")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the op table: an overload and its stock policy on each device type.

    Attributes:
        index: The position in the table, which is the op's number in C++.
        op: The op's name without its namespace, such as `softmax`.
        overload: The overload's name, `""` for the default one.
        cpu: Policy on the CPU in PyTorch 2.13.
        cuda: Policy on CUDA in PyTorch 2.13.
        redispatch_overload: The overload that `fp32_append_dtype` calls; `""` if there is none.
    """

    index: int
    op: str
    overload: str
    cpu: CastPolicy
    cuda: CastPolicy
    redispatch_overload: str = ""

    @property
    def name(self) -> str:
        """The qualified name: `aten::mm`, `aten::softmax.int`."""
        return f"aten::{self.op}" + (f".{self.overload}" if self.overload else "")

    def policy(self, device_type: str) -> CastPolicy:
        """The row's policy for a device type, "cpu" or "cuda"."""
        return self.cuda if device_type == "cuda" else self.cpu


@functools.cache
def op_table() -> tuple[Row, ...]:
    """Returns the rows of `op_policies.def`, in file order.

    Raises:
        PolicyError: A line of the file is neither a comment nor a row.

    Example:
        >>> next(row for row in op_table() if row.name == "aten::softmax.int").cuda
        <CastPolicy.fp32_set_opt_dtype: 'fp32_set_opt_dtype'>
    """
    return parse_table(_DEF_FILE.read_text(encoding="utf-8"), str(_DEF_FILE))


@functools.cache
def rows_by_name() -> Mapping[str, Row]:
    """Returns the rows of the table by full name.

    Example:
        >>> rows_by_name()["aten::mm"].cpu
        <CastPolicy.lower_precision_fp: 'lower_precision_fp'>
    """
    return MappingProxyType({row.name: row for row in op_table()})


def parse_table(text: str, where: str) -> tuple[Row, ...]:
    """Parses the text of a table file. Errors name the file as `where`."""
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("//"):
            continue
        match = _ROW.match(line)
        if match is None:
            raise PolicyError(
                f"{where}:{number}: not a row: {line!r}. Expected ROW(op, overload, cpu, cuda[, overload])."
            )
        op, overload, cpu, cuda, redispatch = match.groups()
        for policy in (cpu, cuda):
            if policy not in CastPolicy.__members__:
                legal = ", ".join(CastPolicy.__members__)
                raise PolicyError(f"{where}:{number}: no cast policy is called {policy!r}. Legal: {legal}.")
        rows.append(Row(len(rows), op, overload, CastPolicy(cpu), CastPolicy(cuda), redispatch or ""))
    return tuple(rows)


def schema_of(op: Row | str) -> torch._C.FunctionSchema | None:
    """Returns the schema of a row, or of the overload with a full name. None: the running PyTorch has no such overload.

    Example:
        >>> schema_of("aten::softmax.int").arguments[0].name
        'self'
        >>> schema_of("aten::softmax.out") is None
        True
    """
    name, _, overload = (op.name if isinstance(op, Row) else op).partition(".")
    try:
        return torch._C._get_schema(name, overload)
    except RuntimeError:
        return None
