"""Sentences for the summary and the page of a comparison: the verdict, and the compared policies."""

from __future__ import annotations

import math

from torch_promote.numerics.comparing.comparison_records import ComparisonRecords, Metric
from torch_promote.numerics.comparing.site import Site
from torch_promote.observe.findings import count
from torch_promote.observe.pages import spell_number, spell_op, spell_policy_name

__all__ = ["about_comparison", "comparison_verdict", "spell_site", "spell_value"]


def comparison_verdict(comparison: ComparisonRecords) -> str:
    """Returns the result of the comparison in one or two sentences.

    Args:
        comparison: The comparison.
    """
    worst = max(comparison.metrics, key=_rank, default=None)
    sites = comparison.sites
    if worst is None or not (worst.error or any(site.local or site.nonfinite for site in sites)):
        return "No op has an error, and the results are identical: no op runs in lower precision."
    if _rank(worst) == math.inf:
        return f"{_spell_nonfinite(worst)} {_overflow(sites)}"
    if not worst.error:
        text = f"{_subject(worst)} is bit-identical"
    else:
        text = f"{_subject(worst)} is off by {_spell_share(worst.error)}"
        if worst.reference is not None:
            text += f" ({spell_value(worst.candidate)}, reference {spell_value(worst.reference)})"
    if overflowing := [site for site in sites if site.nonfinite]:
        return f"{text}, and {_overflow(overflowing)}"
    if not sites or not (sites[0].impact or sites[0].local):
        return f"{text}; no single op has a local error."
    if sites[0].impact is not None:
        return f"{text}; {spell_site(sites[0])} has the largest impact, {spell_number(sites[0].impact)}."
    return f"{text}; {spell_site(sites[0])} has the largest local error, {spell_number(sites[0].local)}."


def _rank(metric: Metric) -> float:
    candidate = metric.candidate
    wrong = math.isnan(metric.error) or (candidate is not None and not math.isfinite(candidate))
    reference_too = metric.reference is not None and not math.isfinite(metric.reference)
    return math.inf if wrong and not reference_too else metric.error


def _subject(metric: Metric) -> str:
    return f"The {metric.name}" if metric.name in ("loss", "output") else metric.name


def _spell_nonfinite(metric: Metric) -> str:
    name = _subject(metric)
    if metric.candidate is None or metric.reference is None:
        return f"{name} has non-finite values, the reference's has none."
    return f"{name} is {spell_value(metric.candidate)}; the reference's is {spell_value(metric.reference)}."


def _overflow(sites: list[Site]) -> str:
    overflowing = [site for site in sites if site.nonfinite]
    if not overflowing:
        return "No single op turns finite inputs into inf or NaN."
    first = overflowing[0]
    more = len(overflowing) - 1
    others = f"; {count(more, 'other site')} {'does' if more == 1 else 'do'} so, too" if more else ""
    return f"{spell_site(first)} makes {count(first.nonfinite, 'element')} infinite or NaN{others}."


def _spell_share(error: float) -> str:
    """Spells an error as a share of the reference ("0.12 %"), or as a number if it is very small or large."""
    return f"{100 * error:.2g} %" if 5e-4 <= error < 1 else f"{spell_number(error)} of the reference"


def spell_site(site: Site) -> str:
    """Returns a site in words: "softmax.int in blocks.0.attn"."""
    return f"{spell_op(site.name)} in {site.module}" if site.module else f"{spell_op(site.name)} in the model itself"


def spell_value(value: float | None) -> str:
    """Returns the value of a metric.

    Example:
        >>> spell_value(2.34567891), spell_value(float("nan")), spell_value(None)
        ('2.345679', 'nan', '')
    """
    return "" if value is None else f"{value:.7g}"


def about_comparison(comparison: ComparisonRecords) -> list[str]:
    """Returns the compared policies and the effort: "candidate stock", "3 runs".

    Args:
        comparison: The comparison.
    """
    return [
        *([f"torch {comparison.torch_version}"] if comparison.torch_version else []),
        f"{spell_policy_name(comparison.candidate)} against {spell_policy_name(comparison.reference)}",
        count(comparison.runs, "run"),
        count(comparison.backwards, "backward"),
    ]
