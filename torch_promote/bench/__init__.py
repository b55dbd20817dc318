"""The benchmark: times stock autocast, ours, casts by hand and no autocast side by side.

    cases     Case, its contenders, and the settings of a run
    timing    the stopwatch for a statement
    run       runs the contenders of a case alternately, round by round
    figures   medians, quartiles, ratios, overheads
    results   the result of a case, and the JSON
    suite_*   the cases, one file for each suite
    steps     the steps of the suites of models, on the models in nets and by_hand; casts and memory measure them
    plot      the plot

The contenders of a case. They share one process, except in the suite `import`:

    stock         under torch.autocast, also where `install` has made that ours
    ours          under my_autocast
    hand          no region; the casts are written in the code: the lower limit
    already_cast  no region, and inputs that need no cast; for models, weights that need none
    plain         no region and no cast: float32, unless there is nothing to cast

The JSON of `torch-promote bench --json`. Times are nanoseconds per run; a spread is an object of `median`, `low` and
`high`, the last two its quartiles over the rounds:

    torch, torch_promote   versions
    device, device_name    "cpu" or "cuda", and its model
    threads, rounds        the settings
    clock                  "cpu": CPU time of the process; "wall": wall-clock time; "kernels": on the stand-in device,
                           where ratios and overheads are null or empty, and kernels and bytes are counted
    results                a list with an object for each case:
      suite, case          the names
      ratio                spread of ours / stock; null if stock has no such feature
      ratio_to_hand        spread of ours / hand, or null
      overheads            by base, a contender: ours' overhead over it as a share of stock's
        spread             spread of (ours - base) / (stock - base), or null if stock - base is within its noise
        left_out           rounds without a share, because stock took no longer than the base
        reason             why there is no spread, or ""
      overheads_ns         by base and contender (stock, ours): spread of the time minus the base's
      times_ns             by contender: spread of the time
      casts                by contender, models only: casts in a step, of weights, activations and gradients
      peak_bytes           by contender: peak memory of a step, above the memory held before it; models only. On CUDA,
                           all cases: of two runs in a region, above the memory held before the region
      kernels              by contender, on CUDA only: kernels in a run, after a first one in the same region. On a GPU,
                           torch.profiler counts them, without copies and fills of memory

Example:
    >>> cases = [case for case in list_cases(Settings()) if case.name == "construct, enter, exit"]
    >>> [result] = run(cases, Settings(rounds=2, slice_seconds=0))
    >>> sorted(result.times_ns)
    ['ours', 'stock']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch_promote.bench import suite_caches, suite_import, suite_models, suite_ops, suite_overrides, suite_region
from torch_promote.bench.cases import Case, Settings
from torch_promote.bench.results import Result, report
from torch_promote.bench.run import run

__all__ = ["SUITES", "Case", "Result", "Settings", "list_cases", "report", "run"]

#: The suites by name.
SUITES: dict[str, Callable[[Settings], Iterator[Case]]] = {
    "region": suite_region.cases,
    "ops": suite_ops.cases,
    "overrides": suite_overrides.cases,
    "models": suite_models.cases,
    "caches": suite_caches.cases,
    "import": suite_import.cases,
}


def list_cases(settings: Settings, suites: Sequence[str] = ()) -> list[Case]:
    """Returns the cases of suites. They depend on the device.

    Args:
        settings: The settings of the run.
        suites: Keys of `SUITES`; empty for all.
    """
    # The processes of `import` do not have the stand-in.
    chosen = suites or [suite for suite in SUITES if not (settings.counted and suite == "import")]
    return [case for suite in chosen for case in SUITES[suite](settings)]
