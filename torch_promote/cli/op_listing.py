"""What `torch-promote policies` shows: the op table, a policy, two policies, and what a region does with other ops."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_promote.cli.output import Part, width_of_output
from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.module_tables import KEY_OF_WHOLE, entries_of
from torch_promote.policy.named_policies import left_out, stock_policy
from torch_promote.policy.op_names import find_overloads, is_pattern, matches
from torch_promote.policy.op_table import (
    DEVICE_TYPES,
    CastPolicy,
    Row,
    op_table,
    registered,
    rows_by_name,
    schema_of,
    spell_policy,
)
from torch_promote.policy.overrides import legal_policies, parse_overrides
from torch_promote.policy.policy import Policy, PolicyDiff, spell_value
from torch_promote.reference.ops.infer import rule_table
from torch_promote.regions.defaults import default_policy, registered_policies
from torch_promote.regions.promotion_tables import BOOLEAN, COMMON, FLOATS, promoting_ops

#: With more ops without a row than this, each gets one line.
_IN_FULL = 4
#: The columns of a terminal from which a table has a column for each device type.
_WIDE = 100

#: How ops promote, by what an op computes in, or by the reference's rule for its result.
_PROMOTION: dict[int | str, str] = {
    COMMON: "Promoting: it computes in the common dtype of its operands, and returns it.",
    FLOATS: "Promoting: it computes in the common dtype of its operands, or in the default dtype if that is integral.",
    BOOLEAN: "Promoting: it compares in the common dtype of its operands, and returns bool.",
    "one floating": "Pointwise: it keeps a floating dtype, and returns the default dtype for integers and bool.",
    "unary": "Pointwise: it returns the dtype of its input.",
    "same": "It returns the dtype of its first tensor.",
    "one_dtype": "Its operands need one dtype, which it returns.",
    "binary": "Its operands need one dtype, which it returns.",
}


# Choosing ops


def _find_ops(pattern: str | None) -> tuple[str, ...]:
    """Returns the overloads of all ops, with a row or without, that a name or a pattern selects."""
    with contextlib.suppress(PolicyError):
        return () if pattern is None else find_overloads(pattern)
    return ()


def _matching(names: Iterable[str], pattern: str | None) -> list[str]:
    """Returns the names that a pattern selects, or raises OptionError."""
    names = list(names)
    chosen = [name for name in names if pattern is None or matches(name, pattern)]
    chosen = chosen or [name for name in _find_ops(pattern) if name in names]
    if not chosen and pattern is not None:
        try:
            find_overloads(pattern)
        except PolicyError as error:
            text = f"{error} If a library defines the op, import it: --import MODULE."
            raise OptionError(f"PATTERN {pattern!r}: {text}") from error
    return chosen


def _ops_of(policies: Sequence[Policy], pattern: str | None) -> list[str]:
    """Returns the rows and the other ops of the policies that match; if there are none, other ops that do."""
    rows = [row.name for row in op_table() if not policies or schema_of(row) is not None]
    others = {overload for policy in policies for overload, _, _ in policy.changes}
    others |= {key for policy in policies for key, _ in entries_of(policy.modules) if key != KEY_OF_WHOLE}
    if not any(pattern is None or matches(name, pattern) for name in (*rows, *others)):
        others.update(_find_ops(pattern))
    return _matching([*rows, *sorted(others.difference(rows))], pattern)


# The op table, and a policy


def listed(asked: str | None, devices: Sequence[str], pattern: str | None) -> tuple[dict[str, Any], list[Part]]:
    """Returns the op table, or a policy, as JSON and to be drawn."""
    policies = [] if asked is None else [Policy.of(asked)]
    known = rows_by_name()
    ops = _ops_of(policies, pattern)
    changed = {(op, device): value for policy in policies for op, device, value in policy.changes}
    on_stock = {} if policies else {device: registered(device) for device in devices}
    rows: list[dict[str, Any]] = []
    for op in ops:
        if policies:
            stock = {device: stock_policy(op, device) for device in devices}
            values: dict[str, Any] = {device: changed.get((op, device), stock[device]) for device in devices}
            notes: dict[str, Any] = {"stock": {d: spell_value(stock[d]) for d in devices if (op, d) in changed}}
        elif op in known:
            row = known[op]
            values = {device: row.policy(device) for device in devices}
            found = ((device, _difference(row, device, op in on_stock[device])) for device in devices)
            differing = {device: what for device, what in found if what is not None}
            redispatch = f"aten::{row.op}.{row.redispatch_overload}" if row.redispatch_overload else None
            notes = {"redispatch": redispatch, "running_torch_differs": differing}
        else:
            continue
        if notes.get("stock") or any(value not in (None, CastPolicy.fallthrough) for value in values.values()):
            rows.append({"op": op, **{device: spell_value(value) for device, value in values.items()}, **notes})
    rows.sort(key=lambda row: not row.get("stock"))  # what a policy changes comes first
    modules: dict[str, dict[str, str | None]] = {}
    for name, entries in policies[0].modules if policies else ():
        for op, value in [(KEY_OF_WHOLE, entries)] if isinstance(entries, str) else entries:
            # A whole module's policy is about every op.
            if pattern is None or op == KEY_OF_WHOLE or matches(op, pattern):
                modules.setdefault(name, {})[op] = spell_value(value)
    shown = {row["op"] for row in rows}
    without_policy = [op for op in ops if op not in shown and (policies or op in known)]
    is_known = bool(shown or set(ops) & known.keys() or (modules and is_pattern(str(pattern))))
    others = [] if is_known else _other_ops(pattern, devices, policies[0] if policies else None)
    data: dict[str, Any] = {
        "torch": torch.__version__,
        "devices": devices,
        "rows": rows,
        "counts": {device: dict(Counter(row[device] for row in rows if row[device])) for device in devices},
        "without_policy": without_policy,
        "other_ops": others,
    }
    if policies:
        data |= {"policy": asked, "modules": modules, "left_out": _left_out([str(asked)], devices, pattern)}
    else:
        one_op = set(ops) & known.keys() and pattern is not None and not is_pattern(pattern)
        data["other_overloads"] = [name for name in _find_ops(pattern) if name not in known] if one_op else []
    parts: list[Part] = [
        *_drawn_other_ops(others),
        [
            {"modules": name or "(the model)", "op": _short([op]), "policy": value}
            for name, entries in modules.items()
            for op, value in entries.items()
        ],
        _drawn(rows, devices),
    ]
    parts += _drawn_left_out(data.get("left_out", {}))
    if data.get("other_overloads"):
        parts.append(f"overloads without a row, and so without a policy: {_short(data['other_overloads'])}")
    named = [] if policies or pattern is None or is_pattern(pattern) else [name for name in ops if name in known]
    if named:
        data["override"] = _override(named[0].removeprefix("aten::").partition(".")[0], known[named[0]])
        parts.append(f"to override it: {data['override'] or 'no policy is legal'}")
    if rows or modules:
        differences = sum(bool(row.get("stock") or row.get("running_torch_differs")) for row in rows)
        what = f"{asked}, compared with stock" if policies else f"the op table, compared with torch {torch.__version__}"
        parts.append(f"{what}. ops: {len(rows)}, differences: {differences}.")
    elif not others:
        parts.append(f"Left to PyTorch on {', '.join(devices)} by {asked or 'the table'}: {_short(without_policy)}")
    return data, parts


def _difference(row: Row, device: str, is_registered: bool) -> str | None:
    """Returns how the running PyTorch, which registers the op or does not, differs from the row on one device type."""
    has_policy = row.policy(device) is not CastPolicy.fallthrough
    if has_policy == is_registered:
        return None
    if not has_policy:
        return "registered, left to stock"
    return "not registered" if schema_of(row) is not None else "no such op"


def _short(names: Iterable[str]) -> str:
    return ", ".join("(whole module)" if name == KEY_OF_WHOLE else name.removeprefix("aten::") for name in names)


def _drawn(rows: Sequence[dict[str, Any]], devices: Sequence[str]) -> list[dict[str, Any]]:
    """Returns rows of the JSON: a column for each device type, or on a narrow terminal, a line for each policy."""
    notes = [key for key in ("stock", "running_torch_differs") if any(row.get(key) for row in rows)]
    names = [key.replace("_", " ") for key in notes]
    width = width_of_output()
    drawn: list[dict[str, Any]] = []
    for row in rows:
        op = _short([row["op"]])
        said = [{device: text or "no entry" for device, text in row[key].items()} for key in notes]
        if len(devices) == 1 or width is None or width >= _WIDE:
            texts = dict(zip(names, (_by_device(one, devices) for one in said), strict=True))
            drawn.append({"op": op, **{device: row[device] for device in devices}, **texts})
            continue
        groups: dict[tuple[Any, ...], list[str]] = {}
        for device in devices:
            groups.setdefault((row[device], *(one.get(device, "-") for one in said)), []).append(device)
        for (policy, *noted), group in groups.items():
            first = op if devices[0] in group else ""
            more = dict(zip(names, noted, strict=True))
            drawn.append({"op": first, "devices": ", ".join(group), "policy": policy, **more})
    return drawn


def _by_device(texts: Mapping[str, str], devices: Sequence[str]) -> str:
    if len(texts) == len(devices) and len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{device}: {text}" for device, text in texts.items())


# Differences of two policies


def compared(names: Sequence[str], devices: Sequence[str], pattern: str | None) -> tuple[dict[str, Any], list[Part]]:
    """Returns the differences of two policies, as JSON and to be drawn."""
    first, second = policies = [Policy.of(name) for name in names]
    order = {op: position for position, op in enumerate(_ops_of(policies, pattern))}
    differences = first.diff(second)
    found = [each for each in differences if each.overload in order and each.device in devices]
    found.sort(key=lambda each: (order[each.overload], DEVICE_TYPES.index(each.device)))
    found += [  # of modules
        each
        for each in differences
        if each.device not in DEVICE_TYPES and (each.overload in order or each.overload == KEY_OF_WHOLE)
    ]
    rows = [(each.overload, each.device, [spell_value(each.mine), spell_value(each.theirs)]) for each in found]
    data: dict[str, Any] = {
        "torch": torch.__version__,
        "policies": names,
        "devices": devices,
        "op": pattern,
        "differences": [{"op": op, "device": device, "policies": values} for op, device, values in rows],
        "left_out": _left_out(names, devices, pattern),
    }
    titles, *table = PolicyDiff(found, (names[0], names[1])).table()
    drawn = [dict(zip(titles, (_short([op]), *cells), strict=True)) for op, *cells in table]
    ops = len({op for op, _, _ in rows} - {KEY_OF_WHOLE})
    last = f"{' compared with '.join(names)}. differences: {len(rows)}, ops: {ops}."
    return data, [drawn, *_drawn_left_out(data["left_out"]), last]


def _left_out(names: Iterable[str], devices: Sequence[str], pattern: str | None) -> dict[str, list[dict[str, str]]]:
    """Returns what policies of PyTorch's versions say about ops that the running PyTorch lacks."""
    found = {
        name: [
            {"op": op, "device": device, "policy": spell_policy(value)}
            for op, device, value in left_out(name)
            if device in devices and (pattern is None or matches(op, pattern))
        ]
        for name in names
    }
    return {name: entries for name, entries in found.items() if entries}


