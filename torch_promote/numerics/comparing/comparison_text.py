"""A comparison as text for the terminal: the verdict, the metrics, and the ten most important sites."""

from __future__ import annotations

from collections.abc import Iterator

from torch_promote.numerics.comparing.comparison_findings import about_comparison, comparison_verdict, spell_value
from torch_promote.numerics.comparing.comparison_records import ComparisonRecords
from torch_promote.observe.findings import count, short_dtype
from torch_promote.observe.pages import STR, Layout, fitted_table, list_of, report_text, spell_number, spell_op

__all__ = ["comparison_text"]

_ROWS = 10


def comparison_text(comparison: ComparisonRecords, layout: Layout = STR) -> str:
    """Returns the summary as plain text.

    Args:
        comparison: The comparison.
        layout: The layout.
    """
    title = f"comparison: {', '.join(about_comparison(comparison))}"
    return report_text(title, comparison_verdict(comparison), _parts(comparison, layout), layout)


def _parts(comparison: ComparisonRecords, layout: Layout) -> Iterator[list[str]]:
    metrics, sites, gradients = comparison.metrics, comparison.sites, comparison.gradients
    yield fitted_table(
        ("metric", "reference", "candidate", "error"),
        [(m.name, spell_value(m.reference), spell_value(m.candidate), spell_number(m.error)) for m in metrics],
        most=_ROWS,
        noun="metric",
        layout=layout,
    )
    yield fitted_table(
        ("op", "module", "calls", "dtypes", "local", "accumulated", "impact"),
        [
            (
                spell_op(site.name),
                site.module or "-",
                f"{site.calls:,}",
                ", ".join(map(short_dtype, site.dtypes.split(", "))),
                spell_number(site.local),
                spell_number(site.accumulated),
                spell_number(site.impact),
            )
            for site in sites
        ],
        most=_ROWS,
        noun="site",
        layout=layout,
    )
    yield fitted_table(
        ("gradient", "error", "norm"),
        [(one.name, spell_number(one.error), spell_number(one.norm)) for one in gradients],
        most=_ROWS // 2,
        noun="gradient",
        layout=layout,
    )
    overflowing = [site for site in sites[_ROWS:] if site.nonfinite]
    if overflowing:
        make = "makes" if len(overflowing) == 1 else "make"
        yield [f"{count(len(overflowing), 'site')} of those left out {make} an inf or NaN of finite inputs."]
    yield list_of("Calls that only one of the runs made:", comparison.not_aligned, layout)
    yield list_of("Not compared:", comparison.not_seen, layout)
    yield list_of("Notes:", comparison.notes, layout)
