"""Runs cases: alternates between the contenders, round by round. Instructions are counted in another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch_promote.bench.callgrind import CountingProcess
from torch_promote.bench.cases import HAND, INSTRUCTIONS, OURS, STOCK, Case, Measured, Prepared, Settings, Timer
from torch_promote.bench.figures import Spread, overhead, ratio, spread
from torch_promote.bench.kernels import count_copies, count_kernels
from torch_promote.bench.memory import peak_bytes
from torch_promote.bench.results import Result
from torch_promote.bench.timing import Stopwatch, threads
from torch_promote.checking.autocast_in_force import stand_in

__all__ = ["interleaved", "run", "summary"]

_Times = Mapping[str, Sequence[float]]


def run(cases: Iterable[Case], settings: Settings) -> Iterator[Result]:
    """Runs cases and yields each result when it is done.

    Args:
        cases: The cases.
        settings: The settings of the run.

    Yields:
        A `Result` for each case.

    Raises:
        ValgrindError: A case is of the suite `instructions`, and there is no valgrind.
    """
    with CountingProcess(settings.keep) as counting:
        for case in cases:
            if case.suite == INSTRUCTIONS:
                yield Result(case, instructions=counting.count(case.name))
                continue
            with threads(settings.threads):
                result = _run(case, settings)
            yield result


def _run(case: Case, settings: Settings) -> Result:
    prepared = case.prepare(settings)
    try:
        if settings.counted:
            return Result(case, measured=_counted(prepared, {}))
        result = summary(case, prepared, interleaved(prepared.timers, settings.rounds))
        if settings.device == "cuda" and case.suite != "import":  # the contenders of `import` are other processes
            result = replace(result, measured=_counted(prepared, result.measured))
        return result
    finally:
        prepared.close()


def _counted(prepared: Prepared, measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """Returns the kernels of a run of each contender on a CUDA device, and the peak memory of its region."""
    found = {}
    for name, timer in prepared.timers.items():
        assert isinstance(timer, Stopwatch)
        peak = peak_bytes(timer.run_twice, "cuda")
        if stand_in() is None:  # pragma: no cover: needs a GPU
            casts = measured[name].casts if name in measured else {}
            found[name] = Measured(casts, peak, timer.counted(count_kernels))
        else:
            kernels, casts, copies = timer.counted(partial(count_copies, weights=prepared.weights))
            found[name] = Measured(casts, peak, kernels, copies)
    return found


def interleaved(timers: Mapping[str, Timer], rounds: int) -> dict[str, list[float]]:
    """Times contenders in alternation. Each round starts with another contender, because CPU caches affect the first.

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
