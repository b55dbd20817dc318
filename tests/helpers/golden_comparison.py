"""Compares a promotion rule with a library's promotions, except for deliberate differences."""

from __future__ import annotations

import json
import re
import tomllib
from typing import NamedTuple

import torch

from helpers.array_libraries import GOLDEN, LIBRARIES, RAISES, Answers, entries
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion_rules import PromotionRule, PromotionRuleError, promotion_rule

NUMBERS: dict[str, int | float | complex] = {"bool": True, "int": 1, "float": 1.0, "complex": 1j}

#: The number of operands of a section that are arrays; the others are Python numbers.
ARRAYS = {"pairs": 2, "numbers": 1, "division": 2, "division_by_numbers": 1, "functions": 1, "triples": 3}
ARRAYS["pairs_with_numbers"] = 2


class DeliberateException(NamedTuple):
    """Operands for which a rule deliberately differs from its library: an entry of exceptions.toml.

    `library` is the golden table; `section`, `operands`, `theirs` and `ours` are regular expressions over it and over
    the rule's result; `shown` and `reason` are for the documentation.
    """

    library: str
    section: str
    operands: str
    theirs: str
    ours: str
    shown: str
    reason: str

    def covers(self, library: str, section: str, operands: str, theirs: str, ours: str) -> bool:
        """Whether this exception covers a difference."""
        asked = (section, operands, theirs, ours)
        patterns = (self.section, self.operands, self.theirs, self.ours)
        return library == self.library and all(map(re.fullmatch, patterns, asked))


EXCEPTIONS = tuple(
    DeliberateException(**entry)
    for entry in tomllib.loads((GOLDEN / "exceptions.toml").read_text(encoding="utf-8"))["exception"]
)

FLOATING = ("division", "division_by_numbers", "functions")


def golden(name: str) -> tuple[dict[str, str], Answers]:
    """A golden table: the versions that were asked, and their answers."""
    table = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return table.pop("versions"), table


def rule_for(name: str) -> PromotionRule:
    """The rule that a golden table is compared with."""
    _, rule, default_dtype = LIBRARIES[name]
    return promotion_rule(rule, getattr(torch, default_dtype))


def ours(rule: PromotionRule, section: str, operands: str) -> str | None:
    """A rule's result for operands spelled as in a table; None if this PyTorch lacks one of the dtypes."""
    words = operands.split(", ")
    arrays, numbers = words[: ARRAYS[section]], words[ARRAYS[section] :]
    if not all(isinstance(getattr(torch, name, None), torch.dtype) for name in arrays):
        return None
    given = [*(getattr(torch, name) for name in arrays), *(NUMBERS[name] for name in numbers)]
    try:
        return dtype_name(rule.common(given, floats=section in FLOATING))
    except PromotionRuleError:
        return RAISES


def compare(name: str, answers: Answers, rule: PromotionRule) -> tuple[list[str], set[DeliberateException], int]:
    """The differences without an exception, the exceptions that apply, and the number of compared answers."""
    differences, used, compared = [], set(), 0
    for section, operands, theirs in entries(answers):
        found = ours(rule, section, operands)
        if found is None:
            continue
        compared += 1
        if found != theirs:
            covering = [e for e in EXCEPTIONS if e.covers(name, section, operands, theirs, found)]
            used.update(covering)
            if len(covering) != 1:
                differences.append(f"{section} {operands}: {name} {theirs}, ours {found}, {len(covering)} exceptions")
    return differences, used, compared
