"""The page of a trace: one HTML file that needs no network, and shows everything without JavaScript too.

The template is page.html.j2, which gets plain values from here and escapes all of them.
"""

from __future__ import annotations

import functools
import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_promote.errors import MissingPackageError
from torch_promote.numerics.records.groups import CallGroup, CastGroup
from torch_promote.numerics.report.exponents import exponent_rows
from torch_promote.numerics.report.findings import (
    by_weight,
    count,
    percent,
    repeated_casts,
    result_dtypes,
    short_line,
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
_HEIGHT_IN_A_NOTEBOOK = 640


def make_page(report: TraceRecords) -> str:
    """Returns the page of a report.

    Args:
        report: The report.

    Raises:
        MissingPackageError: jinja2 is not installed. It is an ImportError.
    """
    return str(_template().render(**_content(report)))


def embed_page(report: TraceRecords) -> str:
    """Returns the page in a frame, for a notebook: its styles and scripts cannot reach the notebook.

    Args:
        report: The report.

    Returns:
        HTML; without jinja2, the summary as text.
    """
    try:
        page = make_page(report)
    except MissingPackageError:
        return f"<pre>{html.escape(str(report))}</pre>"
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="trace" loading="lazy" '
        f'style="width:100%;height:{_HEIGHT_IN_A_NOTEBOOK}px;border:0"></iframe>'
    )


@functools.cache
def _template() -> Any:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "the page of a trace needs jinja2: pip install torch-promote[trace]. .json, .csv and .trace.json work "
            "without it."
        ) from error
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size, percent=percent, short_line=short_line, dtype_class=_dtype_class)
    environment.globals.update(count=count)
    return environment.get_template("page.html.j2")


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


@dataclass(frozen=True)
class _Number:
    label: str
    value: str
    note: str = ""


def _numbers(report: TraceRecords, tree: ModuleTree) -> list[_Number]:
    total = report.total
    phases = ", ".join(f"{calls:,} {phase}" for phase, calls in sorted(total.phases.items(), reverse=True))
    threads = len({call.thread for call in report.calls})
    found = [
        _Number("Calls", f"{total.calls:,}", phases),
        _Number("Casts", f"{total.casts:,}", f"{total.reused:,} more from a cache"),
        _Number("Bytes cast", size(total.bytes)),
        _Number("Repeated casts", f"{total.repeated:,}", f"{size(total.repeated_bytes)} of {size(total.bytes)}"),
    ]
    share = time_in_casts(report)
    if share is not None:
        found.append(_Number("Time in casts", percent(share), "of the calls' time on the host"))
    if tree.islands:
        found.append(_Number("Float32 islands", str(tree.islands), "modules, marked below"))
    if threads > 1:
        found.append(_Number("Threads", str(threads)))
    if total.errors:
        found.append(_Number("Errors", f"{total.errors:,}", "calls that raised"))
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


def _dtype_class(name: str) -> str:
    """The CSS class of a dtype's colour."""
    known = ("float64", "float32", "bfloat16", "float16", "float8")
    return name if name in known else "complex" if "complex" in name else "other"
