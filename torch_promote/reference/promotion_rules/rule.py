"""`PromotionRule`: tables over dtypes, and the common dtype of any number of operands.

A rule is data. Its tables contain the common dtype of two dtypes, and of a Python number and a dtype.
`PromotionRule.common` applies them to any number of operands. It is the oracle for the C++ code that uses the tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_promote.errors import PromotionRuleError
from torch_promote.policy.dtype_names import operand_of_name
from torch_promote.reference.dtypes import dtype_name, is_complex, is_floating
from torch_promote.reference.promotion.states import number_dtype
from torch_promote.reference.promotion_rules.operands import (
    NUMBER_TYPES,
    OperandLike,
    describe,
    fits,
    parts_of,
    words_of_table,
)
from torch_promote.reference.promotion_rules.remedy import remedy
from torch_promote.text_layout import html_table

__all__ = ["NUMBER_TYPES", "PromotionRule", "describe"]


@dataclass(frozen=True, slots=True, repr=False)
class PromotionRule:
    """A promotion rule under a default dtype.

    A dtype without a row in a table promotes only with itself and with Python numbers that are not of a higher kind.
    The methods take that into account, so use them instead of the tables to look up pairs.

    Attributes:
        name: The rule's name.
        tensors: Maps ordered pairs of tensors' dtypes to their common dtype. None: there is none.
        numbers: Maps a type of Python number and the tensors' dtype to the common dtype. None: there is none.
        floats: Maps a common dtype to the dtype of an op that computes in floating point, such as true division.
            Floating and complex dtypes stay. None: the rule does not define such an op for the dtype.
        zero_dim_is_weak: Whether 0-dim tensors are weaker than tensors with dimensions.
        associative: Whether more than two dtypes can be folded pairwise. If not, use `common`. In both cases, the order
            of the operands does not matter.
        zero_dims: If 0-dim tensors are weak: maps the dtype of the tensors with dimensions, and that of the 0-dim ones
            joined with the numbers, to the common dtype. Otherwise empty.
        default_dtype: The default dtype that the tables are for.
        reason: Returns why two operands (a dtype or a type of number, and a dtype) have no common dtype, as a clause.
        words: Returns why two operands have a common dtype, as a sentence.
        many: Returns the common dtype of more than two distinct dtypes of tensors, if folding does not.
        whole: Returns the common dtype of all operands, instead of the tables. Both agree if only dtypes matter.
        build: Returns the rule for another default dtype.

    Example:
        >>> from torch_promote.reference.promotion_rules import promotion_rule
        >>> rule = promotion_rule("torch", default_dtype=torch.float32)
        >>> rule.common([torch.ones(3, dtype=torch.int32), 5.5])
        torch.float32
    """

    name: str
    tensors: Mapping[tuple[torch.dtype, torch.dtype], torch.dtype | None]
    numbers: Mapping[tuple[type, torch.dtype], torch.dtype | None]
    floats: Mapping[torch.dtype, torch.dtype | None]
    zero_dim_is_weak: bool = False
    associative: bool = True
    zero_dims: Mapping[tuple[torch.dtype, torch.dtype], torch.dtype | None] = field(default_factory=dict)
    default_dtype: torch.dtype = torch.float32
    reason: Callable[[torch.dtype | type, torch.dtype], str] = field(
        default=lambda a, b: "the rule has no entry for them", repr=False, compare=False
    )
    words: Callable[[torch.dtype | type, torch.dtype, torch.dtype], str] = field(
        default=lambda a, b, common: words_of_table("The rule's table", a, b, common), repr=False, compare=False
    )
    many: Callable[[Sequence[torch.dtype]], torch.dtype | None] | None = field(default=None, repr=False, compare=False)
    whole: Callable[[Sequence[OperandLike]], torch.dtype] | None = field(default=None, repr=False, compare=False)
    build: Callable[[torch.dtype], PromotionRule] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        default = dtype_name(self.default_dtype)
        return f"<PromotionRule {self.name!r}: {len(self._dtypes)} dtypes, Python floats are {default}>"

    def _repr_html_(self) -> str:
        title = f"Promotion rule {self.name}: the common dtype of two tensors' dtypes, - for none"
        rows = [[dtype_name(a), *(_cell(self.of_pair(a, b)) for b in self._dtypes)] for a in self._dtypes]
        return html_table(["", *map(dtype_name, self._dtypes)], rows, title)

    @property
    def _dtypes(self) -> list[torch.dtype]:
        return list(dict.fromkeys(first for first, _ in self.tensors))

    def under(self, default_dtype: torch.dtype) -> PromotionRule:
        """Returns the same rule for another default dtype.

        Args:
            default_dtype: The dtype of Python floats.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").under(torch.float64).common([torch.int8, 2.5])
            torch.float64
        """
        if default_dtype is self.default_dtype or self.build is None:
            return self
        return self.build(default_dtype)

    def of_pair(self, a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
        """Returns the common dtype of two tensors' dtypes, or None.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").of_pair(torch.uint8, torch.int8)
            torch.int16
        """
        return self.tensors.get((a, b), a if a is b else None)

    def of_number(self, number: type, dtype: torch.dtype) -> torch.dtype | None:
        """Returns the common dtype of a Python number and tensors of a dtype, or None.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").of_number(int, torch.uint8)
            torch.uint8
        """
        return self.numbers.get((number, dtype), dtype if fits(number, dtype) else None)

    def of_float(self, dtype: torch.dtype) -> torch.dtype | None:
        """Returns the dtype of an op that computes in floating point, for a common dtype, or None.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch", default_dtype=torch.float32).of_float(torch.int64)
            torch.float32
        """
        return self.floats.get(dtype, dtype if is_floating(dtype) or is_complex(dtype) else None)

    def common(self, operands: Iterable[OperandLike | str], op: str | None = None, floats: bool = False) -> torch.dtype:
        """Returns the common dtype of operands, in which an op on them computes.

        Args:
            operands: One or more operands, in any order. A dtype may be given by its name.
            op: The op's name, for errors.
            floats: Whether the op computes in floating point, like true division.

        Raises:
            PromotionRuleError: There is none. The message names the operands, the rule and a cast that helps.
            ValueError: There are no operands.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").common([torch.int8, torch.tensor(1), 3])
            torch.int8
        """
        given = tuple(map(operand_of_name, operands))
        if not given:
            raise ValueError("common takes at least one operand.")
        found = self._common(given, op)
        if not floats:
            return found
        result = self.of_float(found)
        if result is None:
            words = f"{dtype_name(found)} is not floating, and the rule defines no division for it"
            raise PromotionRuleError(self.name, map(describe, given), words, remedy(found, float), op)
        return result

    def _common(self, given: tuple[OperandLike, ...], op: str | None) -> torch.dtype:
        def refused(a: torch.dtype | type, b: torch.dtype) -> PromotionRuleError:
            return PromotionRuleError(self.name, map(describe, given), self.reason(a, b), remedy(b, a), op)

        if self.whole is not None:
            try:
                return self.whole(given)
            except TypeError as error:
                raise PromotionRuleError(self.name, map(describe, given), *_clauses(str(error)), op) from None
        dims, zeros, number = parts_of(given, self.zero_dim_is_weak)
        strong, weak = (self._of_tensors(dtypes, refused) for dtypes in (dims, zeros))
        if strong is None:
            strong, weak = weak, None
        if strong is None:
            assert number is not None
            return number_dtype(number(1), self.default_dtype)
        if number is not None:
            joined = self.of_number(number, strong if weak is None else weak)
            if joined is None:
                raise refused(number, strong if weak is None else weak)
            strong, weak = (joined, None) if weak is None else (strong, joined)
        if weak is None:
            return strong
        joined = self.zero_dims.get((strong, weak), strong if strong is weak else None)
        if joined is None:
            raise refused(strong, weak)
        return joined

    def _of_tensors(
        self, dtypes: Sequence[torch.dtype], refused: Callable[[torch.dtype, torch.dtype], PromotionRuleError]
    ) -> torch.dtype | None:
        """The common dtype of tensors in one state. None: there are no tensors."""
        if len(dtypes) > 2 and self.many is not None:
            found = self.many(dtypes)
            if found is None:
                raise refused(*self._apart(dtypes))
            return found

        def join(a: torch.dtype, b: torch.dtype) -> torch.dtype:
            joined = self.of_pair(a, b)
            if joined is None:
                raise refused(a, b)
            return joined

        return functools.reduce(join, dtypes) if dtypes else None

    def _apart(self, dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype, torch.dtype]:
        """The two dtypes that an error names: the first pair without a common dtype, else the first pair."""
        pairs = [(a, b) for i, a in enumerate(dtypes) for b in dtypes[i + 1 :]]
        return next((pair for pair in pairs if self.of_pair(*pair) is None), pairs[0])


def _clauses(error: str) -> tuple[str, str]:
    """Splits the text of a PromotionError into the reason and the remedy."""
    _, _, why = error.rpartition("no common dtype: ")
    why, _, remedy_ = why.rstrip(".").partition(". ")
    return why, f"{remedy_ or 'Convert the operands first'}."


def _cell(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else dtype_name(dtype)
