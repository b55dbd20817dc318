"""Parity reports of entries that the stand-in runner ran."""

from __future__ import annotations

from helpers.stand_in_runner import entries, run_entry
from torch_promote.parity.model import Options
from torch_promote.parity.report import ParityReport, about

NAMES = ("good", "good.again", "mismatching", "stale", "refused", "gap", "unruled")


def report(*names: str, device: str = "cpu", shard: str = "1/1") -> ParityReport:
    """Returns a report of entries that the stand-in ran in this process."""
    options = Options(device, ops=names)
    index, count = map(int, shard.split("/"))
    chosen = entries(options)
    results = {place: run_entry(chosen[place], options) for place in range(index - 1, len(chosen), count)}
    return ParityReport(about(device), options, len(chosen), results, (shard,), seconds=2.5)
