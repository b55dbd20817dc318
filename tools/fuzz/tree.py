"""Programs as trees of statements."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fuzz.rules import State

Values = dict[str, Any]


@dataclass(slots=True)
class Statement:
    """A statement: its kind, what was drawn for it, and its body."""

    kind: str
    values: Values
    body: list[Statement] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """A program. `mode` is a cache mode, or "mixed" if each region has its own."""

    device: str
    mode: str
    layers: list[str]
    optimizer: str
    body: list[Statement]


class Kind:
    """A kind of statement. `open` and `close` return lines of source; `open` raises `Unfit` where it does not fit."""

    #: How often it is drawn.
    weight: ClassVar[float] = 1.0
    has_body: ClassVar[bool] = False
    #: By how much the body is indented.
    indent: ClassVar[int] = 1
    #: The device types on which it can run.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: What each value of a statement may be: a sequence to choose from, or a function that draws it.
    choices: ClassVar[Mapping[str, Sequence[Any] | Callable[[random.Random, State], Any]]] = {}
    #: The simplest values, for shrinking.
    plain: ClassVar[Values] = {}

    def draw(self, draw: random.Random, state: State) -> Values:
        """The values of a statement."""
        return {name: of(draw, state) if callable(of) else draw.choice(of) for name, of in self.choices.items()}

    def open(self, values: Values, state: State) -> list[str]:
        """The lines before the body. Changes the state only if it fits."""
        raise NotImplementedError

    def close(self, values: Values, state: State) -> list[str]:
        """The lines after the body."""
        return []

    def simpler(self, values: Values) -> Iterator[Values]:
        """Changes of values that make the statement simpler, simplest first."""
        for name, plain in self.plain.items():
            if values[name] != plain:
                yield {**values, name: plain}


KINDS: dict[str, Kind] = {}


def kind(name: str, **changes: Any) -> Any:
    """Registers a class of kinds under a name, with other class attributes."""

    def register(cls: type[Kind]) -> type[Kind]:
        KINDS[name] = type(cls.__name__, (cls,), changes)() if changes else cls()
        return cls

    return register


def lines(body: list[Statement], state: State) -> list[str]:
    """The source of statements. Raises `Unfit` if one may not stand where it is."""
    source: list[str] = []
    for statement in body:
        one = KINDS[statement.kind]
        source += one.open(statement.values, state)
        if one.has_body:
            inner = lines(statement.body, state) or ["pass"]
            source += ["    " * one.indent + line for line in inner]
            source += one.close(statement.values, state)
    return source


def every(body: list[Statement]) -> Iterator[Statement]:
    """All statements, those of bodies too."""
    for statement in body:
        yield statement
        yield from every(statement.body)


def names(program: Program) -> list[str]:
    """The kinds of all statements of a program."""
    return [statement.kind for statement in every(program.body)]
