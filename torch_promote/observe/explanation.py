"""`TraceReport.explain`: explains the calls of a module, an op or a line, in facts, advice and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.observe.events import Call, CallGroup, CastGroup
from torch_promote.policy.legality import why_illegal
from torch_promote.policy.op_table import CastPolicy
from torch_promote.report.base import Column, Content, Listing, Report, Table, short_line, size, spell

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording

__all__ = ["Explanation", "ExplanationRow", "explain"]

#: The number of names in a fact, of ops that get advice, and of names in an error.
_NAMED, _ADVISED, _IN_ERRORS = 4, 2, 5
_TO_FLOAT32 = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")
_LOWER = ("bfloat16", "float16")


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


@dataclass(frozen=True, repr=False)
class Explanation(Report):
    """An explanation of the calls that a pattern selects.

    Attributes:
        pattern: The pattern, without a prefix.
        kind: The kind of pattern: "module", "op" or "line".
        facts: The explanation: names and values, such as ("calls", "2 forward").
        advice: Suggested changes, one sentence each; may be empty.
        rows: The calls by op and module, most cast bytes first.

    Example:
        >>> import torch, torch_promote as tp
        >>> with tp.trace() as report, tp.my_autocast("cpu"):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> dict(report.explain("mm").facts)["policies"]
        "lower_precision_fp: PyTorch's table (1)"
    """

    NOUN: ClassVar[str] = "explanation"

    pattern: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]
    rows: tuple[ExplanationRow, ...]

    @property
    def paragraph(self) -> str:
        """The facts as one text."""
        return ". ".join(f"{name}: {value}" for name, value in self.facts) + "."

    def content(self) -> Content:
        """Returns the facts, the advice and the table."""
        columns = (
            *(Column("op", "name"), Column("module", "name"), "calls", Column("dtypes", "dtypes")),
            *(Column("policy", "policy"), "casts", "reused", Column("bytes", "bytes")),
        )
        rows = [
            (row.op, row.module or "(none)", row.calls, row.dtypes, row.policy, row.casts, row.reused, row.bytes)
            for row in self.rows
        ]
        verdict = f"The {self.kind} {self.pattern or '(outside of modules)'} in this trace"
        parts = Listing("What you can change", self.advice), Table("Calls", columns, rows, most=20)
        return Content(f"explanation: {self.kind} {self.pattern}", verdict, self.facts, parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as JSON-compatible values."""
        rows = [asdict(row) for row in self.rows]
        texts = {"paragraph": self.paragraph, "facts": dict(self.facts), "advice": list(self.advice)}
        return {"pattern": self.pattern, "kind": self.kind, **texts, "rows": rows}


@dataclass(frozen=True)
class _Material:
    """The calls that a pattern selects: as a whole, by op, by op and module, by line; their casts; the stored ones."""

    kind: str
    name: str
    whole: CallGroup
    ops: Mapping[str, CallGroup]
    groups: Mapping[tuple[str, str], CallGroup]
    lines: Mapping[str, int]
    casts: list[CastGroup]
    stored: list[Call]


def explain(report: Recording, pattern: str) -> Explanation:
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
    selection = _select((place for place, _ in totals.select()), pattern)
    groups: dict[tuple[str, str], CallGroup] = {}
    ops: dict[str, CallGroup] = {}
    lines: Counter[str] = Counter()
    whole = CallGroup("")
    for (op, module, line), group in totals.select(selection.wants):
        for sums in (groups.setdefault((op, module), CallGroup(op)), ops.setdefault(op, CallGroup(op)), whole):
            sums.merge(group)
        lines[line] += group.calls
    casts = [one for one in report.casts() if selection.wants((one.op, one.module, one.line))]
    stored = [call for call in report.calls if selection.wants((call.name, call.module, call.line))]
    ops = dict(sorted(ops.items(), key=lambda item: (-item[1].bytes, -item[1].calls)))
    material = _Material(selection.kind, selection.name, whole, ops, groups, lines, casts, stored)
    rows = [
        ExplanationRow(
            *(op, module, group.calls, spell(group.dtypes, "text"), spell(group.policies + group.rules, "text")),
            *(group.casts, group.reused, group.bytes),
        )
        for (op, module), group in groups.items()
    ]
    rows.sort(key=lambda row: (-row.bytes, -row.calls, row.op, row.module))
    facts = tuple((name, text) for name, text in _facts(material) if text)
    return Explanation(selection.name, selection.kind, facts, tuple(_advice(material)), tuple(rows))


