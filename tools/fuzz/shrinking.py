"""Makes a failing program smaller: fewer statements, then simpler ones, until nothing can be left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.rules import State, Unfit
from fuzz.tree import KINDS, Program, Statement, every, lines

__all__ = ["shrunk", "size"]

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, limit: int = 2000) -> Program:
    """Returns a smaller program that fails.

    Args:
        program: A program that fails.
        fails: Runs a program, and says whether it fails.
        limit: The number of programs to run.
    """
    runs = 0

    def accepts(candidate: Program) -> bool:
        nonlocal runs
        if runs >= limit or not _is_correct(candidate):
            return False
        runs += 1
        return fails(candidate)

    program = copy.deepcopy(program)
    before = None
    while before != (before := (size(program), repr(program))):
        program = _fewer(program, accepts)
        for candidate in _simpler(program):
            if accepts(candidate):
                program = candidate
                break
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


def _fewer(program: Program, accepts: Fails) -> Program:
    """Leaves out runs of statements, long ones first, and blocks around their bodies."""
    for path in list(_bodies(program)):
        body = _at(program, path)
        length = len(body) if body is not None else 0
        while length:
            start = 0
            while (body := _at(program, path)) is not None and start < len(body):
                candidate = copy.deepcopy(program)
                inner = _at(candidate, path)
                assert inner is not None
                del inner[start : start + length]
                if accepts(candidate):
                    program = candidate
                else:
                    start += length
            length //= 2
    for path in list(_bodies(program)):
        if not path:
            continue
        candidate = copy.deepcopy(program)
        around = _at(candidate, path[:-1])
        if around is None or path[-1] >= len(around):
            continue
        around[path[-1] : path[-1] + 1] = around[path[-1]].body
        if accepts(candidate):
            return _fewer(candidate, accepts)
    return program


def _bodies(program: Program) -> Iterator[tuple[int, ...]]:
    """The places of all bodies, as the indices of the statements that lead there; the outermost first."""

    def inside(body: list[Statement], path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield path
        for number, statement in enumerate(body):
            if KINDS[statement.kind].has_body:
                yield from inside(statement.body, (*path, number))

    yield from inside(program.body, ())


def _at(program: Program, path: tuple[int, ...]) -> list[Statement] | None:
    body = program.body
    for number in path:
        if number >= len(body):
            return None
        body = body[number].body
    return body


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
