"""`TraceReport.explain`: explains the calls of a module, an op or a line, in facts, advice and a table."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.observe.call import AUTOCAST_OFF, BY_CUSTOM_BWD, BY_SETTER, Call, TensorInfo, is_by_backward
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy
from torch_promote.policy.overrides import why_illegal
from torch_promote.reading.dtype_errors import cure_of, describe_raised, made_by, short_source, spell_autocast
from torch_promote.reading.findings import OPTIMIZER, PLUMBING, by_weight, conversions, is_delicate, promoted, savings
from torch_promote.recording.recording import CallGroup, Place
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.regions.defaults import DEFAULT_POLICY
from torch_promote.regions.float8 import product_on
from torch_promote.report.base import (
    Column,
    Content,
    Listing,
    Report,
    Table,
    ancestors,
    module_name,
    percent,
    short_line,
    size,
    some_of,
    spell,
)
from torch_promote.report.codec import encode

if TYPE_CHECKING:
    from torch_promote.recording.recording import Recording

#: The number of names in a fact, of ops that get advice, and of names in an error.
_NAMED, _ADVISED, _IN_ERRORS = 4, 2, 5
#: The fact that the calls made the first inf or NaN of the trace.
_MADE = "made the first inf or NaN"
_LOWER = tuple(map(dtype_name, LOWER_DTYPES))
_TO_LOWER = "lower", "in the autocast dtype instead of float32"
#: What another policy of an op would be, and its effect.
_OTHER_POLICY = {
    **dict.fromkeys(("fp32", "fp32_set_opt_dtype", "fp32_append_dtype"), _TO_LOWER),
    "lower_precision_fp": ("fp32", "in float32, with its range and precision"),
}


@dataclass(frozen=True, slots=True)
class ExplanationRow:
    """The calls of one op in one module, among those explained.

    Attributes:
        op: The op's name with its overload.
        module: The module's path.
        calls: The number of calls.
        dtypes: The most frequent dtypes: inputs, cast inputs, outputs; "; 2 more" if there are two more combinations.
        policy: The most frequent policy and its source; without a policy, what applied instead; or "". "; 1 more" as in
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
        verdict: That they made the first inf or NaN of the trace; or else, for how many of them autocast had a policy.
        facts: The explanation: names and values, such as ("calls", "2 forward").
        advice: Suggested changes, one sentence each; may be empty.
        rows: The calls by op and module, the ops in the order of the trace's table, those that compute nothing last.

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
    verdict: str
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
            Column("op", "name"),
            Column("module", "name"),
            "calls",
            Column("dtypes", "dtypes"),
            Column("policy", "policy"),
            "casts",
            "reused",
            Column("bytes", "bytes"),
        )
        rows = [
            (
                *(row.op, module_name(row.module), row.calls, row.dtypes, row.policy),
                *(row.casts or None, row.reused or None, row.bytes or None),
            )
            for row in self.rows
        ]
        others = [fact for fact in self.facts if fact[0] != _MADE]  # which is the verdict
        parts = Listing("What you can change", self.advice), Table("Calls", columns, rows, most=20)
        title = f"explanation: {self.kind} {module_name(self.pattern)}"
        return Content(title, self.verdict, others, parts, good=None if len(others) == len(self.facts) else False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as JSON-compatible values."""
        data = {
            name: encode(getattr(self, name))
            for name in ("pattern", "kind", "verdict", "paragraph", "facts", "advice", "rows")
        }
        return {**data, "facts": dict(self.facts)}


def explain(report: Recording, pattern: str) -> Explanation:
    """Explains the calls of a module, an op or a line, also beyond `max_calls`: see `TraceReport.explain`."""
    return _Explainer(report, *_select(list(report.groups()), pattern)).explain()


class _Explainer:
    """Explains the calls that a pattern selects: as a whole, by op, by op and module, and by line."""

    def __init__(self, report: Recording, kind: str, name: str, wants: Callable[[Place], bool]) -> None:
        self.report, self.kind, self.name = report, kind, name
        first = report.first_nonfinite
        self.first_nonfinite = first if first is not None and wants((first.name, first.module, first.line)) else None
        self.raised = [
            one
            for one in report.raised
            if any(wants((call.name, call.module, call.line)) for call in dict.fromkeys(one))
        ]
        self.whole = CallGroup("")
        self.rules: Counter[tuple[str, str]] = Counter()  # of all calls, by module
        self.groups: dict[tuple[str, str], CallGroup] = {}
        self.lines: Counter[str] = Counter()
        ops: dict[str, CallGroup] = {}
        for (op, module, line), group in report.groups().items():
            self.rules.update({(module, rule): count for rule, count in group.rules.items()})
            if not wants((op, module, line)):
                continue
            for sums in (self.groups.setdefault((op, module), CallGroup(op)), ops.setdefault(op, CallGroup(op))):
                sums.merge(group)
            self.whole.merge(group)
            self.lines[line] += group.calls
        self.ops = dict(sorted(ops.items(), key=lambda item: (-item[1].bytes, -item[1].calls)))
        self.casts = [one for one in report.casts() if wants((one.op, one.module, one.line))]
        self.stored = [call for call in report.calls if wants((call.name, call.module, call.line))]

    def explain(self) -> Explanation:
        rows = [
            ExplanationRow(
                op,
                module,
                group.calls,
                spell(group.dtypes, "text"),
                spell(_short(group.policies + group.rules), "text"),
                group.casts,
                group.reused,
                group.bytes,
            )
            for (op, module), group in self.groups.items()
        ]
        groups, apart = by_weight(self.report)
        order = [one.key for one in (*groups, *apart[OPTIMIZER], *apart[PLUMBING])]
        rows.sort(key=lambda row: (order.index(row.op), -row.bytes, -row.calls, row.module))
        facts = tuple((name, text) for name, text in self._facts() if text)
        what, made = f"{self.kind} {module_name(self.name)}", dict(facts).get(_MADE)
        having, calls = self.whole.policies.total(), self.whole.calls
        verdict = f"Autocast had a policy for {having:,} of {calls:,} calls of the {what}."
        if made is not None:
            verdict = f"The {what} made the first inf or NaN: {made}"
        return Explanation(self.name, self.kind, verdict, facts, tuple(dict.fromkeys(self._advice())), tuple(rows))

    def _facts(self) -> Iterator[tuple[str, str]]:
        whole, report = self.whole, self.report
        if self.first_nonfinite is not None:
            losses = report.nonfinite.about_losses(report.steps)
            made = describe_call(self.first_nonfinite, report)
            yield _MADE, f"{made}{losses and '; '}{losses}"
        measured = [values for call in self.stored if (values := report.values_of(call))]
        bad = sum(any(one.infs or one.nans for one in values) for values in measured)
        yield "inf or NaN", f"in results of {bad:,} of {len(measured):,} calls" if bad else ""
        yield "calls", ", ".join(f"{calls:,} {phase}" for phase, calls in whole.phases.most_common())
        if self.kind != "module":
            yield "modules", some_of(dict.fromkeys(module_name(module) for _, module in self.groups))
        if self.kind != "op" or len(self.ops) > 1:
            yield "ops", some_of(self.ops)
        if self.kind == "line":
            yield "lines", some_of(map(short_line, self.lines))
        yield "dtypes", _counts(whole.dtypes)
        converted = conversions(report, self.stored)
        yield "conversions", some_of(f"{line}, {dtypes} ({count:,})" for line, dtypes, _, count, _, _ in converted)
        if self.kind != "module":
            texts = (", ".join(f"{name} {value}" for name, value in call.arguments) for call in self.stored)
            yield "arguments", _counts(Counter(text for text in texts if text))
        yield "policies", _counts(whole.policies)
        names = list(dict.fromkeys(text.partition(": ")[0] for text in whole.policies))
        meanings = {policy.value: policy.meaning.partition(".")[0] for policy in CastPolicy}
        yield "meaning", "; ".join(f"{name}: {meanings.get(name, f'run in {name}')}" for name in names[:_NAMED])
        in_float8 = [call.ran_with[0] for call in self.stored if call.policy in FLOAT8_POLICIES]
        products = Counter(product_on(torch.device(one.device)) for one in in_float8 if one.dtype.itemsize == 1)
        yield "product", _counts(products)
        # Why calls had no policy, as far as it is known.
        reasons = Counter(whole.rules)
        without = [call for call in self.stored if call.policy is None and not call.policy_source]
        reasons["autocast was off"] = sum(not call.autocast for call in without)
        reasons["autocast has none for the op"] = len(without) - reasons["autocast was off"]
        reasons["not known, beyond max_calls"] = whole.calls - whole.policies.total() - reasons.total()
        yield "without a policy", _counts(reasons)
        if self.kind != "module":
            yield from self._off()
        parts: Counter[str] = Counter()
        for one in self.casts:
            parts[f"{one.argument} ({one.kind}) {one.from_dtype} -> {one.to_dtype}"] += one.made
        yield "casts", f"{whole.casts:,} ({size(whole.bytes)}): {_counts(parts)}" if whole.casts else "none made"
        yield "casts reused", f"{whole.reused:,}" if whole.reused else ""
        yield "casts repeated", f"{whole.repeated:,} ({size(whole.repeated_bytes)})" if whole.repeated else ""
        yield "not in the trace", " ".join(one for one in report.not_seen if one.kind == "threads")
        yield "raised", f"{whole.errors:,}" if whole.errors else ""
        yield "raised last", describe_raised(self.raised[-1]) if self.raised else ""

    def _off(self) -> Iterator[tuple[str, str]]:
        """Yields who has switched autocast off for others of the modules' calls, and where tensors come from then."""
        modules = {module for _, module in self.groups}
        off = {one: n for (path, one), n in self.rules.items() if path in modules and one.startswith(AUTOCAST_OFF)}
        found = [call for call in self.stored if call.own and call.phase == "forward" and not call.autocast]
        if off and found:  # for an op without a policy, the record does not say who has
            yield "in the same modules", "" if off.keys() & self.whole.rules.keys() else _counts(Counter(off))
            low = next((call for call in found if call.dtypes.startswith(_LOWER)), None)
            yield "its tensors", "" if low is None else made_by(low, list(self.report.calls)).strip()

    def _advice(self) -> Iterator[str]:
        """Yields the suggested changes: of policies, then of the cache."""
        if self.raised:
            last, failure = self.raised[-1], self.report.failure
            ended = failure is not None and failure.in_call and last == self.report.raised[-1]
            cure = cure_of(last, failure if ended else None, self.report.calls).text
            if cure:
                yield f"What cures the error: {cure}"
        if self.first_nonfinite is not None:
            yield "tp.find_nonfinite() tells whether the dtype of that call is to blame, and finds a policy for it."
        backward = [
            op
            for op, group in self.ops.items()
            if group.policies and set(group.phases) == {"backward"} and not any(map(is_by_backward, group.policies))
        ]
        if backward:
            yield (
                f"{some_of(backward)}: autocast was on in the backward, and casts there as well. If a region is open "
                "where backward() is called, call it after the region, so that it runs in the dtypes of the forward."
            )
        yield from islice(dict.fromkeys(self._of_backwards_regions()), _ADVISED)
        others = (self._other_policy(op) for op, group in self.ops.items() if group.policies and op not in backward)
        yield from islice(filter(None, others), _ADVISED)
        yield from islice(self._promoting(), _ADVISED)
        for one in savings(self.stored):
            if "cache=" in one.remedy:
                yield f"{one.remedy}: {one.casts:,} casts ({size(one.bytes)}). {one.effect}"

    def _of_backwards_regions(self) -> Iterator[str]:
        """Yields what differs between a region that a backward has opened and the forward or the tensors."""
        for text in self.whole.rules:
            if text.startswith("no region for ") and BY_CUSTOM_BWD in text:
                device = f'device_type="{text.removeprefix("no region for ").partition(":")[0]}"'
                yield f"{short_source(text)}. Decorate with custom_fwd({device}) and custom_bwd({device})."
        forward: dict[str, set[tuple[tuple[str, torch.dtype], ...]]] = {}
        for call in self.report.calls:
            if call.phase == "forward" and call.autocast:
                forward.setdefault(call.module, set()).add(call.autocast)
        for call in self.stored:
            ran = forward.get(call.module, {call.autocast})
            if call.phase == "backward" and is_by_backward(call.policy_source) and call.autocast not in ran | {()}:
                region = short_source(call.policy_source).removeprefix("PyTorch's table, ")
                other = " or ".join(sorted(map(spell_autocast, ran)))
                yield (
                    f"The {region} is of {spell_autocast(call.autocast)}; the forward of module "
                    f"{module_name(call.module)} ran in {other}. Open both with one dtype."
                )

    def _promoting(self) -> Iterator[str]:
        """Yields how to keep ops in low precision whose float32 operand, such as a bias, is the smaller one."""
        found: dict[tuple[str, str, bool, str], tuple[TensorInfo, TensorInfo]] = {}
        for call, wide, lower in promoted(self.stored):
            found.setdefault((call.name, call.module, call.policy_source == BY_SETTER, wide.owner), (wide, lower))
        for (op, module, by_setter, _), (wide, lower) in found.items():
            code = self._code(op, module, "lower", in_backward=False)
            yield (
                f"{op.partition('.')[0].removeprefix('aten::')}=lower: {wide.label}, of float32, promotes {lower.name} "
                f"of {dtype_name(lower.dtype)}, which has more elements, to float32. To run it in the autocast dtype: "
                f"{code}{', in place of torch.set_autocast_enabled, under which no override acts' * by_setter}."
            )

    def _other_policy(self, op: str) -> str:
        group = self.ops[op]
        known = (text for text, _ in group.policies.most_common() if not is_by_backward(text))
        policy, _, policy_source = next(known, "").partition(": ")
        if policy_source.startswith(("region at", "module policy", "install,")) or policy_source.endswith(
            DEFAULT_POLICY
        ):
            return f"The policy of {op} was set by: {short_source(policy_source)}. Change it there."
        other, effect = _OTHER_POLICY.get(policy, ("", ""))
        is_lower = any("float16" in text.split(" -> ")[0] for text in group.dtypes)  # or bfloat16
        if not other or (other == "lower" and not is_lower):  # it got float32, so there is no cast to avoid
            return ""
        if {dtype for text in group.dtypes for dtype in text.partition(" -> ")[0].split(", ")} == {"float64"}:
            return f"The arguments of {op} are float64, which autocast does not cast: convert them in the code."
        if other == "lower" and self.kind != "op" and is_delicate(op):
            return ""
        if why_illegal(op, CastPolicy(other)) is not None:  # such as an op of a library that is not imported
            return ""
        modules = {module for name, module in self.groups if name == op}
        path = self.name if self.kind == "module" else modules.pop() if len(modules) == 1 else ""
        return f"To run {op} {effect}: {self._code(op, path, other, 'backward' in group.phases)}."

    def _code(self, op: str, path: str, policy: str, in_backward: bool) -> str:
        """The code that gives an op a policy, in a module if it can have one."""
        # A module policy replaces the existing one, and does not apply in a backward. Modules outside of the model are
        # named after their class.
        key = op.partition(".")[0].removeprefix("aten::")
        has_one = any(f'module policy "{path}"' in text for text in self.whole.policies)
        if path and not has_one and not path[0].isupper() and not in_backward:
            return f'set_module_policy(model, {{"{path}": {{"{key}": "{policy}"}}}})'
        return f'my_autocast(overrides={{"{key}": "{policy}"}})'


def describe_call(call: Call, report: Recording) -> str:
    """Returns where the first inf or NaN is: "aten::log, forward, blocks.0, train.py:12, step 3: 100 % NaN"."""
    values, step = report.values_of(call), report.nonfinite.call_step
    share = {name: max((getattr(one, name) for one in values), default=0.0) for name in ("nans", "infs")}
    shares = [f"{percent(share[name])} {shown}" for name, shown in (("nans", "NaN"), ("infs", "inf")) if share[name]]
    place = call.name, call.phase, module_name(call.module), short_line(call.line), f"step {step:,}"
    return ", ".join(filter(None, place)) + (f": {', '.join(shares)}" if shares else "")


def _short(sources: Counter[str]) -> Counter[str]:
    """The number of calls by who has set the policy, as `short_source` spells it."""
    found = Counter[str]()
    for text, count in sources.items():
        found[short_source(text)] += count
    return found


def _counts(counts: Counter[str]) -> str:
    return some_of(f"{text} ({count:,})" for text, count in _short(counts).most_common() if count)


_FORMS = (
    'Legal: a module\'s path ("blocks.3.attn"; "(model)": the calls outside of submodules), an op ("softmax", '
    '"aten::softmax.int") or the end of a line\'s path ("train.py:41", "train.py").'
)


def _select(places: list[Place], pattern: str) -> tuple[str, str, Callable[[Place], bool]]:
    """The kind of a pattern, the pattern without its prefix, and a function that tells whether it selects a place."""
    if not isinstance(pattern, str) or not pattern:
        raise OptionError(f"explain what? Got {pattern!r}. {_FORMS}")
    prefix, equals, rest = pattern.partition("=")
    is_prefix = bool(equals) and prefix in _WANTS
    kinds, name = ((prefix,), rest) if is_prefix else (tuple(_WANTS), pattern)
    if name == module_name(""):
        kinds, name = ("module",), ""
    found = [kind for kind in kinds if any(_WANTS[kind](name, place) for place in places)]
    if not found:
        raise OptionError(_no_match(places, kinds, name))
    if len(found) > 1:
        ways = " or ".join(repr(f"{kind}={name}") for kind in found)
        raise OptionError(f"{name!r} is ambiguous in this trace: {', '.join(found)}. Write {ways}.")
    wants = functools.partial(_WANTS[found[0]], name)
    paths = sorted({place[2].rpartition(":")[0] for place in places if wants(place)})
    if found == ["line"] and len(paths) > 1:
        shown = ", ".join(paths[:_IN_ERRORS])
        raise OptionError(f"{name!r} is the end of several paths in this trace: {shown}. Write more of the path.")
    return found[0], name, wants


def _is_module(name: str, place: Place) -> bool:
    return place[1] == name or (bool(name) and place[1].startswith(f"{name}."))


def _is_op(name: str, place: Place) -> bool:
    full = place[0]
    names = {full, full.partition("::")[2]}
    if name.endswith(".default"):
        return name.removesuffix(".default") in names
    return name in names or name in {one.partition(".")[0] for one in names}


def _is_line(name: str, place: Place) -> bool:
    line = place[2]
    return bool(line) and any(text == name or text.endswith(f"/{name}") for text in (line, line.rpartition(":")[0]))


_WANTS: dict[str, Callable[[str, Place], bool]] = {"module": _is_module, "op": _is_op, "line": _is_line}


def _no_match(places: list[Place], kinds: tuple[str, ...], name: str) -> str:
    if not places:
        return f"nothing matches {name!r}: the trace has no calls."
    modules = {one for _, path, _ in places for one in ancestors(path)}
    inside = [path for path in sorted(modules) if path.endswith(f".{name}")]
    if inside and "module" in kinds:
        return f"no module has the path {name!r}. Write the whole path: {', '.join(inside[:_IN_ERRORS])}."
    ops = {op.partition("::")[2].partition(".")[0] for op, _, _ in places}
    names = {"module": modules, "op": ops, "line": {short_line(line) for _, _, line in places}}
    legal = [one for kind in kinds for one in sorted(names[kind]) if one]
    return f"no module, op or line of this trace is {name!r}.{did_you_mean(name, legal)} {_FORMS}"
