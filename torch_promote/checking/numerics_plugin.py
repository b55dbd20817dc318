"""The recording of a test under `pytest --record-numerics=DIR`, and its comparison with the stored one."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.reading.trace import trace
from torch_promote.reading.trace_report import diff
from torch_promote.recording.file import SUFFIX

if TYPE_CHECKING:
    from torch_promote.observe.call import Call
    from torch_promote.reading.difference import Difference

#: The name of the marker, and of the property of a test's report that says how it ended.
_NAME = "record_numerics"
_UPDATE = "To store what the test computes now, run it with --record-numerics-update."
#: The longest part of a test's id in the name of its file, in characters.
_LONGEST = 100
#: The largest number of calls of one run alone that a failure lists.
_MOST_CALLS = 6


@dataclass
class RecordedTest:
    """A test that runs and is recorded."""

    failed: bool = False  # by itself


def file_name(item: pytest.Item) -> str:
    """Returns the name of a test's file, without a suffix: the end of the test's id, and a hash of all of it."""
    parent = item.parent.nodeid if item.parent else ""
    identity = f"{parent}::{item.name}"  # pytest-xdist appends a group to `item.nodeid`
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", identity.replace(".py::", "::"))[-_LONGEST:].strip("-")
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


@contextlib.contextmanager
def recorded(item: pytest.Item, folder: str, update: bool, strict: bool) -> Iterator[RecordedTest]:
    """Records a block, which runs a test, and stores the recording, or fails if the stored one differs."""
    # With `strict`, it fails if there is none. A test that does not pass is neither stored nor compared. The property
    # "record_numerics" of others is "recorded", "replaced", "compared", "missing" or "differs".
    tolerance = _tolerance_of(item)
    stored, new = (Path(folder, f"{file_name(item)}{suffix}") for suffix in (SUFFIX, f".new{SUFFIX}"))
    new.unlink(missing_ok=True)  # of an earlier run
    test, passed = RecordedTest(), False
    try:
        with contextlib.ExitStack() as blocks:
            try:
                blocks.enter_context(trace(max_calls=0, record=new))
            except TorchPromoteError as error:
                pytest.fail(f"{_NAME}: {error}", pytrace=False)
            yield test
        # A unittest.TestCase catches its errors, and pytest keeps them there.
        passed = not test.failed and not getattr(item, "_excinfo", None)
    finally:
        if not passed:
            new.unlink(missing_ok=True)
    if passed:
        end, failure = _judge(stored, new, tolerance, update, strict)
        item.user_properties.append((_NAME, end))
        if failure:
            pytest.fail(failure, pytrace=False)


def _tolerance_of(item: pytest.Item) -> float | None:
    """The tolerance that the markers ask for: the test's own first, then those of its class and module."""
    options: dict[str, Any] = {}
    arguments: list[Any] = []
    for marker in item.iter_markers(_NAME):
        options = {**marker.kwargs, **options}
        arguments += marker.args
    tolerance: float | None = options.pop("tolerance", None)
    if arguments or options:
        strange = ", ".join([*map(repr, arguments), *options])
        pytest.fail(f"marker {_NAME} takes tolerance= only, got {strange}.", pytrace=False)
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 <= tolerance < math.inf):
        what = f"marker {_NAME}: tolerance={tolerance!r}"
        pytest.fail(f"{what} is not a relative L2 error. Legal: a number from 0 up, or None.", pytrace=False)
    return tolerance


def _judge(stored: Path, new: Path, tolerance: float | None, update: bool, strict: bool) -> tuple[str, str]:
    """Returns how a test that passed by itself ends, and the text of its failure, or ""."""
    if not new.exists():
        text = "no call of an op was recorded. Those of fixtures and of other threads are not."
        pytest.fail(f"{_NAME}: {text} Call the model in the test, or remove the marker.", pytrace=False)
    if not stored.exists() and strict:
        new.unlink()
        remedy = "Run it once without --record-numerics-strict, which stores one, and commit the file."
        return "missing", f"{_NAME}: this test has no recording, {str(stored)!r}. {remedy}"
    if not stored.exists():
        os.replace(new, stored)
        return "recorded", ""
    try:
        difference = diff(stored, new)
    except OptionError as error:
        if not update:
            pytest.fail(f"{_NAME}: {error} {_UPDATE}", pytrace=False)
        os.replace(new, stored)
        return "replaced", ""
    if update and (difference or difference.environment):  # an equal file would only differ in states of generators
        os.replace(new, stored)
        return "replaced", ""
    # A tolerance excuses errors, not that the test calls other ops.
    if difference and (tolerance is None or not difference.is_within(tolerance) or _other_calls(difference)):
        return "differs", "\n".join(_failure(difference, stored, new, tolerance))
    new.unlink()
    return "compared", ""


def _other_calls(difference: Difference) -> list[tuple[str, Call]]:
    """The calls of one run alone, without those of backwards and optimizers, which depend on PyTorch's version."""
    runs = ("A", difference.only_in_a), ("B", difference.only_in_b)
    return [(run, call) for run, calls in runs for call in calls if call.phase in ("forward", "recompute")]


def _failure(difference: Difference, stored: Path, new: Path, tolerance: float | None) -> Iterator[str]:
    """The lines of a failure. The first is in pytest's short summary."""
    yield difference.content().verdict
    if difference.first is not None and difference.first.line:
        yield f"    at {difference.first.line}"
    yield from (f"    {sentence}" for sentence in difference.evidence)
    if tolerance is not None:
        yield f"    The largest relative L2 error is {difference.largest:.3g}, and the tolerance is {tolerance:g}."
    for run, call in _other_calls(difference)[:_MOST_CALLS]:
        yield f"    Only {run} calls {call.name}, at {call.line}."
    yield f"    torch-promote diff {shlex.quote(str(stored))} {shlex.quote(str(new))} --html difference.html"
    yield f"A is the stored recording, and B this run. {_UPDATE}"
