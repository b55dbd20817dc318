"""`TraceReport.explain`: explains the calls of a module, an op or a line, in a paragraph and a table."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.observe.events import AUTOCAST_OFF, Call, CallGroup, CastGroup
from torch_promote.observe.findings import most_of, size
from torch_promote.observe.places import shorten
from torch_promote.policy.legality import why_illegal
from torch_promote.policy.op_table import CastPolicy
from torch_promote.text_layout import text_table, wrapped

if TYPE_CHECKING:
    from torch_promote.observe.events import TraceRecords

__all__ = [
    "Explanation",
    "ExplanationRow",
    "Material",
    "Place",
    "Selection",
    "advice_of",
    "explain",
    "select_places",
    "sentences_of",
]


# ---The sentences of an explanation: what ran, why, and suggested changes.


#: The number of dtypes, policies, arguments or ops that a sentence names, and the number of ops that get advice.
_SHOWN, _ADVISED = 3, 2
_PHASES = {"forward": "forward", "backward": "backward", "recompute": "a checkpoint's recomputation"}
_TO_FLOAT32 = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")
_LOWER = ("bfloat16", "float16")
_RULE = "promotion rule "


@dataclass(frozen=True)
class Material:
    """The data for an explanation.

    Attributes:
        kind: "module", "op" or "line".
        name: The pattern.
        whole: All calls.
        groups: The calls by op and module.
        casts: Their casts.
        lines: The number of calls at each line.
        kept: The calls that the report stores individually.
    """

    kind: str
    name: str
    whole: CallGroup
    groups: Mapping[tuple[str, str], CallGroup]
    casts: list[CastGroup]
    lines: Mapping[str, int]
    kept: list[Call]

    @property
    def modules(self) -> list[str]:
        """The paths of the modules."""
        return list(dict.fromkeys(module for _, module in self.groups))

    def by_op(self) -> dict[str, CallGroup]:
        """The calls by op, most cast bytes first."""
        found: dict[str, CallGroup] = {}
        for (op, _), group in self.groups.items():
            found.setdefault(op, CallGroup(op)).merge(group)
        return dict(sorted(found.items(), key=lambda item: (-item[1].bytes, -item[1].calls)))


def sentences_of(material: Material) -> Iterator[str]:
    """Yields the sentences about what ran, and why."""
    yield _what(material)
    if material.whole.errors:
        yield f"{_times(material.whole.errors, 'call')} raised."
    ops = material.by_op()
    if len(ops) == 1:
        yield _dtypes(material.whole)
    yield from _policies(material, ops)
    yield from _rules(material)
    yield from _casts(material)


def _what(material: Material) -> str:
    whole, ops = material.whole, material.by_op()
    phases = _where(whole.phases, whole.calls)
    if material.kind == "op":
        called = f"{_some(ops)} {'was' if len(ops) == 1 else 'were'} called {_count(whole.calls)}, {phases}"
        modules = [path for path in material.modules if path]
        return f"{called}{', by ' + _some_modules(modules) if modules else ''}."
    module = f"The module {material.name}" if material.name else "The program, outside of modules,"
    subject = module if material.kind == "module" else _lines(material)
    return f"{subject} made {_times(whole.calls, 'call')} of {_times(len(ops), 'op')}, {phases}."


def _lines(material: Material) -> str:
    lines = list(material.lines)
    return f"The line {shorten(lines[0])}" if len(lines) == 1 else f"The {len(lines)} lines of {material.name}"


def _where(phases: Counter[str], calls: int) -> str:
    if len(phases) == 1:
        return f"{'all ' * (calls > 1)}in {_PHASES[next(iter(phases))]}"
    return ", ".join(f"{count:,} in {_PHASES[phase]}" for phase, count in phases.most_common())


def _dtypes(group: CallGroup) -> str:
    clauses = [(_clause(text), count) for text, count in group.dtypes.most_common(_SHOWN)]
    if len(group.dtypes) == 1:
        return f"{'Each' if group.calls > 1 else 'It'} {clauses[0][0]}."
    told = "; ".join(f"{count:,} {clause}" for clause, count in clauses)
    rest = group.calls - sum(count for _, count in clauses)
    return f"Of the calls, {told}{f'; {rest:,} had other dtypes' if rest else ''}."


def _clause(dtypes: str) -> str:
    parts = dtypes.split(" -> ")
    got, gave = parts[0], parts[-1]
    got, gave = (text if text != "none" else "no tensor" for text in (got, gave))
    if len(parts) == 3:
        return f"got {got}, ran in {parts[1]} after the casts and returned {gave}"
    return f"got and returned {got}" if got == gave else f"got {got}, without a cast, and returned {gave}"


def _policies(material: Material, ops: Mapping[str, CallGroup]) -> Iterator[str]:
    whole = material.whole
    having = whole.policies.total()
    if not having:
        yield f"No call had a cast policy: {_why_none(material)}."
        return
    explained: set[str] = set()
    for text, count in whole.policies.most_common(_SHOWN):
        policy, _, said_by = text.partition(": ")
        means = "" if policy in explained else _meaning(policy)
        explained.add(policy)
        whose = "" if len(ops) == 1 else f" of {_some(op for op, group in ops.items() if group.policies[text])}"
        calls = "All calls" if count == whole.calls else _times(count, "call")
        yield f"{calls}{whose} had the policy {policy}{means}, from {_source(said_by)}."
    rest = len(whole.policies) - _SHOWN
    if rest > 0:
        yield f"{_times(rest, 'other policy', 'other policies')} held for other calls; see the table."
    if having < whole.calls and len(ops) > 1:
        yield f"The other {_times(whole.calls - having, 'call')} had no policy and ran in the dtypes that they got."
    elif having < whole.calls:
        calls = _times(whole.calls - having, "call")
        yield f"{calls} had no policy: autocast was off, as in most backward passes and inside an op that it casts."


def _why_none(material: Material) -> str:
    on = [bool(call.autocast) for call in material.kept]
    has_none = f"has none for {'it' if material.kind == 'op' else 'these ops'}"
    if len(on) < material.whole.calls:  # of the others, only the number is known
        return f"autocast {has_none}, where it was on"
    if not any(on):
        return "autocast was off"
    if all(on):
        return f"autocast {has_none}"
    return f"autocast was off for {on.count(False):,} of {len(on):,}, and {has_none} where it was on"


def _meaning(policy: str) -> str:
    if policy in CastPolicy.__members__:
        first = CastPolicy(policy).meaning.partition(".")[0]
        return f" ({first[0].lower()}{first[1:]})"
    return f" (run in {policy})"


def _source(said_by: str) -> str:
    before, at, line = said_by.partition("region at ")
    if at:
        return f"{before}{'in ' * bool(before)}the {at}{shorten(line)}"
    return f"the {said_by}" if said_by.startswith("module policy") else said_by


def _rules(material: Material) -> Iterator[str]:
    for text, count in material.whole.rules.most_common(_SHOWN):
        calls = _times(count, "call")
        if text.startswith(_RULE):
            rule = text.removeprefix(_RULE)
            whose = "PyTorch's type promotion" if rule == "torch" else f'the promotion rule "{rule}"'
            yield f"{calls} without a policy got several dtypes; {whose} chose the dtype."
        elif text.startswith(AUTOCAST_OFF):
            who = _source(text.removeprefix(AUTOCAST_OFF))
            yield f"{calls} would have had a policy, but autocast was switched off by {who}."
        else:
            yield f"{calls} went to {text}, which decides about casts itself."


def _casts(material: Material) -> Iterator[str]:
    whole = material.whole
    if not whole.casts and not whole.reused:
        yield "Autocast cast no argument."
        return
    if whole.casts:
        parts: Counter[tuple[str, str, str, str]] = Counter()
        for one in material.casts:
            parts[one.argument, one.kind, one.from_dtype, one.to_dtype] += one.made
        shown = [
            f"{count:,} of {argument} ({kind}, {from_dtype} to {to_dtype})"
            for (argument, kind, from_dtype, to_dtype), count in parts.most_common(_SHOWN)
            if count
        ]
        more = len(parts) - _SHOWN
        others = f" and others ({_times(more, 'kind')})" if more > 0 else ""
        yield f"Autocast made {_times(whole.casts, 'cast')}, {size(whole.bytes)}: {', '.join(shown)}{others}."
    if whole.reused:
        yield f"{_times(whole.reused, 'cast')} came from a cache."
    if whole.repeated:
        yield (
            f"{_times(whole.repeated, 'cast')} ({size(whole.repeated_bytes)}) repeated one that had been made "
            "of the same tensor before."
        )


# --- advice


def advice_of(material: Material) -> Iterator[str]:
    """Yields the suggested changes."""
    advised = 0
    backward = [op for op, group in material.by_op().items() if group.policies and set(group.phases) == {"backward"}]
    if backward:
        yield (
            f"{_some(backward)} ran in a backward inside of the autocast region, which casts there as well. Call "
            "backward() after the region, so that it runs in the dtypes of the forward."
        )
    for op, group in material.by_op().items():
        if not group.policies or advised == _ADVISED or op in backward:
            continue
        policy, _, said_by = group.policies.most_common(1)[0][0].partition(": ")
        found = _other_policy(material, op, group, policy, said_by)
        advised += found is not None
        if found is not None:
            yield found
    for kind, mode in (("weight", "persistent"), ("activation", "all")):
        repeated = sum(one.repeated_bytes for one in material.casts if one.kind == kind)
        if repeated:
            yield (
                f'To keep casts of {kind}s that are made again ({size(repeated)}): my_autocast(cache="{mode}"), '
                "which takes memory for them."
            )


def _other_policy(material: Material, op: str, group: CallGroup, policy: str, said_by: str) -> str | None:
    if said_by.startswith(("region at", "module policy", "install,")) or said_by == "the default policy":
        return f"The policy of {op} was set by {_source(said_by)}. Change it there."
    to_float32 = policy in _TO_FLOAT32
    if to_float32:
        other, effect = "lower", "in the autocast dtype instead of float32"
        if not any(name in text.split(" -> ")[0] for text in group.dtypes for name in _LOWER):
            return None  # it got float32, so there is no cast to avoid
    elif policy == CastPolicy.lower_precision_fp.value:
        other, effect = "fp32", "in float32, with its range and precision"
    else:
        return None
    if why_illegal(op, CastPolicy(other)) is not None:  # such as an op of a library that is not imported
        return None
    key = op.partition(".")[0].removeprefix("aten::")
    return f"To run {op} {effect}: {_code(material, op, key, other)}."


def _code(material: Material, op: str, key: str, policy: str) -> str:
    modules = {module for name, module in material.groups if name == op}
    path = material.name if material.kind == "module" else modules.pop() if len(modules) == 1 else ""
    phases = {phase for (name, _), group in material.groups.items() if name == op for phase in group.phases}
    # A module policy replaces the existing one, and does not apply in a backward. Modules outside of the model are
    # named after their class.
    has_one = any(f'module policy "{path}"' in text for text in material.whole.policies)
    if path and not has_one and not path[0].isupper() and "backward" not in phases:
        return f'set_module_policy(model, {{"{path}": {{"{key}": "{policy}"}}}})'
    return f'my_autocast(overrides={{"{key}": "{policy}"}})'


# --- words


def _count(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{number:,} times"


def _times(number: int, noun: str, plural: str = "") -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def _some(ops: Iterable[str]) -> str:
    names = list(ops)
    shown, more = names[:_SHOWN], len(names) - _SHOWN
    if more > 0:
        return f"{', '.join(shown)} and {_times(more, 'other')}"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _some_modules(paths: list[str]) -> str:
    return f"the module{'s' * (len(paths) > 1)} {_some(paths)}"


# ---Patterns that select calls of a trace: a module's path, an op or a source line.


#: An op's name with its overload, a module's path, a line.
Place = tuple[str, str, str]

_KINDS: tuple[str, ...] = ("module", "op", "line")
_FORMS = (
    'Legal: a module\'s path ("blocks.3.attn"), an op ("softmax", "aten::softmax.int") or the end of a line\'s path '
    '("train.py:41", "train.py").'
)
_PATTERN_SHOWN = 5


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
        shown = ", ".join(map(shorten, paths[:_PATTERN_SHOWN])) + (
            f" and {len(paths) - _PATTERN_SHOWN} more" * (len(paths) > _PATTERN_SHOWN)
        )
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
        near = ", ".join(sorted(here, key=lambda line: abs(_number(line) - _number(name)))[:_PATTERN_SHOWN])
        return f"no call of this trace is from line {name!r}. Closest lines of the file: {near}."
    return f"no module, op or line of this trace is {name!r}.{did_you_mean(name, names)} {_FORMS}"


def _is_or_are(paths: list[str]) -> str:
    shown = ", ".join(paths[:_PATTERN_SHOWN]) + (
        f" and {len(paths) - _PATTERN_SHOWN} more" * (len(paths) > _PATTERN_SHOWN)
    )
    return f"is {shown}" if len(paths) == 1 else f"are {shown}"


def _number(line: str) -> int:
    number = line.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


#: The number of rows that `str` and the notebook's table show.
_EXPLANATION_SHOWN = 20
_HEADER = ("op", "module", "calls", "dtypes", "policy", "casts", "reused", "bytes")


@dataclass(frozen=True, slots=True)
class ExplanationRow:
    """The calls of one op in one module, among those explained.

    Attributes:
        op: The op's name with its overload.
        module: The module's path.
        calls: The number of calls.
        dtypes: The most frequent dtypes: inputs, cast inputs, outputs; "(+2)" if there are two more combinations.
        policy: The most frequent policy and its source; without a policy, what applied instead; or "". "(+1)" as in
            `dtypes`.
        casts: The number of casts made.
        reused: The number of casts reused.
        bytes: The size in bytes of the casts made.
    """

    op: str
    module: str
    calls: int
    dtypes: str
    policy: str
    casts: int
    reused: int
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """An explanation of the calls that a pattern selects.

    Attributes:
        pattern: The pattern, without a prefix.
        kind: The kind of pattern: "module", "op" or "line".
        paragraph: The explanation.
        advice: Suggested changes, one sentence each; may be empty.
        rows: The table, most cast bytes first.

    Example:
        >>> import torch, torch_promote as tp
        >>> with tp.trace() as report, tp.my_autocast("cpu"):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> print(report.explain("mm").paragraph[:37])
        aten::mm was called once, in forward.
    """

    pattern: str
    kind: str
    paragraph: str
    advice: tuple[str, ...]
    rows: tuple[ExplanationRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as JSON-compatible values."""
        return {**asdict(self), "advice": list(self.advice), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        paragraph = textwrap.fill(self.paragraph, 100, break_long_words=False, break_on_hyphens=False)
        return self._text(paragraph, None)

    def text(self, width: int | None) -> str:
        """Returns the explanation in lines for a terminal.

        Args:
            width: The width of a line, in characters. None: nothing is wrapped.
        """
        return self._text("\n".join(wrapped(self.paragraph, width)), width)

    def _text(self, paragraph: str, width: int | None) -> str:
        advice = [line for one in self.advice for line in wrapped(f"- {one}", width, "", "  ")]
        paragraphs = [paragraph, *(["\n".join(advice)] if advice else [])]
        more = len(self.rows) - _EXPLANATION_SHOWN
        table = text_table(_HEADER, self._cells(), width) + (f"\nand {more} more rows" if more > 0 else "")
        return "\n\n".join([*paragraphs, table])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEADER)
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in self._cells())
        items = "".join(f"<li>{html.escape(one)}</li>" for one in self.advice)
        return (
            f"<p>{html.escape(self.paragraph)}</p>{f'<ul>{items}</ul>' if items else ''}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        )

    def _cells(self) -> list[list[str]]:
        return [
            [
                row.op,
                row.module or "(none)",
                f"{row.calls:,}",
                row.dtypes,
                row.policy,
                f"{row.casts:,}",
                f"{row.reused:,}",
                size(row.bytes),
            ]
            for row in self.rows[:_EXPLANATION_SHOWN]
        ]


def explain(report: TraceRecords, pattern: str) -> Explanation:
    """Explains the calls of a module, an op or a line, including calls beyond `max_calls`.

    Args:
        report: The trace.
        pattern: A module's path ("blocks.3.attn"), including its submodules; an op ("softmax", "aten::softmax",
            "aten::softmax.int"); or the end of a line ("train.py:41", "train.py"). If it is ambiguous, add a prefix:
            "module=softmax", "op=softmax".

    Raises:
        OptionError: The pattern matches nothing in the trace, or is ambiguous. It is a ValueError.
    """
    totals = report._totals
    selection = select_places((place for place, _ in totals.select(lambda place: True)), pattern)
    groups: dict[tuple[str, str], CallGroup] = {}
    lines: dict[str, int] = {}
    whole = CallGroup("")
    for (op, module, line), group in totals.select(selection.wants):
        groups.setdefault((op, module), CallGroup(op)).merge(group)
        lines[line] = lines.get(line, 0) + group.calls
        whole.merge(group)
    casts = [one for one in report.casts() if selection.wants((one.op, one.module, one.line))]
    kept = [call for call in report.calls if selection.wants((call.name, call.module, call.line))]
    material = Material(selection.kind, selection.name, whole, groups, casts, lines, kept)
    rows = tuple(_row(op, module, group) for (op, module), group in groups.items())
    return Explanation(
        selection.name,
        selection.kind,
        " ".join(sentences_of(material)),
        tuple(advice_of(material)),
        tuple(sorted(rows, key=lambda row: (-row.bytes, -row.calls, row.op, row.module))),
    )


def _row(op: str, module: str, group: CallGroup) -> ExplanationRow:
    return ExplanationRow(
        op,
        module,
        group.calls,
        most_of(group.dtypes),
        most_of(group.policies + group.rules),
        group.casts,
        group.reused,
        group.bytes,
    )
