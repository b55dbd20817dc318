"""The report of a parity run: totals, exit status, text, JSON, and the merge of shards."""

from __future__ import annotations

import fnmatch
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

import torch_promote
from torch_promote.checking.known_gaps import Nondeterministic, SampleGap, known_gaps
from torch_promote.errors import OptionError
from torch_promote.parity.model import EntryResult, Options, SampleMismatch, row_name
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, op_table, registered
from torch_promote.reference.dtypes import dtype_name
from torch_promote.regions.defaults import spell_default_policy
from torch_promote.report.base import Column, Content, Fact, Listing, Part, Report, Table
from torch_promote.report.codec import decode, decode_fields, decode_record, encode, place_of

_OK, _FOUND, _NOTHING_CHECKED, _INTERRUPTED = 0, 1, 2, 130
#: The version of the JSON's format. It changes when readers of the JSON have to.
_FORMAT = 1
#: How many mismatches the text shows.
_SHOWN = 50


@dataclass(frozen=True, repr=False)
class ParityReport(Report):
    """The report of a run."""

    NOUN: ClassVar[str] = "parity report"

    about: Mapping[str, str]  # the versions, the name of the device, and the default policy, if it is not PyTorch's
    options: Options
    entries: int  # how many the options select, in all shards
    results: Mapping[int, EntryResult]  # by the position of the entry among these
    shards: tuple[str, ...] = ("1/1",)  # those in this report
    seconds: float = 0.0  # for several shards, the sum
    interrupted: bool = False

    def __post_init__(self) -> None:
        """Sorts the results by their positions."""
        object.__setattr__(self, "results", dict(sorted(self.results.items())))

    @property
    def mismatches(self) -> list[SampleMismatch]:
        """All mismatches, in the order of the entries."""
        return [mismatch for result in self.results.values() for mismatch in result.mismatches]

    @property
    def whole(self) -> bool:
        """Whether all entries ran."""
        chosen = self.options.ops or self.options.dtypes
        return bool(self.results) and len(self.results) == self.entries and not chosen

    @property
    def stale(self) -> list[str]:
        """The known gaps that explain nothing: those of entries; of a whole run, those that belong to none as well."""
        of_entries = [gap for result in self.results.values() for gap in result.stale]
        if not (self.whole and self.options.full):
            return of_entries
        names = [result.entry.name for result in self.results.values()]
        seen = list(map(row_name, self.counted("checked")))
        gaps, explained = known_gaps(), self.counted("gaps")
        listed: list[SampleGap | Nondeterministic] = [*gaps.samples, *gaps.nondeterministic]
        return [
            *of_entries,
            *(
                f"{gap.entry}: a known gap names this entry, which does not exist ({gap.reason})"
                for gap in listed
                if not fnmatch.filter(names, gap.entry)
            ),
            *(
                f"{gap.op} on {self.options.device}: the known gap ({gap.kind}: {gap.reason}) explains nothing"
                for gap in gaps.calls
                if self.options.fake or not gap.fake
                if gap.reason not in explained and any(fnmatch.filter(seen, op) for op in gap.ops)
            ),
        ]

    @property
    def rows(self) -> list[str]:
        """The rows whose policy applied to a call, in the order of the table."""
        seen = {row for result in self.results.values() for row in result.rows}
        return [row for row in _rows_with_a_policy(self.options.device_type) if row in seen]

    @property
    def rows_not_reached(self) -> list[str]:
        """The rows with a policy on the device whose policy applied to no call."""
        seen = set(self.rows)
        return [row for row in _rows_with_a_policy(self.options.device_type) if row not in seen]

    def counted(self, name: str) -> Counter[str]:
        """Adds up one of the results' mappings: "gaps", "nondeterministic", "checked" or "no_rule"."""
        total: Counter[str] = Counter()
        for result in self.results.values():
            total.update(getattr(result, name))
        return total

    @property
    def totals(self) -> dict[str, float]:
        """The figures of the summary table."""
        results = self.results.values()
        return {
            "rows": len(self.rows),
            "rows_with_policy": len(_rows_with_a_policy(self.options.device_type)),
            "entries": len(results),
            "entries_chosen": self.entries,
            "samples": sum(result.samples for result in results),
            "refused": sum(result.refused for result in results),
            "stock_raised": sum(result.stock_raised for result in results),
            "not_generated": sum(len(result.not_generated) for result in results),
            "nondeterministic": self.counted("nondeterministic").total(),
            "calls_checked": self.counted("checked").total(),
            "calls_without_rule": self.counted("no_rule").total(),
            "ops_checked": len(self.counted("checked")),
            "ops_without_rule": len(self.counted("no_rule")),
            "mismatches": len(self.mismatches),
            "gaps": self.counted("gaps").total(),
            "stale_gaps": len(self.stale),
            "seconds": round(self.seconds, 3),
        }

    @property
    def status(self) -> int:
        """The exit status: 0 no mismatch, 1 a mismatch or a stale gap, 2 nothing was checked, 130 interrupted."""
        if self.interrupted:
            return _INTERRUPTED
        if self.mismatches or self.stale:
            return _FOUND
        if not self.counted("checked") or not any(result.samples > result.refused for result in self.results.values()):
            return _NOTHING_CHECKED
        return _FOUND if self.rows_not_reached and self.whole and self.options.full else _OK

    def content(self) -> Content:
        """Returns all that the report says to people: totals, mismatches, known gaps, and what was not compared."""
        options, t = self.options, self.totals
        versions = [f"{name} {self.about[name]}" for name in ("torch", "torch_promote", "python") if name in self.about]
        words = [options.device, *["quick"] * options.quick, *["stock only"] * options.stock_only, *versions]
        calls, ops = t["calls_checked"] + t["calls_without_rule"], t["ops_checked"] + t["ops_without_rule"]
        refused = "samples that raise" if options.stock_only else "samples that raise the same error under both"
        part = t["entries"] != t["entries_chosen"]
        facts: list[Fact] = [
            ("device", self.about.get("device", options.device)),
            ("rows checked", f"{t['rows']}", f"of {t['rows_with_policy']} with a policy on {options.device_type}"),
            ("entries", f"{t['entries']:,}", f"of {t['entries_chosen']:,}, shard {', '.join(self.shards)}" * part),
            ("samples", f"{t['samples']:,}", f"autocast dtype {dtype_name(options.lower)}"),
            ("refused", f"{t['refused']:,}", refused),
            ("stock raised", f"{t['stock_raised']:,}", "where ours returns a result on purpose"),
            ("without bits", f"{t['nondeterministic']:,}", "samples of nondeterministic ops"),
            ("calls checked", f"{t['calls_checked']:,}", f"of {calls:,}, compared with the reference"),
            ("ops without a rule", f"{t['ops_without_rule']:,}", f"of {ops:,} overloads that ran"),
            ("mismatches", f"{t['mismatches']:,}"),
            ("known gaps", f"{t['gaps']:,}", "differences with a reason"),
            ("stale gaps", f"{t['stale_gaps']:,}"),
            ("seconds", f"{t['seconds']:,.1f}", "sum of all shards" * (len(self.shards) > 1)),
        ]
        if self.about.get("default_policy"):
            facts.append(("default policy", self.about["default_policy"], "in force for ours, not for stock"))
        found = [(m.entry, m.sample, m.kind, m.what, m.text, m.reproduce) for m in self.mismatches]
        columns = ("entry", "sample", "kind", "what", Column("text", "code"), Column("reproduce with", "code"))
        not_generated = [
            f"{result.entry.name}, {dtype}: {why}"
            for result in self.results.values()
            for dtype, why in result.not_generated.items()
        ]
        parts: list[Part] = [
            Listing("Mismatches", list(map(str, self.mismatches)), _SHOWN, "terminal", wrap=False),
            Table("Mismatches", columns, found, where="page"),
            Listing("Stale known gaps, to be removed from the list", self.stale, _SHOWN),
            Table("Known gaps", ("reason", "differences"), self.counted("gaps").most_common()),
            Table("Compared without bits", ("reason", "samples"), self.counted("nondeterministic").most_common()),
            Listing("Samples that PyTorch cannot make", not_generated, _SHOWN),
            Table("Ops without a rule", ("op", "calls"), sorted(self.counted("no_rule").items()), _SHOWN),
            Listing("Rows not reached", self.rows_not_reached if self.whole else [], _SHOWN),
        ]
        verdicts = {
            _OK: "No mismatch, and no stale known gap.",
            _FOUND: f"Mismatches: {t['mismatches']}. Stale gaps: {t['stale_gaps']}.",
            _NOTHING_CHECKED: "Nothing was checked.",
            _INTERRUPTED: f"Interrupted after {len(self.results)} of {self.entries} entries.",
        }
        return Content(f"parity: {', '.join(words)}", verdicts[self.status], facts, parts, good=self.status == _OK)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, for JSON."""
        entries = []
        for position, result in self.results.items():
            data = encode(result)
            for name in ("checked", "no_rule"):
                data[name] = dict(sorted(data[name].items()))
            named = {"position": position, **data.pop("entry")}
            entries.append({**named, **data, "mismatches": len(data["mismatches"])})
        return {
            "format": _FORMAT,
            **self.about,
            "options": encode(self.options),
            "shards": list(self.shards),
            "interrupted": self.interrupted,
            "status": self.status,
            "totals": self.totals,
            "rows_not_reached": self.rows_not_reached,
            "mismatches": encode(self.mismatches),
            "entries": entries,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the report whose `to_dict` returned the data."""
        mismatches: dict[str, list[Any]] = {}
        for mismatch in data["mismatches"]:
            mismatches.setdefault(mismatch["entry"], []).append(mismatch)
        results = {
            decode(int, entry["position"]): decode_fields(
                EntryResult, {**entry, "entry": entry, "mismatches": mismatches.get(entry["name"], [])}
            )
            for entry in data["entries"]
        }
        totals = decode_record({"entries_chosen": int, "seconds": float}, data["totals"])
        return cls(
            about=decode_record(dict.fromkeys(about(""), str), data),
            options=decode_fields(Options, data["options"]),
            entries=totals["entries_chosen"],
            results=results,
            shards=decode(tuple[str, ...], data["shards"]),
            seconds=totals["seconds"],
            interrupted=decode(bool, data["interrupted"]),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a report that `torch-promote parity --json`, or `save`, wrote. Raises OptionError if it cannot."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] == _FORMAT:
                return cls.from_dict(data)
        except OSError as error:
            raise OptionError(f"cannot read {path}: {error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            at = f" at {place_of(error)}" if place_of(error) else ""
            raise OptionError(f"{path} was not written by `torch-promote parity --json` ({error!r}{at}).") from error
        raise OptionError(f"{path} has format {data['format']}; this version reads format {_FORMAT}.")


def about(device: str) -> dict[str, str]:
    """Returns the versions of a run, the name of its device (one of `DEVICES`), and the default policy."""
    names = {"cpu": platform.machine, "cuda": torch.cuda.get_device_name}
    return {
        "torch": torch.__version__,
        "torch_promote": torch_promote.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": names[device]() if device in names else device,
        "default_policy": spell_default_policy(),
    }


def merged(reports: Sequence[ParityReport]) -> ParityReport:
    """Merges the reports of all shards of a run, or raises OptionError if one is missing or interrupted."""
    first = reports[0]
    shards = tuple(shard for report in reports for shard in report.shards)
    results: dict[int, EntryResult] = {}
    for report in reports:
        named = f"shard {', '.join(report.shards)}"
        for what, theirs in _identity(first).items():
            if (mine := _identity(report)[what]) != theirs:
                raise OptionError(
                    f"these are not shards of one run: {named} has {what} {mine}, the first report has {theirs}."
                )
        if report.interrupted:
            raise OptionError(f"{named} was interrupted. Run it again.")
        if twice := results.keys() & report.results.keys():
            raise OptionError(f"{len(twice)} entries occur twice in the shards {', '.join(shards)}.")
        results.update(report.results)
    if len(results) != first.entries:
        lacking = first.entries - len(results)
        raise OptionError(f"{lacking} of {first.entries} entries are missing in the shards {', '.join(shards)}.")
    seconds = sum(report.seconds for report in reports)
    return replace(first, results=results, shards=shards, seconds=seconds)


def _identity(report: ParityReport) -> dict[str, object]:
    """Returns what all shards of a run have in common."""
    about = {name.replace("_policy", " policy"): text for name, text in report.about.items() if name != "platform"}
    return {"options": report.options, **about, "number of entries": report.entries}


def _rows_with_a_policy(device_type: str) -> list[str]:
    if device_type not in DEVICE_TYPES:
        return []
    names = registered(device_type)
    with_policy = (row.name for row in op_table() if row.policy(device_type) is not CastPolicy.fallthrough)
    return [name for name in with_policy if name in names]
