"""The parts of an expression that `why` explains; torch_promote.reference.derivation.expression parses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion import Number

__all__ = [
    "Binary",
    "Constant",
    "FunctionCall",
    "Item",
    "Items",
    "Node",
    "NumberTerm",
    "TensorTerm",
    "Unary",
    "in_parentheses",
]


@dataclass(frozen=True, slots=True)
class TensorTerm:
    """A tensor in an expression: `int32[2, 3]`, or `int32[]` for a 0-dim one.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> parse("int32[2, 3]")
        TensorTerm(dtype=torch.int32, shape=(2, 3))
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class NumberTerm:
    """A Python number in an expression.

    Attributes:
        value: The number.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> parse("-2.5")
        NumberTerm(value=-2.5)
    """

    value: Number

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Constant:
    """Another argument of a call: None, a string or a dtype.

    Attributes:
        value: The argument.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> print(parse("sum(int8[2], dtype=half)"))
        sum(int8[2], dtype=float16)
    """

    value: str | torch.dtype | None

    def __str__(self) -> str:
        return dtype_name(self.value) if isinstance(self.value, torch.dtype) else repr(self.value)


@dataclass(frozen=True, slots=True)
class Items:
    """A list or a tuple of arguments.

    Attributes:
        items: The arguments.
        kind: list or tuple.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> print(parse("cat([int8[2], f2[2]])"))
        cat([int8[2], float16[2]])
    """

    items: tuple[Node, ...]
    kind: type[list[Any]] | type[tuple[Any, ...]]

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.items))
        return f"[{inner}]" if self.kind is list else f"({inner}{',' if len(self.items) == 1 else ''})"


@dataclass(frozen=True, slots=True)
class Unary:
    """An operator before an expression.

    Attributes:
        symbol: The operator: "-", "+" or "~".
        operand: The operand.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> print(parse("-(int8[2] + 1)"))
        -(int8[2] + 1)
    """

    symbol: str
    operand: Node

    def __str__(self) -> str:
        return f"{self.symbol}{in_parentheses(self.operand)}"


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator between two expressions.

    Attributes:
        symbol: The operator, as Python writes it.
        left: The left operand.
        right: The right operand.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> print(parse("2 ** (int8[] - 1)"))
        2 ** (int8[] - 1)
    """

    symbol: str
    left: Node
    right: Node

    def __str__(self) -> str:
        # Python reads -1 ** x as -(1 ** x), so a negative number on the left is put in parentheses too.
        left = f"({self.left})" if str(self.left).startswith("-") else in_parentheses(self.left)
        return f"{left} {self.symbol} {in_parentheses(self.right)}"


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function of PyTorch, or of a method of a tensor.

    Attributes:
        name: The function's name, such as `cat`, `F.softmax` or `torch.ops.aten.mm`.
        receiver: For a method, the tensor that it is called on.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> print(parse("bf16[2, 3].softmax(dim=-1)"))
        bfloat16[2, 3].softmax(dim=-1)
    """

    name: str
    receiver: Node | None
    args: tuple[Node, ...]
    kwargs: tuple[tuple[str, Node], ...]

    def __str__(self) -> str:
        arguments = [*map(str, self.args), *(f"{name}={value}" for name, value in self.kwargs)]
        called = self.name if self.receiver is None else f"{in_parentheses(self.receiver)}.{self.name}"
        return f"{called}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True)
class Item:
    """One of several results of a call: `sort(int8[3])[1]`.

    Attributes:
        of: The call.
        index: The position of the result.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> print(parse("sort(i1[3])[1]"))
        sort(int8[3])[1]
    """

    of: Node
    index: int

    def __str__(self) -> str:
        return f"{in_parentheses(self.of)}[{self.index}]"


Node = TensorTerm | NumberTerm | Constant | Items | Unary | Binary | FunctionCall | Item


def in_parentheses(node: Node) -> str:
    """Returns a node as text, an operator with its operands in parentheses.

    Example:
        >>> from torch_promote.reference.derivation.expression import parse
        >>> in_parentheses(parse("int8[2] + 1")), in_parentheses(parse("int8[2]"))
        ('(int8[2] + 1)', 'int8[2]')
    """
    return f"({node})" if isinstance(node, Binary | Unary) else str(node)
