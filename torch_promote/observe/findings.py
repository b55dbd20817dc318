"""Facts for the summary and the page of a trace: verdict, dtypes, repeated casts, and number formats."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from torch_promote.observe.events import AUTOCAST_OFF, Call, CallGroup, Cast
from torch_promote.observe.ops import find_overload
from torch_promote.observe.values import Values
from torch_promote.reference.dtypes import dtype_name

if TYPE_CHECKING:
    from torch_promote.observe.events import CallGroup, TraceRecords

__all__ = [
    "ExponentRow",
    "Exponents",
    "ModuleNode",
    "ModuleTree",
    "Node",
    "RepeatedCast",
    "Saving",
    "by_weight",
    "count",
    "cut_tree",
    "exponent_rows",
    "is_lower",
    "make_tree",
    "module_tree",
    "most_of",
    "percent",
    "prefixes",
    "repeated_casts",
    "result_dtype",
    "result_dtypes",
    "savings",
    "short_dtype",
    "size",
    "time_in_casts",
    "verdict",
]


# ---The paths of modules as a tree.


_MOST, _DEEPEST = 1_200, 50


class _Node(Protocol):
    children: list[Any]


Node = TypeVar("Node", bound=_Node)


def make_tree(paths: Iterable[str], make: Callable[[str, str], Node]) -> tuple[list[Node], dict[str, Node]]:
    """Makes the nodes of paths and of their parents.

    Args:
        paths: Paths of modules; "" has no node.
        make: Makes a node from a path and its last part. A node has a list `children`.

    Returns:
        The outermost nodes, sorted so that "blocks.2" comes before "blocks.10"; and all nodes, by path.
    """
    by_path: dict[str, Node] = {}
    roots: list[Node] = []
    for whole in sorted(paths, key=_natural):
        for path in prefixes(whole) if whole else ():
            if path not in by_path:
                outer, _, name = path.rpartition(".")
                node = by_path[path] = make(path, name)
                (by_path[outer].children if outer else roots).append(node)
    return roots, by_path


def prefixes(path: str) -> Iterator[str]:
    """Yields the parents of a path, and the path itself.

    Example:
        >>> list(prefixes("blocks.0.attn"))
        ['blocks', 'blocks.0', 'blocks.0.attn']
    """
    parts = path.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _natural(path: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in path.split(".")]


def cut_tree(roots: list[Node], total: int) -> int:
    """Removes the deepest nodes if there are too many or too deep ones for a page.

    Args:
        roots: The outermost nodes.
        total: The number of nodes.

    Returns:
        The number of removed nodes.
    """
    kept, level, depth = 0, roots, 0
    while level:
        kept, depth = kept + len(level), depth + 1
        below = [child for node in level for child in node.children]
        if kept + len(below) > _MOST or depth == _DEEPEST:
            for node in level:
                node.children = []
            break
        level = below
    return total - kept


OTHER = "other"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_LOWER = ("bfloat16", "float16", "float8", "float4")


@dataclass(frozen=True)
class RepeatedCast:
    """Tensors that are cast repeatedly with unchanged content, at the same places.

    Attributes:
        from_dtype: The name of the tensor's dtype.
        to_dtype: The name of the dtype that it is cast to.
        shape: The tensor's shape.
        kind: "weight", "activation" or "gradient".
        tensors: The number of tensors.
        made: The number of casts made of them.
        repeated: The number of these casts that had been made before.
        repeated_bytes: Their size in bytes.
        places: The places of the casts, as (op, argument, line).
        modules: The modules of the casts.
    """

    from_dtype: str
    to_dtype: str
    shape: tuple[int, ...]
    kind: str
    tensors: int
    made: int
    repeated: int
    repeated_bytes: int
    places: tuple[tuple[str, str, str], ...]
    modules: tuple[str, ...]


def verdict(report: TraceRecords) -> str:
    """Returns the result of the trace in one sentence.

    Example:
        >>> import torch_promote as tp
        >>> with tp.trace() as report:
        ...     pass
        >>> verdict(report)
        'No call was recorded.'
    """
    total = report.total
    if not total.calls:
        return "No call was recorded."
    raised = f"; {count(total.errors, 'call')} raised an error" if total.errors else ""
    with_policy = sum(total.policies.values())
    if not with_policy:
        return f"Autocast was off or had no policy for {_these(total.calls)}: arguments kept their dtypes{raised}."
    text = f"Autocast had a policy for {with_policy:,} of {count(total.calls, 'call')}"
    if not total.casts:
        reused = f" (it reused {count(total.reused, 'earlier cast')})" if total.reused else ""
        return f"{text} and made no casts{reused}{raised}."
    text += f" and made {count(total.casts, 'cast')} ({size(total.bytes)})"
    if not total.repeated:
        return f"{text}, none of them twice{raised}."
    again = "a cast" if total.repeated == 1 else "casts"
    return f"{text}; {total.repeated:,} of them ({size(total.repeated_bytes)}) repeated {again} made before{raised}."


def _these(calls: int) -> str:
    return "the only call" if calls == 1 else f"all {calls:,} calls"


def result_dtype(dtypes: str) -> str:
    """Returns the dtype of a call's first floating or complex result, or argument if it has no such result.

    Args:
        dtypes: `Call.dtypes`.

    Returns:
        The dtype's name, "float8" for any 8-bit floating dtype; "other" for calls on only integers and bools.

    Example:
        >>> [result_dtype(text) for text in ("float32 -> bfloat16 -> bfloat16", "float32 -> none", "none -> int64")]
        ['bfloat16', 'float32', 'other']
    """
    for part in reversed(dtypes.split(" -> ")):
        for name in part.split(", "):
            if name.startswith("float8"):
                return "float8"
            if name.startswith(("float", "bfloat", "complex", "bcomplex")):
                return name
    return OTHER


def result_dtypes(dtypes: Mapping[str, int]) -> dict[str, int]:
    """Counts calls by the dtype of their results, widest first, "other" last.

    Args:
        dtypes: `CallGroup.dtypes`.
    """
    counted: Counter[str] = Counter()
    for text, calls in dtypes.items():
        counted[result_dtype(text)] += calls
    return dict(sorted(counted.items(), key=lambda item: (_rank(item[0]), item[0])))


def _rank(name: str) -> int:
    order = ("complex128", "complex64", "float64", "float32", "bfloat16", "float16", "float8")
    return order.index(name) if name in order else len(order) + (name == OTHER)


def is_lower(name: str) -> bool:
    """Whether a floating dtype is narrower than float32."""
    return name.startswith(_LOWER)


def time_in_casts(report: TraceRecords) -> float | None:
    """Returns the share of casts in the calls' time on the host; None if it is unknown.

    Composite calls include the calls of their ops, so it sums up only the outermost calls. That needs all calls.
    """
    if report.dropped or not report.calls:
        return None
    ends: dict[int, int] = {}
    outermost = 0
    for call in sorted(report.calls, key=lambda call: (call.start, -call.duration)):
        if call.start >= ends.get(call.thread, 0):
            ends[call.thread] = call.start + call.duration
            outermost += call.duration
    return report.total.cast_time / outermost if outermost else None


def repeated_casts(report: TraceRecords) -> list[RepeatedCast]:
    """Returns the repeated casts of unchanged tensors, most bytes first.

    Calls that the report does not store individually (`report.dropped`) are not included.
    """
    by_tensor: dict[tuple[Any, ...], list[tuple[Call, Cast]]] = defaultdict(list)
    for call in report.calls:
        for cast in call.casts:
            if not cast.reused:
                by_tensor[cast.tensor, cast.from_dtype, cast.to_dtype, _shape(call, cast)].append((call, cast))
    alike: dict[tuple[Any, ...], list[list[tuple[Call, Cast]]]] = defaultdict(list)
    for (_, *what), made in by_tensor.items():
        if any(cast.earlier for _, cast in made):
            places = tuple(dict.fromkeys((call.name, cast.argument, call.line) for call, cast in made))
            alike[*what, made[0][1].kind, places].append(made)
    found = [
        RepeatedCast(
            from_dtype=dtype_name(from_dtype),
            to_dtype=dtype_name(to_dtype),
            shape=shape,
            kind=kind,
            tensors=len(tensors),
            made=sum(len(made) for made in tensors),
            repeated=sum(bool(cast.earlier) for made in tensors for _, cast in made),
            repeated_bytes=sum(cast.bytes for made in tensors for _, cast in made if cast.earlier),
            places=places,
            modules=tuple(dict.fromkeys(call.module for made in tensors for call, _ in made)),
        )
        for (from_dtype, to_dtype, shape, kind, places), tensors in alike.items()
    ]
    return sorted(found, key=lambda one: (-one.repeated_bytes, -one.repeated))


def _shape(call: Call, cast: Cast) -> tuple[int, ...]:
    return next((info.shape for info in call.inputs if info.name == cast.argument), ())


def by_weight(groups: Iterable[CallGroup]) -> list[CallGroup]:
    """Sorts groups by op: by cast bytes, then by whether they have a policy, then by the number of calls.

    Ops that return a view of their argument, such as transpose, come last.
    """
    return sorted(
        groups, key=lambda group: (-group.bytes, not group.policies, _returns_a_view(group.key), -group.calls)
    )


def _returns_a_view(name: str) -> bool:
    try:
        op = find_overload(name)
    except (AttributeError, RuntimeError, KeyError, ValueError):  # an op of another PyTorch release or the program
        return False
    return op.is_view and op._schema.name not in ("aten::to", "aten::contiguous")


def size(number: float) -> str:
    """Spells a number of bytes.

    Example:
        >>> size(12), size(1536), size(52_428_800)
        ('12 B', '1.5 KiB', '50 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB"]
    power = min(max(0, int(number).bit_length() - 1) // 10, len(units) - 1)
    number /= 1024**power
    spelt = f"{number:.1f}".removesuffix(".0") if number < 10 else f"{number:,.0f}"
    return f"{spelt} {units[power]}"


def percent(part: float, whole: float = 1.0) -> str:
    """Spells a share: "0.4 %", "27 %".

    Example:
        >>> percent(1, 3), percent(1, 300), percent(1, 9000), percent(0, 0)
        ('33 %', '0.3 %', '< 0.1 %', '0 %')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.05:
        return "< 0.1 %"
    return f"{share:.1f}".removesuffix(".0") + " %" if share < 9.95 else f"{share:.0f} %"


def count(number: int, noun: str) -> str:
    """Spells a number of things: "1 call", "1,200 calls"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def most_of(counted: Counter[str], shorten: Callable[[str], str] = str) -> str:
    """Returns the most frequent text and the number of others: "float32 -> float16 (+2)"; "" if there is none."""
    if not counted:
        return ""
    (text, _), *others = counted.most_common()
    return f"{shorten(text)} (+{len(others)})" if others else shorten(text)


def short_dtype(name: str) -> str:
    """Returns a short name of a dtype.

    Example:
        >>> short_dtype("bfloat16"), short_dtype("int64")
        ('bf16', 'int64')
    """
    return _SHORT.get(name, name)


# ---Suggests cache modes or policies with which a traced program would make fewer casts.


_REMEMBERED = 4  # the number of activations that cache="all" keeps
_FP32_POLICIES = ("fp32", "float32", "float64")


@dataclass(frozen=True)
class Saving:
    """A suggestion to make fewer casts.

    Attributes:
        remedy: The code to write, `my_autocast(..., cache="all")`.
        casts: The number of traced casts that it would avoid.
        bytes: Their size in bytes.
        effect: The effect, as a sentence.
    """

    remedy: str
    casts: int
    bytes: int
    effect: str


def savings(report: TraceRecords) -> list[Saving]:
    """Returns suggestions to make fewer casts, computed from the calls that the report stores.

    A cache avoids a repeated cast. A policy avoids the casts to float32 of an op whose inputs are all lower precision.
    """
    activations, weights = _saved_by_caches(report.calls)
    found = []
    if activations:
        found.append(
            Saving(
                'my_autocast(..., cache="all")',
                len(activations),
                sum(activations),
                "These casts of activations would be reused, if the earlier cast is in the same region.",
            )
        )
    if weights:
        found.append(
            Saving(
                'my_autocast(..., cache="persistent")',
                len(weights),
                sum(weights),
                "These casts of weights would be reused, because the weights did not change in between.",
            )
        )
    by_op: dict[str, list[int]] = defaultdict(list)
    for call in report.calls:
        if call.policy_name in _FP32_POLICIES and all(is_lower(name) for name in _floating(call)):
            by_op[call.op] += [cast.bytes for cast in call.casts if not cast.reused and _up(cast)]
    for op, sizes in sorted(by_op.items(), key=lambda item: -sum(item[1])):
        if sizes:
            name = op.partition("::")[2] if op.startswith("aten::") else op
            effect = "The op would run on its uncast arguments, in lower precision. Its results would differ."
            found.append(Saving(f'overrides={{"{name}": "keep"}}', len(sizes), sum(sizes), effect))
    return found


def _floating(call: Call) -> list[str]:
    return [dtype_name(info.dtype) for info in call.inputs if info.dtype.is_floating_point]


def _up(cast: Cast) -> bool:
    return is_lower(dtype_name(cast.from_dtype)) and not is_lower(dtype_name(cast.to_dtype))


def _saved_by_caches(calls: Iterable[Call]) -> tuple[list[int], list[int]]:
    """The sizes of the casts that cache="all" and "persistent" would reuse."""
    activations, weights = [], []
    last: defaultdict[int, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
    for call in calls:
        for cast in call.casts:
            if cast.reused or cast.kind == "gradient":
                continue
            if cast.kind == "weight":
                weights += [cast.bytes] if cast.earlier and not _up(cast) else []
                continue
            key, recent = (cast.tensor, dtype_name(cast.to_dtype)), last[call.thread]
            if cast.earlier and key in recent and not _up(cast):
                activations.append(cast.bytes)
            if key in recent:
                recent.remove(key)
            recent.append(key)
    return activations, weights


# ---The modules of a trace as a tree, with the dtypes of their calls, and the float32 islands among them.


@dataclass
class ModuleNode:
    """A module and its submodules.

    Attributes:
        path: The module's path.
        name: The last part of it.
        group: The sums over its calls and those of its submodules.
        children: Its submodules.
        island: If all its floating results are float32 or wider while other modules' are narrower: the policies that
            applied, or "no policy". Otherwise "". Modules inside an island are not marked.
    """

    path: str
    name: str
    group: CallGroup = field(default_factory=lambda: CallGroup(""))
    children: list[ModuleNode] = field(default_factory=list)
    island: str = ""

    @property
    def dtypes(self) -> dict[str, int]:
        """The number of calls by the dtype of their results."""
        return result_dtypes(self.group.dtypes)


@dataclass
class ModuleTree:
    """The tree.

    Attributes:
        nodes: The outermost modules.
        outside: The calls outside of modules, and in the model itself; None if there are none.
        left_out: The number of modules left out (the deepest ones).
        islands: The number of float32 islands.
    """

    nodes: list[ModuleNode]
    outside: CallGroup | None
    left_out: int
    islands: int


def module_tree(groups: Iterable[CallGroup]) -> ModuleTree:
    """Makes the tree of the modules of a trace.

    Args:
        groups: The calls by module, `TraceReport.by_module()`.

    Example:
        >>> from collections import Counter
        >>> bf16 = CallGroup("0.linear", 2, Counter({"bfloat16 -> bfloat16": 2}))
        >>> fp32 = CallGroup("0.norm", 1, Counter({"bfloat16 -> float32 -> float32": 1}), Counter({"fp32: me": 1}))
        >>> tree = module_tree([bf16, fp32])
        >>> [(node.path, node.group.calls, node.dtypes) for node in tree.nodes]
        [('0', 3, {'float32': 1, 'bfloat16': 2})]
        >>> [(node.name, node.island) for node in tree.nodes[0].children]
        [('linear', ''), ('norm', 'fp32, set by me')]
    """
    groups = list(groups)
    roots, by_path = make_tree([group.key for group in groups], ModuleNode)
    for group in groups:
        for path in prefixes(group.key) if group.key else ():
            by_path[path].group.merge(group)
    if any(is_lower(name) for group in groups for name in result_dtypes(group.dtypes)):
        for node in roots:
            _mark_islands(node)
    outside = next((group for group in groups if not group.key), None)
    islands = sum(bool(node.island) for node in by_path.values())
    return ModuleTree(roots, outside, cut_tree(roots, len(by_path)), islands)


def _mark_islands(node: ModuleNode) -> None:
    floating = [name for name in node.dtypes if name != OTHER]
    if floating and not any(is_lower(name) for name in floating):
        policies = [text.partition(": ") for text in node.group.policies]
        told = "; ".join(dict.fromkeys(f"{policy}, set by {source}" for policy, _, source in policies))
        off = (text for text in node.group.rules if text.startswith(AUTOCAST_OFF))
        node.island = told or "; ".join(off) or "no policy"
        return
    for child in node.children:
        _mark_islands(child)


# ---Histograms of the exponents of results, compared with the ranges of float16 and bfloat16.
#
# They exclude composite ops and views, whose values were computed by other calls, and ops that return uninitialized
# memory.


#: The exponents of the smallest subnormal, the smallest normal and the largest number.
RANGES = {"float16": (-24, -14, 15), "bfloat16": (-133, -126, 127)}
_FINDINGS_MOST = 40
_HEIGHT = 40


@dataclass(frozen=True)
class ExponentRow:
    """The results of an op.

    Attributes:
        op: The op's name with its overload.
        results: The number of measured results.
        bars: The outlines of the bars as a path of SVG, in units of one exponent and of 1/40 of the highest bar.
        amax: The largest magnitude among the finite values, as text.
        below: The share of the values that a cast to float16 would round to 0.
        subnormal: The share of the values that are subnormal numbers in float16.
        above: The share of the values that a cast to float16 would make infinite.
        infinite: The number of results with an inf or a NaN.
    """

    op: str
    results: int
    bars: str
    amax: str
    below: float
    subnormal: float
    above: float
    infinite: int


@dataclass(frozen=True)
class Exponents:
    """The histograms, on one scale.

    Attributes:
        rows: A row for each op, largest share outside of float16's normal numbers first.
        low: The exponent at the left end.
        width: The number of exponents shown.
        left_out: The number of ops left out.
        ranges: Dtypes, with the start and width of their subnormal and of their normal numbers in the picture.
        ticks: The exponents under the picture.
    """

    rows: list[ExponentRow]
    low: int
    width: int
    left_out: int
    ranges: list[tuple[str, float, float, float, float]]
    ticks: list[int]


def exponent_rows(calls: Iterable[Call]) -> Exponents | None:
    """Makes the histograms of the calls that have values.

    Args:
        calls: The calls.

    Returns:
        The histograms; None if no call has values.
    """
    counts: dict[str, Counter[int]] = {}
    measured: dict[str, list[Values]] = {}
    for call in calls:
        if not call.composite and not _is_view(call.op, call.overload) and not _is_uninitialized(call.op):
            counts.setdefault(call.name, Counter()).update(_exponents(call.values))
            measured.setdefault(call.name, []).extend(values for values in call.values if values.count)
    counts = {op: counted for op, counted in counts.items() if counted}
    if not counts:
        return None
    seen = [exponent for counted in counts.values() for exponent in counted]
    low, high = min(-26, min(seen) - 1), max(17, max(seen) + 2)
    rows = [_row(op, counted, measured[op], low) for op, counted in counts.items()]
    rows.sort(key=lambda row: (-row.above, -row.below, -row.subnormal, row.op))
    step = 8 if high - low < 100 else 32
    ticks = [tick for tick in range(-256 * 8, 1025, step) if low <= tick <= high]
    return Exponents(
        rows[:_FINDINGS_MOST], low, high - low, max(0, len(rows) - _FINDINGS_MOST), _ranges(low, high), ticks
    )


@functools.lru_cache(maxsize=4096)
def _is_view(op: str, overload: str) -> bool:
    """Whether an op returns a view of an argument, whose values another call has computed."""
    try:
        returns = torch._C._get_schema(op, overload).returns
    except RuntimeError:
        return False  # an op of a library that is not loaded
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _is_uninitialized(op: str) -> bool:
    """Whether an op returns uninitialized memory: torch.empty, empty_like, new_empty_strided and others."""
    return op.partition("::")[2].lstrip("_").removeprefix("new_").startswith("empty")


def _exponents(found: tuple[Values, ...]) -> Counter[int]:
    counted: Counter[int] = Counter()
    for values in found:
        counted.update(dict(values.exponents))
    return counted


def _row(op: str, counted: Counter[int], measured: list[Values], low: int) -> ExponentRow:
    most, total = max(counted.values()), sum(values.count for values in measured)
    smallest, normal, _ = RANGES["float16"]
    bars = "".join(
        f"M{exponent - low} {_HEIGHT}v-{max(0.6, _HEIGHT * number / most):.3g}h1V{_HEIGHT}"
        for exponent, number in sorted(counted.items())
    )
    return ExponentRow(
        op,
        len(measured),
        bars,
        f"{max(values.amax or 0.0 for values in measured):.3g}",
        sum(values.under_float16 * values.count for values in measured) / total,
        sum(number for exponent, number in counted.items() if smallest <= exponent < normal) / total,
        sum(values.over_float16 * values.count for values in measured) / total,
        sum(bool(values.infs or values.nans) for values in measured),
    )


def _ranges(low: int, high: int) -> list[tuple[str, float, float, float, float]]:
    found: list[tuple[str, float, float, float, float]] = []
    for name, (smallest, normal, largest) in RANGES.items():
        start, middle, end = (min(max(edge, low), high) - low for edge in (smallest, normal, largest + 1))
        found.append((name, start, middle - start, middle, end - middle))
    return found
