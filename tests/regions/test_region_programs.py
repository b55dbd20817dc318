"""Random programs of nested regions, ours and stock's, in one to three threads, compared with a model of the state.

The model is a stack of dicts, one for each open region: what a program that enters and leaves in order has to see.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_promote as tp
from helpers.probes import KINDS, mm_dtype, mse_dtype
from helpers.thread_state import thread_state
from torch_promote import _C

DEVICES = ("cpu", "cuda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "default": None}
CACHES = ("weights", "persistent", "all", "none")
POLICIES = {"fp16": None, "fp32": torch.float32, "float64": torch.float64}


# --- programs


@dataclass(frozen=True)
class Region:
    """A region and the actions in it. With `raises`, an exception leaves it and that many surrounding regions."""

    kind: str
    devices: tuple[str, ...]
    dtype: str
    enabled: bool
    cache_enabled: bool | None
    cache: str | None
    mm_policy: str | None
    way: str
    raises: int | None
    body: tuple[Region, ...] = ()


class LeavesRegions(Exception):  # noqa: N818 (it is part of a program, not a failure)
    def __init__(self, levels: int) -> None:
        self.levels = levels


def nested(flat: Sequence[tuple[int, Region]]) -> tuple[Region, ...]:
    """Each region goes into the nearest one before it that has a smaller number, as in an indented list."""
    if not flat:
        return ()
    (indent, first), rest = flat[0], flat[1:]
    end = next((place for place, line in enumerate(rest) if line[0] <= indent), len(rest))
    return (replace(first, body=nested(rest[:end])), *nested(rest[end:]))


def legal(region: Region) -> Region:
    """The region without arguments that its kind or its cache argument does not allow."""
    if region.kind == "stock":
        return replace(region, devices=region.devices[:1], mm_policy=None, cache=None)
    return region if region.cache is None else replace(region, cache_enabled=None)


regions = st.builds(
    Region,
    kind=st.sampled_from(list(KINDS)),
    devices=st.sampled_from([("cpu",), ("cuda",), ("cpu", "cuda"), ("cuda", "cpu")]),
    dtype=st.sampled_from(list(DTYPES)),
    enabled=st.sampled_from([True, True, False]),
    cache_enabled=st.sampled_from([None, None, True, False]),
    cache=st.sampled_from([None, None, *CACHES]),
    mm_policy=st.sampled_from([None, None, *POLICIES]),
    way=st.sampled_from(["with", "stack", "decorator"]),
    raises=st.sampled_from([None, None, None, 0, 1, 2]),
).map(legal)
programs = st.lists(st.tuples(st.integers(0, 4), regions), min_size=1, max_size=7).map(nested)


# --- the model


@dataclass
class Model:
    """The expected state: the innermost dict with an entry decides."""

    stack: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_this_thread(cls) -> Model:
        outside: dict[str, Any] = {"cache": True, "cache_mode": "weights", "mm": None}
        outside |= {"cpu": (False, torch.bfloat16), "cuda": (False, torch.float16)}
        return cls([outside])

    def get(self, what: str) -> Any:
        return next(entry[what] for entry in reversed(self.stack) if what in entry)

    @contextmanager
    def inside(self, region: Region) -> Iterator[None]:
        entry: dict[str, Any] = {}
        for device in region.devices:
            entry[device] = (region.enabled, DTYPES[region.dtype] or self.get(device)[1])
        entry["cache"] = self.get("cache") if region.cache_enabled is None else region.cache_enabled
        if region.cache is not None:
            entry["cache"] = region.cache != "none"
        if region.cache not in (None, "none"):
            entry["cache_mode"] = region.cache
        if region.mm_policy is not None:
            entry["mm"] = region.mm_policy
        self.stack.append(entry)
        try:
            yield
        finally:
            self.stack.pop()

    def mm_dtype(self, device: str) -> torch.dtype:
        enabled, dtype = self.get(device)
        if not enabled:
            return torch.float32
        policy = self.get("mm")
        return (POLICIES[policy] if policy is not None else None) or dtype

    def check(self) -> None:
        assert torch.is_autocast_cache_enabled() == self.get("cache")
        assert _C.cache_mode() == self.get("cache_mode")
        for device in DEVICES:
            enabled, dtype = self.get(device)
            assert (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) == (enabled, dtype), device
            assert mm_dtype(device) == self.mm_dtype(device), device
            assert mse_dtype(device) == (torch.float32 if enabled else torch.bfloat16), device


# --- running a program


def run(program: Sequence[Region], model: Model) -> int:
    """Runs regions one after the other and returns the number of checks made."""
    checks = 0
    for region in program:
        checks += run_one(region, model)
        model.check()
    return checks + len(program)


def run_one(region: Region, model: Model) -> int:
    arguments: dict[str, Any] = {"overrides": {"mm": region.mm_policy}} if region.mm_policy is not None else {}
    arguments |= {"cache": region.cache} if region.cache is not None else {}
    device = region.devices if len(region.devices) > 1 else region.devices[0]
    context = KINDS[region.kind](device, DTYPES[region.dtype], region.enabled, region.cache_enabled, **arguments)
    checks = 0

    def inside() -> None:
        nonlocal checks
        with model.inside(region):
            model.check()
            checks = 1 + run(region.body, model)
            if region.raises is not None:
                raise LeavesRegions(region.raises)

    try:
        if region.way == "with":
            with context:
                inside()
        elif region.way == "stack":
            with ExitStack() as stack:
                stack.enter_context(context)
                inside()
        else:
            context(inside)()
    except LeavesRegions as error:
        if error.levels and len(model.stack) > 1:
            error.levels -= 1
            raise
    return checks


def run_in_this_thread(program: Sequence[Region], outcome: list[Any]) -> None:
    try:
        before = thread_state()
        checks = run(program, Model.of_this_thread())
        assert thread_state() == before
        assert tp.cache_info()["entries"] == 0
        outcome.append(checks)
    except BaseException as error:
        outcome.append(error)


@pytest.mark.usefixtures("pretend_cuda")
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(here=programs, elsewhere=st.lists(programs, max_size=2))
def test_a_random_program_agrees_with_the_model(here: tuple[Region, ...], elsewhere: list[tuple[Region, ...]]) -> None:
    """Runs programs in this thread and concurrently in others, and compares each with the model."""
    outcomes: list[list[Any]] = [[] for _ in range(1 + len(elsewhere))]
    threads = [
        threading.Thread(target=run_in_this_thread, args=arguments, daemon=True)
        for arguments in zip(elsewhere, outcomes[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    run_in_this_thread(here, outcomes[0])
    for thread in threads:
        thread.join(timeout=60)
    for outcome in outcomes:
        assert len(outcome) == 1, "the thread hangs"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        assert outcome[0] > 0
