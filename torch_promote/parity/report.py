"""The report of a parity run: totals, exit status, JSON, and the merge of shards."""

from __future__ import annotations

import fnmatch
import json
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from xml.etree import ElementTree

import torch

import torch_promote
from torch_promote.checking.known_gaps import known_gaps
from torch_promote.errors import OptionError
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, op_table, registered
from torch_promote.regions.defaults import spell_default_policy

__all__ = ["Report", "about", "junit", "merged"]


_OK, _FOUND, _NOTHING_CHECKED, _INTERRUPTED = 0, 1, 2, 130
#: The version of the JSON's format. It changes when readers of the JSON have to.
_FORMAT = 1
#: What the JSON of older releases does not have.
_NEW = ("default_policy",)


@dataclass(frozen=True)
class Report:
    """The report of a run.

    Attributes:
        about: The versions, the name of the device, and the default policy, if it is not PyTorch's.
        options: The options of the run.
        entries: The number of entries that the options select, in all shards.
        results: The results by the position of the entry among these.
        shards: The shards in this report, such as "1/3".
        seconds: The duration; for several shards, the sum.
        interrupted: Whether the run was interrupted.
    """

    about: Mapping[str, str]
    options: Options
    entries: int
    results: Mapping[int, EntryResult]
    shards: tuple[str, ...] = ("1/1",)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def ordered(self) -> list[EntryResult]:
        """The results in the order of the entries."""
        return [self.results[position] for position in sorted(self.results)]

    @property
    def mismatches(self) -> list[SampleMismatch]:
        """All mismatches, in the order of the entries."""
        return [mismatch for result in self.ordered for mismatch in result.mismatches]

    @property
    def whole(self) -> bool:
        """Whether all entries ran."""
        chosen = self.options.ops or self.options.dtypes
        return bool(self.results) and len(self.results) == self.entries and not chosen

    @property
    def stale(self) -> list[str]:
        """The known gaps that explain nothing: those of entries, then those of single calls."""
        return [*(gap for result in self.ordered for gap in result.stale), *self.stale_listed]

    @property
    def stale_listed(self) -> list[str]:
        """The stale gaps that belong to no entry: of entries that do not exist, and of single calls."""
        return [*self.stale_entries, *self.stale_calls]

    @property
    def stale_entries(self) -> list[str]:
        """The known gaps of entries that do not exist."""
        if not (self.whole and self.options.full):
            return []
        names = [result.entry.name for result in self.ordered]
        listed = [(gap.entry, gap.reason) for gap in known_gaps().samples]
        listed += [(gap.entry, gap.reason) for gap in known_gaps().nondeterministic]
        return [
            f"{entry}: a known gap names this entry, which does not exist ({reason})"
            for entry, reason in listed
            if not fnmatch.filter(names, entry)
        ]

    @property
    def stale_calls(self) -> list[str]:
        """The known gaps of single calls that explain nothing in a whole run with all samples."""
        if not (self.whole and self.options.full):
            return []
        seen = [op.replace(".", "::", 1).removesuffix(".default") for op in self.counted("checked")]
        explained = self.counted("gaps")
        return [
            f"{gap.op} on {self.options.device}: the known gap ({gap.kind}: {gap.reason}) explains nothing"
            for gap in known_gaps().calls
            if (self.options.fake or not gap.fake)
            and any(fnmatch.filter(seen, op) for op in gap.ops)
            and gap.reason not in explained
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
        """The figures of the summary table.

        Example:
            >>> Report({}, Options(), 0, {}).totals["mismatches"]
            0
        """
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
        """The exit status: 0 no mismatch, 1 a mismatch or a stale gap, 2 nothing was checked, 130 interrupted.

        Example:
            >>> Report({}, Options(), 0, {}).status
            2
        """
        if self.interrupted:
            return _INTERRUPTED
        if self.mismatches or self.stale:
            return _FOUND
        if not self.counted("checked") or not any(result.samples > result.refused for result in self.results.values()):
            return _NOTHING_CHECKED
        return _FOUND if self.unreached else _OK

    @property
    def unreached(self) -> list[str]:
        """The rows that a whole run with all samples did not reach."""
        return self.rows_not_reached if self.whole and self.options.full else []

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, for JSON."""
        return {
            "format": _FORMAT,
            **self.about,
            "options": asdict(self.options),
            "shards": list(self.shards),
            "interrupted": self.interrupted,
            "status": self.status,
            "totals": self.totals,
            "rows_not_reached": self.rows_not_reached,
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            "entries": [_entry_data(position, self.results[position]) for position in sorted(self.results)],
        }

    @classmethod
    def from_json(cls, text: str, where: str) -> Report:
        """Reads a report from the JSON of `to_dict`.

        Args:
            text: The JSON.
            where: The name of its source, for errors.

        Raises:
            OptionError: The text is not such a report.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise OptionError(f"{where} has format {data['format']}; this version reads format {_FORMAT}.")
            return cls(
                about={name: data.get(name, "") if name in _NEW else data[name] for name in about("")},
                options=Options(**{name: _tuple(value) for name, value in data["options"].items()}),
                entries=data["totals"]["entries_chosen"],
                results=_results(data),
                shards=tuple(data["shards"]),
                seconds=data["totals"]["seconds"],
                interrupted=data["interrupted"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"{where} was not written by `torch-promote parity --json` ({error!r}).") from error


def about(device: str) -> dict[str, str]:
    """Returns the versions of a run, the name of its device, and the default policy.

    Args:
        device: One of `DEVICES`.

    Example:
        >>> sorted(about("cpu"))
        ['default_policy', 'device', 'platform', 'python', 'torch', 'torch_promote']
    """
    names = {"cpu": platform.machine, "cuda": torch.cuda.get_device_name}
    return {
        "torch": torch.__version__,
        "torch_promote": torch_promote.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": names[device]() if device in names else device,
        "default_policy": spell_default_policy(),
    }


def merged(reports: Sequence[Report]) -> Report:
    """Merges the reports of all shards of a run.

    Args:
        reports: The reports, at least one.

    Raises:
        OptionError: The reports are not all the shards of one run, or one was interrupted.
    """
    first = reports[0]
    shards = tuple(shard for report in reports for shard in report.shards)
    results: dict[int, EntryResult] = {}
    for report in reports:
        named = f"shard {', '.join(report.shards)}"
        for what, mine, theirs in (
            ("options", report.options, first.options),
            ("torch", report.about["torch"], first.about["torch"]),
            ("torch_promote", report.about["torch_promote"], first.about["torch_promote"]),
            ("python", report.about["python"], first.about["python"]),
            ("device", report.about["device"], first.about["device"]),
            ("default policy", report.about["default_policy"] or "none", first.about["default_policy"] or "none"),
            ("number of entries", report.entries, first.entries),
        ):
            if mine != theirs:
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
    return replace(first, results=dict(sorted(results.items())), shards=shards, seconds=seconds)


def _rows_with_a_policy(device_type: str) -> list[str]:
    if device_type not in DEVICE_TYPES:
        return []
    names = registered(device_type)
    with_policy = (row.name for row in op_table() if row.policy(device_type) is not CastPolicy.fallthrough)
    return [name for name in with_policy if name in names]


def _entry_data(position: int, result: EntryResult) -> dict[str, Any]:
    data = asdict(result)
    del data["entry"]
    data["mismatches"] = len(result.mismatches)
    data["rows"] = sorted(result.rows)
    for name in ("checked", "no_rule"):
        data[name] = dict(sorted(data[name].items()))
    return {"position": position, "name": result.entry.name, "source": result.entry.source, **data}


def _results(data: Mapping[str, Any]) -> dict[int, EntryResult]:
    mismatches: dict[str, list[SampleMismatch]] = {}
    for mismatch in data["mismatches"]:
        mismatches.setdefault(mismatch["entry"], []).append(SampleMismatch(**mismatch))
    results = {}
    for entry in data["entries"]:
        fields = {name: _tuple(value) for name, value in entry.items() if name not in ("position", "name", "source")}
        fields |= {"mismatches": tuple(mismatches.pop(entry["name"], ())), "rows": frozenset(fields["rows"])}
        if not 0 <= entry["position"] < data["totals"]["entries_chosen"] or entry["position"] in results:
            raise ValueError(f"no entry has position {entry['position']}")
        result = EntryResult(Entry(entry["name"], entry["source"]), **fields)
        if json.loads(json.dumps(_entry_data(entry["position"], result))) != entry:
            raise ValueError(f"entry {entry['name']} has other fields")
        results[entry["position"]] = result
    if mismatches:
        raise ValueError(f"mismatches of {', '.join(mismatches)}, which are not in the run")
    return results


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# --- JUnit XML, with one test case for each entry

#: The characters that XML 1.0 cannot hold.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """Returns a report as JUnit XML.

    An entry fails if it has a mismatch or a stale gap, is an error if its process died, and is skipped if none of its
    samples could run.

    Args:
        report: The report of the run.

    Returns:
        A document with one suite, whose properties are the versions and options.

    Example:
        >>> from torch_promote.parity.model import Options
        >>> "testsuites" in junit(Report({}, Options(), 0, {}))
        True
    """
    suite = ElementTree.Element("testsuite", name="torch-promote parity")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {**report.about, **_options(report), "shards": ", ".join(report.shards)}.items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    cases = [_case(report, result) for result in report.ordered]
    ended = ("interrupted: the missing entries did not run",) if report.interrupted else ()
    of_the_run = (*ended, *report.stale_listed, *(f"{row}: its policy applied to no call" for row in report.unreached))
    if of_the_run:
        cases.append(_case(report, EntryResult(Entry("the run as a whole", "op_db"), stale=of_the_run)))
    suite.extend(cases)
    counts = {
        "tests": len(cases),
        **{f"{kind}s": sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error")},
        "skipped": sum(case.find("skipped") is not None for case in cases),
    }
    root = ElementTree.Element("testsuites")
    root.append(suite)
    for element in (root, suite):
        element.attrib.update({name: str(count) for name, count in counts.items()}, time=f"{report.seconds:.3f}")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _options(report: Report) -> dict[str, str]:
    options = report.options
    return {
        "options.device": options.device,
        "options.autocast_dtype": str(options.lower).removeprefix("torch."),
        "options.quick": str(options.quick).lower(),
        "options.stock_only": str(options.stock_only).lower(),
    }


def _case(report: Report, result: EntryResult) -> ElementTree.Element:
    place = f"parity.{report.options.device}.{result.entry.source}"
    case = ElementTree.Element("testcase", classname=place, name=result.entry.name, time=f"{result.seconds:.3f}")
    crashes = [mismatch for mismatch in result.mismatches if mismatch.kind == "crash"]
    if result.mismatches or result.stale:
        kinds = sorted({mismatch.kind for mismatch in result.mismatches} | ({"stale gap"} if result.stale else set()))
        outcome = ElementTree.SubElement(case, "error" if crashes else "failure", type=", ".join(kinds))
        outcome.set("message", f"{len(result.mismatches)} mismatches, {len(result.stale)} stale gaps")
        texts = [
            f"{mismatch.sample} {mismatch.kind} {mismatch.what}\n{mismatch.text}\n{mismatch.reproduce}"
            for mismatch in result.mismatches
        ]
        outcome.text = _clean("\n\n".join([*texts, *result.stale]))
    elif result.samples == result.refused:
        message = f"{result.samples} samples, all refused by stock and ours alike" if result.samples else "no samples"
        ElementTree.SubElement(case, "skipped", message=message)
    return case


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