def _facts(material: _Material) -> Iterator[tuple[str, str]]:
    whole = material.whole
    yield "calls", ", ".join(f"{calls:,} {phase}" for phase, calls in whole.phases.most_common())
    if material.kind != "module":
        modules = dict.fromkeys(module or "(none)" for _, module in material.groups)
        yield "modules", _names(modules)
    if material.kind != "op" or len(material.ops) > 1:
        yield "ops", _names(material.ops)
    if material.kind == "line":
        yield "lines", _names(map(short_line, material.lines))
    yield "dtypes", _counts(whole.dtypes)
    yield "policies", _counts(whole.policies, _source)
    meanings = dict.fromkeys(text.partition(": ")[0] for text in whole.policies)
    yield "meaning", "; ".join(f"{name}: {_meaning(name)}" for name in list(meanings)[:_NAMED])
    yield "without a policy", _counts(_reasons(material), _source)
    parts: Counter[str] = Counter()
    for one in material.casts:
        parts[f"{one.argument} ({one.kind}) {one.from_dtype} -> {one.to_dtype}"] += one.made
    made = f"{whole.casts:,} ({size(whole.bytes)}): {_counts(parts)}" if whole.casts else "none made"
    yield "casts", made
    yield "casts reused", f"{whole.reused:,}" if whole.reused else ""
    yield "casts repeated", f"{whole.repeated:,} ({size(whole.repeated_bytes)})" if whole.repeated else ""
    yield "raised", f"{whole.errors:,}" if whole.errors else ""


def _reasons(material: _Material) -> Counter[str]:
    """Why calls had no policy, as far as it is known."""
    whole = material.whole
    reasons = Counter(whole.rules)
    left = whole.calls - whole.policies.total() - reasons.total()
    without = [call for call in material.stored if call.policy is None and not call.said_by]
    reasons["autocast was off"] = sum(not call.autocast for call in without)
    reasons["autocast has none for the op"] = len(without) - reasons["autocast was off"]
    reasons["not known, beyond max_calls"] = left - len(without)
    return +reasons


def _meaning(policy: str) -> str:
    if policy in CastPolicy.__members__:
        return CastPolicy(policy).meaning.partition(".")[0]
    return f"run in {policy}"


def _source(text: str) -> str:
    """Shortens the path of a line."""
    before, at, line = text.partition("region at ")
    return f"{before}{at}{short_line(line)}" if at else text


def _names(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:_NAMED]) + f" (+{len(shown) - _NAMED:,})" * (len(shown) > _NAMED)


def _counts(counts: Counter[str], shorten: Callable[[str], str] = str) -> str:
    return _names(f"{shorten(text)} ({count:,})" for text, count in counts.most_common() if count)


def _advice(material: _Material) -> Iterator[str]:
    """Yields the suggested changes."""
    advised = 0
    backward = [op for op, group in material.ops.items() if group.policies and set(group.phases) == {"backward"}]
    if backward:
        yield (
            f"{_names(backward)}: the backward ran inside of the autocast region, which casts there as well. Call "
            "backward() after the region, so that it runs in the dtypes of the forward."
        )
    for op, group in material.ops.items():
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
            yield f'To keep repeated casts of the kind {kind} ({size(repeated)} of memory): my_autocast(cache="{mode}")'


def _other_policy(material: _Material, op: str, group: CallGroup, policy: str, said_by: str) -> str | None:
    if said_by.startswith(("region at", "module policy", "install,")) or said_by == "the default policy":
        return f"The policy of {op} was set by: {_source(said_by)}. Change it there."
    if policy in _TO_FLOAT32:
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


