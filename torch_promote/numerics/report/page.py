"""The page of a trace. This module passes plain values to the template page.html.j2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_promote.numerics.pages.template import Tile, embed, render_page
from torch_promote.numerics.records.groups import CallGroup, CastGroup
from torch_promote.numerics.report.exponents import exponent_rows
from torch_promote.numerics.report.findings import (
    by_weight,
    count,
    percent,
    repeated_casts,
    result_dtypes,
    size,
    time_in_casts,
    verdict,
)
from torch_promote.numerics.report.savings import savings
from torch_promote.numerics.report.summary import what_was_not_seen
from torch_promote.numerics.report.tree import ModuleTree, module_tree

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["embed_page", "make_page"]

_MOST_OPS, _MOST_CASTS, _MOST_REPEATED = 600, 30, 60


def make_page(report: TraceRecords) -> str:
    """Returns the page of a report.

    Args:
        report: The report.

    Raises:
        MissingPackageError: jinja2 is not installed. It is an ImportError.
    """
    return render_page("report/page.html.j2", "a trace", _content(report))


def embed_page(report: TraceRecords) -> str:
    """Returns the page in a frame, for a notebook; without jinja2, the summary as text.

    Args:
        report: The report.
    """
    return embed("trace", lambda: make_page(report), lambda: str(report))


def _content(report: TraceRecords) -> dict[str, Any]:
    total, ops, casts, repeated = report.total, by_weight(report.by_op()), report.casts(), repeated_casts(report)
    tree = module_tree(report.by_module())
    exponents = exponent_rows(report.calls)
    return {
        "verdict": verdict(report),
        "about": _about(report),
        "numbers": _numbers(report, tree),
        "dtypes": result_dtypes(total.dtypes),
        "calls": total.calls,
        "tree": tree,
        "outside_dtypes": result_dtypes(tree.outside.dtypes) if tree.outside else {},
        "ops": [_op(group) for group in ops[:_MOST_OPS]],
        "more_ops": max(0, len(ops) - _MOST_OPS),
        "repeated": repeated[:_MOST_REPEATED],
        "more_repeated": max(0, len(repeated) - _MOST_REPEATED),
        "repeated_casts": total.repeated,
        "savings": savings(report),
        "casts": [_cast(group) for group in casts[:_MOST_CASTS]],
        "more_casts": max(0, len(casts) - _MOST_CASTS),
        "exponents": exponents,
        "not_seen": what_was_not_seen(report),
    }


def _about(report: TraceRecords) -> list[str]:
    steps = [count(report.steps, "optimizer step")] if report.steps else []
    return [f"torch {report.torch_version}", *steps, *report.device_names]


def _numbers(report: TraceRecords, tree: ModuleTree) -> list[Tile]:
    total = report.total
    phases = ", ".join(f"{calls:,} {phase}" for phase, calls in sorted(total.phases.items(), reverse=True))
    threads = len({call.thread for call in report.calls})
    found = [
        Tile("Calls", f"{total.calls:,}", phases),
        Tile("Casts", f"{total.casts:,}", f"{total.reused:,} more from a cache"),
        Tile("Bytes cast", size(total.bytes)),
        Tile("Repeated casts", f"{total.repeated:,}", f"{size(total.repeated_bytes)} of {size(total.bytes)}"),
    ]
    share = time_in_casts(report)
    if share is not None:
        found.append(Tile("Time in casts", percent(share), "of the calls' time on the host"))
    if tree.islands:
        found.append(Tile("Float32 islands", str(tree.islands), "modules, marked below"))
    if threads > 1:
        found.append(Tile("Threads", str(threads)))
    if total.errors:
        found.append(Tile("Errors", f"{total.errors:,}", "calls that raised"))
    return found


def _op(group: CallGroup) -> dict[str, Any]:
    return {
        "name": group.key,
        "calls": group.calls,
        "dtypes": group.dtypes.most_common(),
        "casts": group.casts,
        "reused": group.reused,
        "bytes": group.bytes,
        "repeated": group.repeated,
        "policies": [(*text.partition(": ")[::2], calls) for text, calls in group.policies.most_common()],
        "errors": group.errors,
        "milliseconds": group.duration / 1e6,
    }


def _cast(group: CastGroup) -> dict[str, Any]:
    return group.to_dict()
