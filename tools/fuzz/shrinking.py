"""Makes a failing program smaller: fewer statements, then simpler ones, until nothing can be left out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.rules import State, Unfit
from fuzz.tree import KINDS, Program, Statement, every, lines

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, limit: int = 2000) -> Program:
    """Returns a smaller program that fails."""
    runs = 0

    def accepts(candidate: Program) -> bool:
        nonlocal runs
        if runs >= limit or not _is_correct(candidate):
            return False
        runs += 1
        return fails(candidate)

    program = copy.deepcopy(program)
    before = ""
    while before != (before := repr(program)):
        for with_body in (True, False):
            for number in reversed(range(size(program))):  # backwards, as later statements need earlier ones
                candidate = _without(program, number, with_body)
                if candidate is not None and accepts(candidate):
                    program = candidate
        program = next((candidate for candidate in _simpler(program) if accepts(candidate)), program)
    return program


def size(program: Program) -> int:
    """The number of statements."""
    return sum(1 for _ in every(program.body))


def _is_correct(program: Program) -> bool:
    try:
        lines(copy.deepcopy(program.body), State(program.device, program.mode, program.layers))
    except (Unfit, IndexError):
        return False
    return True


def _places(body: list[Statement]) -> Iterator[tuple[list[Statement], int]]:
    """Where each statement is, in the order of `every`."""
    for number, statement in enumerate(body):
        yield body, number
        yield from _places(statement.body)


def _without(program: Program, number: int, with_body: bool) -> Program | None:
    """The program without a statement, with its body or not; None if there is none, or it has no body to keep."""
    candidate = copy.deepcopy(program)
    for body, place in itertools.islice(_places(candidate.body), number, number + 1):
        if with_body or body[place].body:
            body[place : place + 1] = [] if with_body else body[place].body
            return candidate
    return None


def _simpler(program: Program) -> Iterator[Program]:
    """Programs with one simpler thing."""
    if program.optimizer != "sgd":
        yield replace(copy.deepcopy(program), optimizer="sgd")
    for at in range(len(program.layers)):
        if (fewer := _without_layer(program, at)) is not None:
            yield fewer
    for number, statement in enumerate(every(program.body)):
        for values in KINDS[statement.kind].simpler(statement.values):
            candidate = copy.deepcopy(program)
            list(every(candidate.body))[number].values = values
            yield candidate
    if program.mode == "mixed":
        for mode in ("weights", "persistent", "all", "none"):
            yield replace(copy.deepcopy(program), mode=mode)


def _without_layer(program: Program, at: int) -> Program | None:
    """The program without a layer that no statement names."""
    candidate = copy.deepcopy(program)
    for statement in every(candidate.body):
        values = statement.values
        for name in ("layers", "writes", "layer"):
            if name in values:
                named = values[name] if isinstance(values[name], list) else [values[name]]
                if at in named:
                    return None
                fewer = [layer - (layer > at) for layer in named]
                values[name] = fewer if isinstance(values[name], list) else fewer[0]
    del candidate.layers[at]
    return candidate
