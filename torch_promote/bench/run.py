"""Runs cases: alternates between the contenders, round by round, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch_promote.bench.cases import HAND, OURS, STOCK, Case, Measured, Prepared, Settings, Timer
from torch_promote.bench.figures import Spread, overhead, ratio, spread
from torch_promote.bench.results import Result
from torch_promote.bench.timing import threads
from torch_promote.checking.pretend_cuda import stand_in

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
    prepared = case.prepare(settings)
    try:
        if settings.counted:
            return _counted(case, prepared)
        return summary(case, prepared, interleaved(prepared.timers, settings.rounds))
    finally:
        prepared.close()


def _counted(case: Case, prepared: Prepared) -> Result:
    """Returns the kernels of a run of each contender, and the peak memory of its region."""
    casts = {name: measured.casts for name, measured in prepared.measure().items()}
    found = {}
    for name, timer in prepared.timers.items():
        timer()
        with stand_in().counting() as counts:
            kernels = int(timer())
        found[name] = Measured(casts.get(name, {}), counts.peak_bytes, kernels)
    return Result(case, measured=found)


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
