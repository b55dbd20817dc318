"""A comparison as JSON-compatible values."""

from __future__ import annotations

from typing import Any

from torch_promote.numerics.comparing.comparison_records import ComparisonRecords, GradientError, Metric
from torch_promote.numerics.comparing.site import Site
from torch_promote.observe.pages import from_plain, numbers, to_plain
from torch_promote.policy.policy import Policy

__all__ = ["FORMAT", "VERSION", "comparison_to_dict", "fields_from_dict"]

FORMAT = "torch_promote comparison"
VERSION = 1
_LISTS = {"sites": Site, "metrics": Metric, "gradients": GradientError}
_POLICIES = ("reference", "candidate")


def comparison_to_dict(comparison: ComparisonRecords) -> dict[str, Any]:
    """Returns a comparison as plain data: "format", "version", and its attributes.

    Args:
        comparison: The comparison.
    """
    return {"format": FORMAT, "version": VERSION, **to_plain(comparison)}


def fields_from_dict(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a comparison, by name, from the data of `comparison_to_dict`.

    Args:
        data: The data that `comparison_to_dict` returned.

    Raises:
        KeyError, TypeError, PolicyError: The data is incomplete or was changed.
    """
    fields = {name: value for name, value in data.items() if name not in ("format", "version")}
    fields["noise"] = numbers(data["noise"])
    fields |= {name: Policy.from_dict(data[name]) for name in _POLICIES}
    return fields | {name: [from_plain(kind, one) for one in data[name]] for name, kind in _LISTS.items()}
