"""The page of a comparison. This module passes plain values to the template comparison.html.j2."""

from __future__ import annotations

from typing import Any

from torch_promote.numerics.comparing.comparison_findings import about_comparison, comparison_verdict, spell_value
from torch_promote.numerics.comparing.comparison_records import ComparisonRecords
from torch_promote.numerics.comparing.heat import heat_tree
from torch_promote.observe.pages import cut_list, embed, render_page

__all__ = ["embed_comparison", "make_comparison_page"]

_MOST_SITES, _MOST_GRADIENTS = 1_000, 200


def make_comparison_page(comparison: ComparisonRecords) -> str:
    """Returns the page of a comparison.

    Args:
        comparison: The comparison.

    Raises:
        MissingPackageError: jinja2 is not installed. It is an ImportError.
    """
    return render_page("comparing/comparison.html.j2", "a comparison", _content(comparison))


def embed_comparison(comparison: ComparisonRecords, text: str) -> str:
    """Returns the page in a frame, for a notebook; without jinja2, the text.

    Args:
        comparison: The comparison.
        text: The comparison as text.
    """
    return embed("comparison", lambda: make_comparison_page(comparison), lambda: text)


def _content(comparison: ComparisonRecords) -> dict[str, Any]:
    sites, gradients = comparison.sites, comparison.gradients
    return {
        "about": about_comparison(comparison),
        "verdict": comparison_verdict(comparison),
        "metrics": [
            (one.name, spell_value(one.reference), spell_value(one.candidate), one.error) for one in comparison.metrics
        ],
        "tree": heat_tree(sites, comparison.modules),
        "marked": {},
        "sites": sites[:_MOST_SITES],
        "more_sites": max(0, len(sites) - _MOST_SITES),
        "random_cotangents": comparison.random_cotangents,
        "gradients": gradients[:_MOST_GRADIENTS],
        "more_gradients": max(0, len(gradients) - _MOST_GRADIENTS),
        "lists": [
            ("Calls made in only one of the runs", cut_list(comparison.not_aligned)),
            ("Not compared", cut_list(comparison.not_seen)),
            ("Notes", cut_list(comparison.notes)),
        ],
    }
