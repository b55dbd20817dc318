"""Patterns that select calls of a trace: a module's path, an op or a source line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.numerics.observing.places import shorten

__all__ = ["Place", "Selection", "select_places"]

#: An op's name with its overload, a module's path, a line.
Place = tuple[str, str, str]

_KINDS: tuple[str, ...] = ("module", "op", "line")
_FORMS = (
    'Legal: a module\'s path ("blocks.3.attn"), an op ("softmax", "aten::softmax.int") or the end of a line\'s path '
    '("train.py:41", "train.py").'
)
_SHOWN = 5


class Selection(NamedTuple):
    """The meaning of a pattern.

    Attributes:
        kind: "module", "op" or "line".
        name: The pattern without the prefix for its kind.
        wants: Whether the pattern selects calls from a place.
    """

    kind: str
    name: str
    wants: Callable[[Place], bool]


def select_places(places: Iterable[Place], pattern: str) -> Selection:
    """Resolves a pattern.

    Args:
        places: The places of the calls of the trace.
        pattern: A module's path, which includes its submodules; an op, with or without its namespace and overload; or
            the end of a line as "path:number" or "path". A prefix resolves ambiguities: "module=softmax",
            "op=softmax", "line=train.py". "module=" selects the calls outside of modules.

    Raises:
        OptionError: It selects nothing in the trace, or is ambiguous.
    """
    known = list(places)
    if not isinstance(pattern, str) or not pattern:
        raise OptionError(f"explain what? Got {pattern!r}. {_FORMS}")
    prefix, equals, rest = pattern.partition("=")
    is_prefix = bool(equals) and prefix in _KINDS
    kinds = (prefix,) if is_prefix else _KINDS
    name = rest if is_prefix else pattern
    found = [kind for kind in kinds if any(_WANTS[kind](name)(place) for place in known)]
    if not found:
        raise OptionError(_no_match(known, kinds, name))
    if len(found) > 1:
        ways = " or ".join(repr(f"{kind}={name}") for kind in found)
        raise OptionError(f"{name!r} is {' and '.join(map(_with_article, found))} in this trace. Write {ways}.")
    kind = found[0]
    wants = _WANTS[kind](name)
    if kind == "line":
        _check_one_file(sorted({_path(place[2]) for place in known if wants(place)}), name)
    return Selection(kind, name, wants)


def _of_module(name: str) -> Callable[[Place], bool]:
    return lambda place: place[1] == name or (bool(name) and place[1].startswith(f"{name}."))


def _of_op(name: str) -> Callable[[Place], bool]:
    wanted = name.removesuffix(".default") if name.endswith(".default") else name
    exact = wanted != name

    def wants(place: Place) -> bool:
        full = place[0]
        names = {full, full.partition("::")[2]}
        return wanted in names if exact else bool(names & {wanted}) or wanted in {n.partition(".")[0] for n in names}

    return wants


def _of_line(name: str) -> Callable[[Place], bool]:
    def wants(place: Place) -> bool:
        line = place[2]
        return bool(line) and any(text == name or text.endswith(f"/{name}") for text in (line, _path(line)))

    return wants


_WANTS = {"module": _of_module, "op": _of_op, "line": _of_line}


def _path(line: str) -> str:
    return line.rpartition(":")[0]


def _with_article(kind: str) -> str:
    return f"{'an' if kind == 'op' else 'a'} {kind}"


def _check_one_file(paths: list[str], name: str) -> None:
    if len(paths) > 1:
        shown = ", ".join(map(shorten, paths[:_SHOWN])) + (f" and {len(paths) - _SHOWN} more" * (len(paths) > _SHOWN))
        raise OptionError(f"{name!r} is the end of {len(paths)} paths in this trace: {shown}. Write more of the path.")


def _no_match(places: list[Place], kinds: tuple[str, ...], name: str) -> str:
    if not places:
        return f"nothing matches {name!r}: the trace has no calls."
    modules = {place[1] for place in places if place[1]}
    parents = {".".join(path.split(".")[:end]) for path in modules for end in range(1, path.count(".") + 1)}
    ops = {place[0].partition("::")[2].partition(".")[0] for place in places}
    lines = {place[2].rpartition("/")[2] for place in places if place[2]}
    names = [*("module" in kinds) * sorted(modules | parents)]
    inside = [path for path in names if path.endswith(f".{name}")]
    if inside:
        return f"no module has the path {name!r}. There {_is_or_are(inside)}. Write the whole path."
    names += [*("op" in kinds) * sorted(ops), *("line" in kinds) * sorted(lines | set(map(_path, lines)))]
    here = sorted((line for line in lines if _path(line) == _path(name) and ":" in name), key=_number)
    if here and "line" in kinds:
        near = ", ".join(sorted(here, key=lambda line: abs(_number(line) - _number(name)))[:_SHOWN])
        return f"no call of this trace is from line {name!r}. Closest lines of the file: {near}."
    return f"no module, op or line of this trace is {name!r}.{did_you_mean(name, names)} {_FORMS}"


def _is_or_are(paths: list[str]) -> str:
    shown = ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" * (len(paths) > _SHOWN))
    return f"is {shown}" if len(paths) == 1 else f"are {shown}"


def _number(line: str) -> int:
    number = line.rpartition(":")[2]
    return int(number) if number.isdigit() else 0
