"""Writes a parity run as JUnit XML for continuous integration, with one test case for each entry.

xml.etree serves: junitparser and junit-xml would replace only the lines that create elements, and would not remove the
characters that XML cannot hold, which error texts contain.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from torch_promote.parity.model import Entry, EntryResult
from torch_promote.parity.report import Report

__all__ = ["junit"]

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