def _drawn_left_out(found: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    return [
        f"left out of {name}, because torch {torch.__version__} has no such op: "
        + _short(sorted({entry["op"] for entry in entries}))
        for name, entries in found.items()
    ]


# Ops without a row


def _other_ops(pattern: str | None, devices: Sequence[str], policy: Policy | None) -> list[dict[str, Any]]:
    """Returns what a region does with the ops without a row that a name or pattern selects."""
    ops: dict[str, list[str]] = {}
    for overload in _find_ops(pattern):
        if overload not in rows_by_name():
            ops.setdefault(overload.partition(".")[0], []).append(overload)
    return [
        {
            "op": op,
            "overloads": overloads,
            "region": " ".join(_in_a_region(overloads, devices, policy)),
            "promotion": _promotion(overloads),
            "override": _override(op.removeprefix("aten::")) if _takes_tensors(overloads) else None,
        }
        for op, overloads in ops.items()
    ]


def _takes_tensors(overloads: Sequence[str]) -> bool:
    """Whether an overload takes a tensor, beside those that out= overloads write to."""
    with_results = [name for name in overloads if not name.endswith("out")]
    return any(legal_policies(overload) for overload in with_results or overloads)


def _in_a_region(overloads: Sequence[str], devices: Sequence[str], policy: Policy | None) -> Iterator[str]:
    if not _takes_tensors(overloads):
        yield "It takes no tensor, so autocast never acts on it."
        return
    in_force = policy or default_policy()
    changes = () if in_force is None else in_force.changes
    known = 0
    for device in devices:
        changed = {value for name, each, value in changes if name in overloads and each == device}
        given = {value for (name, each), value in registered_policies().items() if name in overloads and each == device}
        if changed or given:
            source, values = ("The policy", changed) if changed else ("register_policy", given)
            yield f"{source} gives it {' or '.join(sorted(map(spell_policy, values)))} on {device}."
        elif not registered(device).isdisjoint(overloads):
            yield f"PyTorch or a library registers an autocast kernel for it on {device}, which stays in force."
        else:
            continue
        known += 1
    if known < len(devices):
        none = "Elsewhere, it has no policy" if known else "It has no policy"
        has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
        composite = any(has_kernel(name, "CompositeImplicitAutograd") for name in overloads)
        yield (
            f"{none}. PyTorch runs it as other ops, and their policies apply."
            if composite
            else f"{none}: it runs in the dtypes of its inputs."
        )


def _promotion(overloads: Sequence[str]) -> str:
    """Returns how the op promotes, outside of regions and in them."""
    for op in promoting_ops():
        if op.name in overloads and op.matmul:
            return "A matrix product: its operands need one dtype, which it returns."
        if op.name in overloads and op.computes in _PROMOTION:
            alone = op.computes == FLOATS and len(op.participants) == 1
            return _PROMOTION["one floating" if alone else op.computes]
    entry = next((rule_table()[name] for name in overloads if name in rule_table()), None)
    if entry is None:
        return "The reference has no rule for its dtypes."
    kind = "Pointwise" if entry.family == "elementwise" else "It does not promote"
    return _PROMOTION.get(entry.terms[0].rule, f"{kind}; the reference's rule for its result: {entry}.")


def _override(op: str, row: Row | None = None) -> str | None:
    """Returns a call of my_autocast that overrides the op; None if no policy is legal for it."""
    # For a row, the policy is not the one that it has on the CPU or on CUDA; float32 for an op that is banned.
    had = set() if row is None or CastPolicy.banned in (row.cpu, row.cuda) else {row.cpu, row.cuda}
    for policy in ("fp32", "fp16", "match_self", "keep"):
        if CastPolicy(policy) in had:
            continue
        with contextlib.suppress(PolicyError):
            parse_overrides({op: policy})
            short = {"fp16": "lower"}.get(policy, policy) if row is not None else policy
            call = f'my_autocast(overrides={{"{op}": "{short}"}})'
            return call if row is None else f"{call}, or --override {op}={short}"
    return None


def _drawn_other_ops(found: Sequence[dict[str, Any]]) -> list[Part]:
    if len(found) > _IN_FULL:
        return [
            [{"op": _short([op["op"]]), "promotion": op["promotion"]} for op in found],
            f"ops without a row: {len(found)}. To see more of one, name it: torch-promote policies {found[0]['op']}",
        ]
    return [
        {
            **{key: op[key] for key in ("op", "region", "promotion")},
            "override": op["override"] or "none is legal",
            "overloads": _short(op["overloads"]),
        }
        for op in found
    ]
