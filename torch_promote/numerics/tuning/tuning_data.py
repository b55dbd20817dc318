"""The result of `tune` as JSON-compatible values."""

from __future__ import annotations

from typing import Any

from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.tuning.tuning_records import Candidate, Certificate, Trial, TuningRecords
from torch_promote.observe.pages import from_plain, number, numbers, to_plain
from torch_promote.policy.policy import Policy

__all__ = ["FORMAT", "VERSION", "fields_from_dict", "tuning_to_dict"]

FORMAT = "torch_promote tuning"
VERSION = 1
_NUMBERS = ("tolerance", "errors", "noise_floor", "gain")


def tuning_to_dict(tuning: TuningRecords) -> dict[str, Any]:
    """Returns a result as plain data: "format", "version", and its attributes.

    Args:
        tuning: The result.
    """
    return {"format": FORMAT, "version": VERSION, **to_plain(tuning)}


def fields_from_dict(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a result, by name, from the data of `tuning_to_dict`.

    Args:
        data: The data that `tuning_to_dict` returned.

    Raises:
        KeyError, TypeError, PolicyError: The data is incomplete or was changed.
    """
    fields = {name: value for name, value in data.items() if name not in ("format", "version")}
    fields |= {name: numbers(data[name]) for name in _NUMBERS}
    fields["found"] = tuple(data["found"])
    fields["policy"] = Policy.from_dict(data["policy"])
    fields["comparison"] = Comparison.from_dict(data["comparison"])
    fields["certificate"] = _certificate(data["certificate"])
    fields["trials"] = [from_plain(Trial, one) for one in data["trials"]]
    fields["candidates"] = [from_plain(Candidate, one) for one in data["candidates"]]
    fields["predicted_against_measured"] = [
        (tuple(names), number(predicted), number(measured))
        for names, predicted, measured in data["predicted_against_measured"]
    ]
    return fields


def _certificate(data: dict[str, Any]) -> Certificate:
    return from_plain(Certificate, data)