def _code(material: _Material, op: str, key: str, policy: str) -> str:
    modules = {module for name, module in material.groups if name == op}
    path = material.name if material.kind == "module" else modules.pop() if len(modules) == 1 else ""
    # A module policy replaces the existing one, and does not apply in a backward. Modules outside of the model are
    # named after their class.
    has_one = any(f'module policy "{path}"' in text for text in material.whole.policies)
    if path and not has_one and not path[0].isupper() and "backward" not in material.ops[op].phases:
        return f'set_module_policy(model, {{"{path}": {{"{key}": "{policy}"}}}})'
    return f'my_autocast(overrides={{"{key}": "{policy}"}})'


#: An op's name with its overload, a module's path, a line.
_Place = tuple[str, str, str]
_KINDS: tuple[str, ...] = ("module", "op", "line")
_FORMS = (
    'Legal: a module\'s path ("blocks.3.attn"), an op ("softmax", "aten::softmax.int") or the end of a line\'s path '
    '("train.py:41", "train.py").'
)


class _Selection(NamedTuple):
    """The meaning of a pattern: its kind, the pattern without its prefix, and whether it selects a place."""

    kind: str
    name: str
    wants: Callable[[_Place], bool]


def _select(places: Iterable[_Place], pattern: str) -> _Selection:
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
        raise OptionError(f"{name!r} is ambiguous in this trace: {', '.join(found)}. Write {ways}.")
    kind = found[0]
    wants = _WANTS[kind](name)
    if kind == "line":
        paths = sorted({_path(place[2]) for place in known if wants(place)})
        if len(paths) > 1:
            shown = ", ".join(paths[:_IN_ERRORS])
            raise OptionError(f"{name!r} is the end of several paths in this trace: {shown}. Write more of the path.")
    return _Selection(kind, name, wants)


def _is_module(name: str) -> Callable[[_Place], bool]:
    return lambda place: place[1] == name or (bool(name) and place[1].startswith(f"{name}."))


def _is_op(name: str) -> Callable[[_Place], bool]:
    wanted = name.removesuffix(".default") if name.endswith(".default") else name
    exact = wanted != name

    def wants(place: _Place) -> bool:
        full = place[0]
        names = {full, full.partition("::")[2]}
        return wanted in names if exact else bool(names & {wanted}) or wanted in {n.partition(".")[0] for n in names}

    return wants


def _is_line(name: str) -> Callable[[_Place], bool]:
    def wants(place: _Place) -> bool:
        line = place[2]
        return bool(line) and any(text == name or text.endswith(f"/{name}") for text in (line, _path(line)))

    return wants


_WANTS = {"module": _is_module, "op": _is_op, "line": _is_line}


def _path(line: str) -> str:
    return line.rpartition(":")[0]


def _no_match(places: list[_Place], kinds: tuple[str, ...], name: str) -> str:
    if not places:
        return f"nothing matches {name!r}: the trace has no calls."
    modules = {place[1] for place in places if place[1]}
    parents = {".".join(path.split(".")[:end]) for path in modules for end in range(1, path.count(".") + 1)}
    ops = {place[0].partition("::")[2].partition(".")[0] for place in places}
    lines = {short_line(place[2]) for place in places if place[2]}
    names = [*("module" in kinds) * sorted(modules | parents)]
    inside = [path for path in names if path.endswith(f".{name}")]
    if inside:
        return f"no module has the path {name!r}. Write the whole path: {', '.join(inside[:_IN_ERRORS])}."
    names += [*("op" in kinds) * sorted(ops), *("line" in kinds) * sorted(lines | set(map(_path, lines)))]
    here = sorted((line for line in lines if _path(line) == _path(name) and ":" in name), key=_number)
    if here and "line" in kinds:
        near = ", ".join(sorted(here, key=lambda line: abs(_number(line) - _number(name)))[:_IN_ERRORS])
        return f"no call of this trace is from line {name!r}. Closest lines of the file: {near}."
    return f"no module, op or line of this trace is {name!r}.{did_you_mean(name, names)} {_FORMS}"


def _number(line: str) -> int:
    number = line.rpartition(":")[2]
    return int(number) if number.isdigit() else 0
