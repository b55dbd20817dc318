"""The benchmark: autocast by stock and by ours, casts by hand, and no autocast, timed side by side.

    cases     what a case is, and the settings of a run
    timing    a stopwatch for a statement
    run       the contenders of a case by turns, round by round
    figures   medians, quartiles, ratios, overheads
    results   what comes out of a case, and the JSON
    suite_*   the cases, one file for each suite
    steps     what the suites of models run; nets and by_hand are the models, casts and memory what they count
    plot      the picture

The contenders of a case, all in one process but for the suite `import`:

    stock         under torch.autocast
    ours          under my_autocast
    hand          no region; the casts are written in the code: the limit
    already_cast  no region, and inputs that need no cast; of models, weights that need none
    plain         no region and no cast: float32, unless nothing was to be cast

The JSON of `torch-promote bench --json`. Times are nanoseconds a run; a spread is an object of `median`, `low` and
`high`, the last two its quartiles over the rounds:

    torch, torch_promote   versions
    device, device_name    "cpu" or "cuda", and the model of it
    threads, rounds        as asked for
    clock                  "cpu": times are CPU time of the process; "wall": time of the day
    results                a list, an object for each case:
      suite, case          its names
      ratio                spread of ours / stock; null where stock has nothing of the kind
      ratio_to_hand        spread of ours / hand, or null
      overheads            by base, a contender: what ours costs over it, as a share of what stock costs over it
        spread             spread of (ours - base) / (stock - base), or null if stock - base is within its noise
        left_out           rounds without a share, as stock took no longer than the base
        reason             why there is no spread, or ""
      overheads_ns         by base and contender (stock, ours): spread of its time minus the base's
      times_ns             by contender: spread of its time
      casts                by contender, of models: casts in a step, of weights, activations and gradients
      peak_bytes           by contender, of models: most memory held in a step, beyond what was held before

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
    """Returns the cases of some suites, which depend on the device.

    Args:
        settings: What they would be run with.
        suites: Keys of `SUITES`; none means all.
    """
    return [case for suite in suites or SUITES for case in SUITES[suite](settings)]
