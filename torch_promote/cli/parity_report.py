"""The text output of `torch-promote parity`: the mismatches, how to reproduce each, and the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_promote.cli.terminal import ShellCommand, Table
from torch_promote.parity.model import Entry, SampleMismatch
from torch_promote.parity.report import ParityReport

__all__ = ["draw", "draw_entries"]

#: The number of mismatches that are printed in full.
_SHOWN = 50


def draw(report: ParityReport) -> list[Any]:
    """Returns the drawings for a report, from the details to the verdict."""
    default = report.about.get("default_policy")
    notes = [f"note: ours ran under the default policy, {default}. Stock did not."] if default else []
    details = [*_mismatches(report.mismatches), *_lists(report)]
    return [*details, _title(report), *notes, "", _table(report), "", _verdict(report)]


def draw_entries(entries: Sequence[Entry]) -> list[Any]:
    """Returns the drawings for entries: a line for each, and their number."""
    listing = Table("entry", "source")
    for entry in entries:
        listing.add_row(entry.name, entry.source)
    sources = Counter(entry.source for entry in entries)
    return [listing, "", f"entries: {len(entries)} ({_counts(sources)})"]


def _mismatches(mismatches: Sequence[SampleMismatch]) -> Iterator[str | ShellCommand]:
    for mismatch in mismatches[:_SHOWN]:
        sample = f", sample {mismatch.sample}" if mismatch.sample else ""
        yield f"{mismatch.entry}{sample}: {mismatch.kind}, {mismatch.what}"
        yield from (f"    {line}" for line in mismatch.text.splitlines())
        yield ShellCommand("    reproduce with: ", mismatch.reproduce)
        yield ""
    if len(mismatches) > _SHOWN:
        rest = Counter(mismatch.entry for mismatch in mismatches[_SHOWN:])
        yield f"{rest.total()} more mismatches (use --json to see them): {_counts(rest)}"
        yield ""


def _lists(report: ParityReport) -> Iterator[str]:
    """The lists by name or reason, if they are not empty."""
    no_rule = report.counted("no_rule")
    not_generated = [
        f"{result.entry.name}, {dtype}: {why}"
        for result in report.ordered
        for dtype, why in result.not_generated.items()
    ]
    for title, lines in (
        ("stale known gaps, to be removed from the list", report.stale),
        ("known gaps", [f"{count} times: {reason}" for reason, count in report.counted("gaps").most_common()]),
        (
            "compared without bits",
            [f"{count} samples: {reason}" for reason, count in report.counted("nondeterministic").most_common()],
        ),
        ("samples that PyTorch cannot make", not_generated),
        ("ops without a rule, with the number of calls", [_counts(no_rule)] if no_rule else []),
        ("rows not reached", [", ".join(report.rows_not_reached)] if report.whole else []),
    ):
        if any(lines):
            yield f"{title}:"
            yield from (f"    {line}" for line in lines)
            yield ""


def _title(report: ParityReport) -> str:
    options, of = report.options, report.about
    words = [options.device, "quick"] if options.quick else [options.device]
    words += ["stock only"] * options.stock_only
    words += [f"torch {of['torch']}", f"torch_promote {of['torch_promote']}", f"python {of['python']}", of["device"]]
    return f"parity: {', '.join(words)}"


def _table(report: ParityReport) -> Any:
    totals, options = report.totals, report.options
    listing = Table("name", "figure", "remark", prose=["figure", "remark"], show_header=False)
    entries = f"{totals['entries']:,}"
    if totals["entries"] != totals["entries_chosen"]:
        entries += f" of {totals['entries_chosen']:,} (shard {', '.join(report.shards)})"
    calls = f"{totals['calls_checked']:,} of {totals['calls_checked'] + totals['calls_without_rule']:,}"
    for name, figure, remark in (
        (
            "rows checked",
            f"{totals['rows']} of {totals['rows_with_policy']}",
            f"with a policy on {options.device_type}",
        ),
        ("entries", entries, ""),
        ("samples", f"{totals['samples']:,}", f"autocast dtype {str(options.lower).removeprefix('torch.')}"),
        (
            "refused",
            f"{totals['refused']:,}",
            "samples that raise" + " the same error under both" * (not options.stock_only),
        ),
        ("stock raised", f"{totals['stock_raised']:,}", "where ours returns a result on purpose"),
        ("without bits", f"{totals['nondeterministic']:,}", "samples of nondeterministic ops"),
        ("calls checked", calls, "compared with the reference"),
        ("ops without a rule", f"{totals['ops_without_rule']:,}", f"of {_ops(totals):,} overloads that ran"),
        ("mismatches", f"{totals['mismatches']:,}", ""),
        ("known gaps", f"{totals['gaps']:,}", "differences with a reason"),
        ("stale gaps", f"{totals['stale_gaps']:,}", ""),
        ("seconds", f"{totals['seconds']:,.1f}", f"sum of {len(report.shards)} shards" * (len(report.shards) > 1)),
    ):
        listing.add_row(name, figure, remark)
    return listing


def _ops(totals: Mapping[str, float]) -> float:
    return totals["ops_checked"] + totals["ops_without_rule"]


def _verdict(report: ParityReport) -> str:
    if report.interrupted:
        return f"Interrupted after {len(report.results)} of {report.entries} entries."
    if report.status == 0:
        return "No mismatch, and no stale known gap."
    if report.status == 1:
        return f"Mismatches: {len(report.mismatches)}. Stale gaps: {len(report.stale)}."
    return "Nothing was checked."


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
