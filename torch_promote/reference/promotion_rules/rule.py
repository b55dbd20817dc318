"""`PromotionRule`: tables over dtypes, and the common dtype of any number of operands.

A rule is data. Its tables contain the common dtype of two dtypes, and of a Python number and a dtype.
`PromotionRule.common` applies them to any number of operands. It is the oracle for the C++ code that uses the tables.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_promote.errors import PromotionRuleError, shown
from torch_promote.policy.dtype_names import operand_of_name
from torch_promote.reference.dtypes import Kind, default_complex, dtype_name, is_complex, is_floating, kind
from torch_promote.reference.promotion import Number, Operand, PromotionError, number_dtype, promote_types

# --- Operands: tensors with their dtypes, Python numbers with their types


OperandLike = torch.Tensor | Number | torch.dtype | Operand
"""A tensor, a Python number, a dtype (stands for a tensor with dimensions), or a description of an operand."""

#: The types of Python numbers, in the order of `Kind`.
NUMBER_TYPES: tuple[type, ...] = (bool, int, float, complex)


def fits(number: type, dtype: torch.dtype) -> bool:
    """Whether tensors keep their dtype when combined with a Python number, which must not be of a higher kind."""
    return kind(dtype) is not Kind.OPAQUE and NUMBER_TYPES.index(number) <= kind(dtype)


def number_type(operand: OperandLike) -> type | None:
    """Returns the type of a Python number, or of the number that a wrapped `Operand` stands for; None for a tensor."""
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
    raise TypeError(f"an operand is a tensor, a Python number, a torch.dtype or an Operand, got {shown(operand)}.")


def describe(operand: OperandLike) -> str:
    """Returns a description of an operand."""
    if isinstance(operand, torch.dtype):
        return dtype_name(operand)
    number = number_type(operand)
    if isinstance(operand, torch.Tensor | Operand):
        shape = ", ".join(map(str, operand.shape))
        return f"{dtype_name(operand.dtype)}[{shape}]" if number is None else f"a Python {number.__name__}"
    assert number is not None
    return f"{operand} (a Python {number.__name__})"


def words_of_table(table: str, a: torch.dtype | type, b: torch.dtype, common: torch.dtype) -> str:
    """Returns a sentence that describes an entry of a table, for two dtypes or for the type of a number and a dtype."""
    if not isinstance(a, type):
        return f"{table} has {dtype_name(common)} for {dtype_name(a)} with {dtype_name(b)}."
    if common is b:
        return f"A Python {a.__name__} is not of a higher kind than {dtype_name(b)}, so {dtype_name(b)} stays."
    return f"A Python {a.__name__} is of a higher kind than {dtype_name(b)}, and the two give {dtype_name(common)}."


def _by_state(
    operands: Iterable[OperandLike], zero_dim_is_weak: bool
) -> tuple[list[torch.dtype], list[torch.dtype], type | None]:
    """The distinct dtypes of tensors with dimensions, those of 0-dim tensors, and the highest type of number."""
    # If 0-dim tensors are not weak, they count as tensors with dimensions.
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
    return list(dims), list(zeros), max(numbers, key=NUMBER_TYPES.index, default=None)


# --- The cast that an error proposes


def _remedy(dtype: torch.dtype, other: torch.dtype | type) -> str:
    """A sentence with a cast that gives a tensor and another operand the same dtype."""
    if other is bool:
        return "Write int(x) for the Python bool."
    target, tensors = None, [dtype]
    default = torch.get_default_dtype()
    if other is complex:
        target = torch.complex128 if dtype is torch.float64 else default_complex(default)
    elif isinstance(other, type):
        target = default if other is float else torch.int64
    else:
        target, tensors = _meeting(dtype, other), [dtype, other]
        if target is None:
            return f"Cast one of the two: x.to(torch.{dtype_name(dtype)}) or x.to(torch.{dtype_name(other)})."
    sources = " and the ".join(
        f"{dtype_name(source)} tensor" for source in dict.fromkeys(tensors) if source is not target
    )
    return f"Write x.to(torch.{dtype_name(target)}) for the {sources}."


def _meeting(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The dtype to cast to: PyTorch's common dtype, else the wider of two floating dtypes. None: neither exists."""
    try:
        return promote_types(a, b)
    except PromotionError:
        pass
    if kind(a) is kind(b) is Kind.INTEGRAL or Kind.OPAQUE in (kind(a), kind(b)):
        return None
    if is_floating(a) and is_floating(b) and a.itemsize != b.itemsize:
        return a if a.itemsize > b.itemsize else b
    return None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PromotionRule:
    """A promotion rule under a default dtype.

    A dtype without a row in a table promotes only with itself and with Python numbers that are not of a higher kind.
    The methods take that into account, so use them instead of the tables to look up pairs. Two rules are equal if they
    are one object, since rules with equal tables may differ in `many`.

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
        over: The rule for what this one does not define; None if it defines everything.
        many: Returns the common dtype of more than two distinct dtypes of tensors, if folding does not. Depends on
            nothing but the tables of this rule, and the names and tables of those that it is over.
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
    over: PromotionRule | None = None
    reason: Callable[[torch.dtype | type, torch.dtype], str] = field(
        default=lambda a, b: "the rule has no entry for them", repr=False
    )
    words: Callable[[torch.dtype | type, torch.dtype, torch.dtype], str] = field(
        default=lambda a, b, common: words_of_table("The rule's table", a, b, common), repr=False
    )
    many: Callable[[Sequence[torch.dtype]], torch.dtype | None] | None = field(default=None)
    whole: Callable[[Sequence[OperandLike]], torch.dtype] | None = field(default=None)
    build: Callable[[torch.dtype], PromotionRule] | None = field(default=None)

    def __copy__(self) -> PromotionRule:
        return self  # a rule never changes, and regions keep each one that they have seen

    def __deepcopy__(self, memo: object) -> PromotionRule:
        return self

    def __repr__(self) -> str:
        default = dtype_name(self.default_dtype)
        return f"<PromotionRule {self.name!r}: {len(self._dtypes)} dtypes, Python floats are {default}>"

    def _repr_html_(self) -> str:
        title = f"Promotion rule {html.escape(self.name)}: the common dtype of two tensors' dtypes, - for none"
        rows = [["", *map(dtype_name, self._dtypes)]]
        for a in self._dtypes:
            found = (self.of_pair(a, b) for b in self._dtypes)
            rows.append([dtype_name(a), *("-" if dtype is None else dtype_name(dtype) for dtype in found)])
        cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
        return f"<p>{title}</p><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

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
            raise PromotionRuleError(self.name, map(describe, given), words, _remedy(found, float), op)
        return result

    def _common(self, given: tuple[OperandLike, ...], op: str | None) -> torch.dtype:
        def refused(a: torch.dtype | type, b: torch.dtype) -> PromotionRuleError:
            return PromotionRuleError(self.name, map(describe, given), self.reason(a, b), _remedy(b, a), op)

        if self.whole is not None:
            try:
                return self.whole(given)
            except TypeError as error:
                raise PromotionRuleError(self.name, map(describe, given), *_clauses(str(error)), op) from None
        dims, zeros, number = _by_state(given, self.zero_dim_is_weak)
        strong, weak = (self._of_tensors(dtypes, refused) for dtypes in (dims, zeros))
        if strong is None:
            strong, weak = weak, None
        if strong is None:
            assert number is not None
            return self.of_number(number, torch.bool) or number_dtype(number(1), self.default_dtype)
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
