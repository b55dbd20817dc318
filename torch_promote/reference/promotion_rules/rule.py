"""What a promotion rule is: tables over dtypes, and the common dtype of any operands by them.

A rule is data. Its tables answer for two dtypes, and for a Python number with the tensors' dtype.
`PromotionRule.common` puts them together for any number of operands, and is the oracle for what is compiled from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_promote.errors import PromotionRuleError
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

__all__ = ["NUMBER_TYPES", "PromotionRule", "describe"]


@dataclass(frozen=True, slots=True)
class PromotionRule:
    """A promotion rule under a default dtype.

    A dtype that a table has no row for promotes with itself and with Python numbers of no higher kind, and with nothing
    else. Look pairs up by the methods, which know that.

    Attributes:
        name: What the rule is called.
        tensors: Ordered pairs of tensors' dtypes to their common dtype; None: there is none.
        numbers: A type of Python number and the tensors' dtype to the common dtype; None: there is none.
        floats: What an op that computes in floating point, as true division does, makes of a common dtype. Floating and
            complex dtypes stay. None: the rule has no such op on the dtype.
        zero_dim_is_weak: Whether 0-dim tensors are weaker than tensors with dimensions.
        associative: Whether more than two dtypes are folded pairwise, in the order in which they come. Otherwise only
            `common` knows, and the order does not matter.
        zero_dims: Where 0-dim tensors are weak: the dtype of the tensors with dimensions and that of the 0-dim ones
            (with the numbers already in it) to the common dtype. Empty otherwise.
        default_dtype: The default dtype that the tables are for.
        reason: Why two operands, tensors' dtypes or a type of number, have no common dtype, as a clause.
        words: Where a common dtype comes from, as a sentence: two operands, of which the second is a dtype, and it.
        many: The common dtype of more than two different dtypes of tensors, where folding is not it.
        whole: Answers for all operands in place of the tables, which say the same as far as dtypes can say it.
        build: Makes the rule for another default dtype.

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

    def under(self, default_dtype: torch.dtype) -> PromotionRule:
        """Returns the same rule for another default dtype.

        Args:
            default_dtype: What Python floats count as where they decide.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").under(torch.float64).common([torch.int8, 2.5])
            torch.float64
        """
        if default_dtype is self.default_dtype or self.build is None:
            return self
        return self.build(default_dtype)

    def of_pair(self, a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
        """Returns what two tensors' dtypes promote to, None if they do not.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").of_pair(torch.uint8, torch.int8)
            torch.int16
        """
        return self.tensors.get((a, b), a if a is b else None)

    def of_number(self, number: type, dtype: torch.dtype) -> torch.dtype | None:
        """Returns what a Python number and tensors of a dtype promote to, None if they do not.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").of_number(int, torch.uint8)
            torch.uint8
        """
        return self.numbers.get((number, dtype), dtype if fits(number, dtype) else None)

    def of_float(self, dtype: torch.dtype) -> torch.dtype | None:
        """Returns what an op that computes in floating point makes of a common dtype, None if it refuses.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch", default_dtype=torch.float32).of_float(torch.int64)
            torch.float32
        """
        return self.floats.get(dtype, dtype if is_floating(dtype) or is_complex(dtype) else None)

    def common(self, operands: Iterable[OperandLike], op: str | None = None, floats: bool = False) -> torch.dtype:
        """Returns the common dtype of operands: the dtype that an op on them computes in.

        Args:
            operands: One operand or more, in any order.
            op: The op's name, for the error.
            floats: Whether the op computes in floating point, as true division does.

        Raises:
            PromotionRuleError: They have none; the message names the operands, the rule and the cast to write.
            ValueError: There are no operands.

        Example:
            >>> from torch_promote.reference.promotion_rules import promotion_rule
            >>> promotion_rule("torch").common([torch.int8, torch.tensor(1), 3])
            torch.int8
        """
        given = tuple(operands)
        if not given:
            raise ValueError("no operands have no common dtype.")
        found = self._common(given, op)
        if not floats:
            return found
        result = self.of_float(found)
        if result is None:
            words = f"{dtype_name(found)} is not floating, and the rule does not divide it"
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
        """The common dtype of tensors in one state, None for no tensors."""
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
        """The first two that do not promote by themselves, for the error; else the first two."""
        pairs = [(a, b) for i, a in enumerate(dtypes) for b in dtypes[i + 1 :]]
        return next((pair for pair in pairs if self.of_pair(*pair) is None), pairs[0])


def _clauses(error: str) -> tuple[str, str]:
    """A promotion error of the reference, as what forbids and what to write."""
    _, _, why = error.rpartition("no common dtype: ")
    why, _, remedy_ = why.rstrip(".").partition(". ")
    return why, f"{remedy_ or 'Convert the operands first'}."
