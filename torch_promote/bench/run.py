"""Runs cases: alternates between the contenders, round by round, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch_promote.bench.cases import HAND, OURS, STOCK, Case, Measured, Prepared, Settings, Timer
from torch_promote.bench.figures import Spread, overhead, ratio, spread
from torch_promote.bench.memory import peak_bytes
from torch_promote.bench.results import Result
from torch_promote.bench.timing import threads

__all__ = ["interleaved", "run", "summary"]

_Times = Mapping[str, Sequence[float]]


def run(cases: Iterable[Case], settings: Settings) -> Iterator[Result]:
    """Runs cases and yields each result when it is done.

    Args:
        cases: The cases.
        settings: The settings of the run.

    Yields:
        A `Result` for each case.
    """
    for case in cases:
        with threads(settings.threads):
            result = _run(case, settings)
        yield result


def _run(case: Case, settings: Settings) -> Result:
    if settings.counted:
        return Result(case, measured=_counted(case, settings))
    prepared = case.prepare(settings)
    try:
        result = summary(case, prepared, interleaved(prepared.timers, settings.rounds))
    finally:
        prepared.close()
    if settings.device == "cuda" and case.suite != "import":  # its contenders are other processes
        result = replace(result, measured=_counted(case, replace(settings, counted=True)))
    return result


def _counted(case: Case, settings: Settings) -> dict[str, Measured]:
    """Returns the kernels of a run of each contender, and the peak memory of its region."""
    prepared = case.prepare(settings)
    try:
        casts = {name: measured.casts for name, measured in prepared.measure().items()}
        found = {}
        for name, timer in prepared.timers.items():
            runs: list[float] = []
            peak = peak_bytes(partial(_run_into, runs, timer), settings.device)
            found[name] = Measured(casts.get(name, {}), peak, int(runs[-1]))
    finally:
        prepared.close()
    return found


def _run_into(runs: list[float], timer: Timer) -> None:
    runs.append(timer())


def interleaved(timers: Mapping[str, Timer], rounds: int) -> dict[str, list[float]]:
    """Times contenders alternately. Each round starts with another contender, since the first finds other CPU caches.

    Args:
        timers: The contenders.
        rounds: The number of rounds. One more round runs first and does not count.

    Returns:
        The times of each contender, by round.
    """
    names = list(timers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for timer in timers.values():
        timer()
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(timers[name]())
    return times


def summary(case: Case, prepared: Prepared, times: _Times) -> Result:
    """Returns the result of a case from its contenders' times."""
    bases = [base for base in prepared.bases if base in times]
    costs = {
        base: {name: _difference(times[name], times[base]) for name in (STOCK, OURS) if name in times} for base in bases
    }
    return Result(
        case,
        ratio=ratio(times[OURS], times[STOCK]) if STOCK in times else None,
        ratio_to_hand=ratio(times[OURS], times[HAND]) if HAND in times else None,
        overheads={base: overhead(times[OURS], times[STOCK], times[base]) for base in bases if STOCK in times},
        overheads_ns=costs,
        times_ns={name: spread(values) for name, values in times.items()},
        measured=prepared.measure(),
    )


def _difference(times: Sequence[float], base: Sequence[float]) -> Spread:
    return spread([mine - least for mine, least in zip(times, base, strict=True)])
