"""The table of op rules: the `.rules` files beside this module, one line for each overload.

    sort.stable                same int64
    native_batch_norm_backward wanted(0, input) wanted(1, weight, save_mean) wanted(2, weight, save_mean)

A line names an overload of aten and, for each of its results, a rule or a dtype. The names in parentheses are the
arguments that the rule uses; the default is the first tensor or all tensors, depending on the rule. An elementwise op
has one result and an elementwise rule. `each(add.Tensor)` names the op that an op on lists runs on their elements.
Lines that start with # are comments.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Entry", "Term", "rule_table"]

_LINE = re.compile(r"^(?P<op>\w+(?:\.\w+)?)\s+(?P<terms>\w.*)$")
_TERM = re.compile(r"(\w+)(?:\(([^()]*)\))?")


@dataclass(frozen=True)
class Term:
    """The rule for one result: its name, and the names of the arguments that it uses.

    Attributes:
        rule: The name of a rule or of a dtype.
        names: The names in parentheses.

    Example:
        >>> str(Term("wanted", ("1", "weight")))
        'wanted(1, weight)'
    """

    rule: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.rule}({', '.join(self.names)})" if self.names else self.rule


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        op: The overload's name, such as `aten::add.Tensor`.
        terms: One for each result.
        family: The name of the file, such as `elementwise`.

    Example:
        >>> rule_table()["aten::sort"].terms, rule_table()["aten::sort"].family
        ((Term(rule='same', names=()), Term(rule='int64', names=())), 'reductions')
    """

    op: str
    terms: tuple[Term, ...]
    family: str

    def __str__(self) -> str:
        return ", ".join(map(str, self.terms))


@functools.cache
def rule_table() -> dict[str, Entry]:
    """Returns the lines of all `.rules` files, by overload.

    Raises:
        ValueError: A line is neither a comment nor a rule, or an overload has two lines.

    Example:
        >>> print(rule_table()["aten::sort"])
        same, int64
    """
    table: dict[str, Entry] = {}
    for path in sorted((Path(__file__).parent / "rules").glob("*.rules")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.match(line)
            if match is None:
                raise ValueError(f"{path}:{number}: not a rule: {line!r}. Expected an overload and a rule per result.")
            op = f"aten::{match['op']}"
            if op in table:
                raise ValueError(f"{path}:{number}: {op} already has a rule in {table[op].family}.rules.")
            table[op] = Entry(op, _terms(match["terms"]), path.stem)
    return table


def _terms(text: str) -> tuple[Term, ...]:
    return tuple(
        Term(rule, tuple(name.strip() for name in names.split(",") if name.strip()))
        for rule, names in _TERM.findall(text)
    )
