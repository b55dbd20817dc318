"""The sentences of an explanation: what ran, why, and suggested changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch_promote.numerics.observing.places import shorten
from torch_promote.numerics.records.calls import AUTOCAST_OFF, Call
from torch_promote.numerics.records.groups import CallGroup, CastGroup
from torch_promote.numerics.report.findings import size
from torch_promote.policy.legality import why_illegal
from torch_promote.policy.op_table import CastPolicy

__all__ = ["Material", "advice_of", "sentences_of"]

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
