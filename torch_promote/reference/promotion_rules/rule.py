"""What a promotion rule is: tables over dtypes, and the common dtype of any operands by them.

A rule is data. Its tables answer for two dtypes, and for a Python number with the tensors' dtype.
`PromotionRule.common` puts them together for any number of operands, and is the oracle for what is compiled from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torch_promote.errors import PromotionRuleError
from torch_promote.reference.dtypes import Kind, dtype_name, is_complex, is_floating, kind
from torch_promote.reference.promotion import Number, Operand, number_dtype
from torch_promote.reference.promotion_rules.remedy import remedy

__all__ = [
    "NUMBER_TYPES",
    "OperandLike",
    "Parts",
    "PromotionRule",
    "describe",
    "fits",
    "number_type",
    "parts_of",
    "words_of_table",
]

OperandLike = torch.Tensor | Number | torch.dtype | Operand
"""A tensor, a Python number, a dtype (counts as a tensor with dimensions), or a description of an operand."""

#: The types of Python numbers, each of a higher kind than the one before.
NUMBER_TYPES: tuple[type, ...] = (bool, int, float, complex)

_KIND_OF_NUMBER = {bool: Kind.BOOL, int: Kind.INTEGRAL, float: Kind.FLOATING, complex: Kind.COMPLEX}


def fits(number: type, dtype: torch.dtype) -> bool:
    """Whether a Python number of a type is of no higher kind than a dtype.

    Args:
        number: bool, int, float or complex.
        dtype: The tensors' dtype.

    Example:
        >>> fits(int, torch.float16), fits(float, torch.int8)
        (True, False)
    """
    return kind(dtype) is not Kind.OPAQUE and _KIND_OF_NUMBER[number] <= kind(dtype)


def number_type(operand: OperandLike) -> type | None:
    """Returns the type of Python number that an operand is, or None for a tensor.

    Args:
        operand: The operand; a wrapped `Operand` is a number of its dtype's kind.

    Raises:
        TypeError: It is no operand.

    Example:
        >>> number_type(True), number_type(2.5), number_type(torch.ones(()))
        (<class 'bool'>, <class 'float'>, None)
    """
    if isinstance(operand, torch.Tensor | torch.dtype):
        return None
    if isinstance(operand, Operand):
        return NUMBER_TYPES[kind(operand.dtype)] if operand.wrapped else None
    if isinstance(operand, bool | torch.SymBool):
        return bool
    if isinstance(operand, int | torch.SymInt):
        return int
    if isinstance(operand, float | torch.SymFloat):
        return float
    if isinstance(operand, complex):
        return complex
    raise TypeError(f"an operand is a tensor, a Python number, a torch.dtype or an Operand, got {operand!r}.")


def describe(operand: OperandLike) -> str:
    """Returns an operand in words.

    Example:
        >>> describe(torch.ones(2, 3)), describe(5.5), describe(torch.int8)
        ('float32[2, 3]', '5.5 (a Python float)', 'int8')
    """
    if isinstance(operand, torch.dtype):
        return dtype_name(operand)
    number = number_type(operand)
    if isinstance(operand, torch.Tensor | Operand):
        shape = ", ".join(map(str, operand.shape))
        return f"{dtype_name(operand.dtype)}[{shape}]" if number is None else f"a Python {number.__name__}"
    assert number is not None
    return f"{operand} (a Python {number.__name__})"


def words_of_table(table: str, a: torch.dtype | type, b: torch.dtype, common: torch.dtype) -> str:
    """Returns a sentence for an entry of a table.

    Args:
        table: The table in words.
        a: A dtype, or the type of a Python number.
        b: Another dtype.
        common: What they promote to.

    Example:
        >>> words_of_table("The table", torch.int8, torch.uint8, torch.int16)
        'The table has int16 for int8 with uint8.'
        >>> words_of_table("The table", float, torch.float16, torch.float16)
        'A Python float is of no higher kind than float16, so float16 stays.'
    """
    if not isinstance(a, type):
        return f"{table} has {dtype_name(common)} for {dtype_name(a)} with {dtype_name(b)}."
    if common is b:
        return f"A Python {a.__name__} is of no higher kind than {dtype_name(b)}, so {dtype_name(b)} stays."
    return f"A Python {a.__name__} is of a higher kind than {dtype_name(b)}, and the two give {dtype_name(common)}."


class Parts(NamedTuple):
    """Operands by their states: the different dtypes in the order in which they come, and the highest type of number.

    Attributes:
        dims: The dtypes of the tensors with dimensions; of all tensors, where 0-dim ones are not weak.
        zeros: The dtypes of the 0-dim tensors, where they are weak.
        number: The type of the Python numbers, None if there are none.

    Example:
        >>> parts_of([torch.ones(3), torch.tensor(1), 2, 2.5], zero_dim_is_weak=True)
        Parts(dims=(torch.float32,), zeros=(torch.int64,), number=<class 'float'>)
    """

    dims: tuple[torch.dtype, ...]
    zeros: tuple[torch.dtype, ...]
    number: type | None


def parts_of(operands: Iterable[OperandLike], zero_dim_is_weak: bool) -> Parts:
    """Sorts operands by their states.

    Args:
        operands: The operands.
        zero_dim_is_weak: Whether 0-dim tensors have a state of their own.

    Example:
        >>> parts_of([torch.ones(3), torch.tensor(1)], zero_dim_is_weak=False)
        Parts(dims=(torch.float32, torch.int64), zeros=(), number=None)
    """
    dims: dict[torch.dtype, None] = {}
    zeros: dict[torch.dtype, None] = {}
    numbers: list[type] = []
    for operand in operands:
        number = number_type(operand)
        if number is not None:
            numbers.append(number)
        elif isinstance(operand, torch.dtype):
            dims[operand] = None
        else:
            assert isinstance(operand, torch.Tensor | Operand)
            (zeros if zero_dim_is_weak and not operand.shape else dims)[operand.dtype] = None
    return Parts(tuple(dims), tuple(zeros), max(numbers, key=NUMBER_TYPES.index, default=None))


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
