"""The benchmark: times stock autocast, ours, casts by hand and no autocast side by side.

    cases     Case, its contenders, and the settings of a run
    timing    the stopwatch for a statement
    run       runs the contenders of a case in alternation, round by round
    figures   medians, quartiles, ratios, overheads
    results   the result of a case, and the JSON
    callgrind counts instructions, in a process under valgrind
    suite_*   the cases, one file for each suite
    compiling counts the kernels, graphs and guards of a compiled step
    steps     the steps of the suites of models, on the models in nets and by_hand; casts and memory measure them
    programs  the programs of the suite of programs; some need transformers
    kernels   kernels and casts on a CUDA device
    plot      the plot

The contenders of a case. They share one process, except in the suite `import`:

    stock         under PyTorch's torch.autocast, also while `install` is in force
    ours          under my_autocast
    hand          no region; the casts are written in the code: the lower limit
    already_cast  no region, and inputs (for models: weights) that need no cast
    plain         no region and no cast: float32, unless there is nothing to cast

The JSON of `torch-promote bench --json`. Times are nanoseconds per run; a spread is an object of `median`, `low` and
`high`, the last two its quartiles over the rounds:

    torch, torch_promote   versions
    device, device_name    "cpu" or "cuda", and its model
    threads, rounds        the settings
    clock                  "cpu": CPU time of the process; "wall": wall-clock time; "kernels": on the stand-in device,
                           where ratios and overheads are null or empty, and kernels and bytes are counted
    default_policy         the default policy of ours and where it comes from, or "" for PyTorch's
    cases, interrupted     how many cases were selected, and whether Ctrl-C ended the run before the last
    skipped                names of programs without cases, because transformers is not installed
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
      casts                by contender: casts in a step, of weights, activations and gradients, one for each tensor.
                           Models only; on the stand-in device, all cases
      peak_bytes           by contender: peak memory of a step, above the memory held before it; models only. On CUDA,
                           all cases: of two runs in a region, above the memory held before the region
      kernels              by contender, on CUDA only: kernels in a run, after a first one in the same region. On a GPU,
                           torch.profiler counts them, without copies and fills of memory. On the stand-in device, each
                           call of an op that computes counts as one kernel, also for an op of lists
      copies               by contender, on the stand-in device only: more about the casts of this run
        forward, backward  each an object: casts "narrowing" and "widening", that is, to a dtype of more bytes
        kernels            kernels that copy, to another dtype or not
        cast_kernels       of these, kernels that cast: a `_foreach_copy_` is one, and a cast for each of its tensors
        moved_bytes        bytes that the casts read and write
        allocated_bytes    bytes that the run allocates, including those that it frees again
      compiled             by contender, suite compile only: kernels that Inductor generates, graphs, graph_breaks,
                           frames that Dynamo compiles, guards of all frames
      instructions         by contender, suite instructions only: instructions in a run; there are no times then
      target               null, or an object with base, at_most and over (see `Target`) and the measured figure

Example:
    >>> cases = [case for case in list_cases(Settings()) if case.name == "construct, enter, exit"]
    >>> [result] = run(cases, Settings(rounds=2, slice_seconds=0))
    >>> sorted(result.times_ns)
    ['ours', 'stock']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch_promote.bench import (
    suite_caches,
    suite_compile,
    suite_import,
    suite_instructions,
    suite_models,
    suite_ops,
    suite_overrides,
    suite_programs,
    suite_region,
)
from torch_promote.bench.cases import COMPILE, INSTRUCTIONS, Case, Settings
from torch_promote.bench.programs import missing
from torch_promote.bench.results import Result, report
from torch_promote.bench.run import run

__all__ = ["INSTRUCTIONS", "SUITES", "Case", "Result", "Settings", "list_cases", "missing", "report", "run"]

#: The suites by name.
SUITES: dict[str, Callable[[Settings], Iterator[Case]]] = {
    "region": suite_region.cases,
    "ops": suite_ops.cases,
    "overrides": suite_overrides.cases,
    "models": suite_models.cases,
    "caches": suite_caches.cases,
    "programs": suite_programs.cases,
    "import": suite_import.cases,
    COMPILE: suite_compile.cases,
    INSTRUCTIONS: suite_instructions.cases,
}


def list_cases(settings: Settings, suites: Sequence[str] = ()) -> list[Case]:
    """Returns the cases of suites. They depend on the device.

    Args:
        settings: The settings of the run.
        suites: Keys of `SUITES`. Empty: all except `compile`, which takes minutes, and `instructions`, which needs
            valgrind.
    """
    # The processes of `import` do not have the stand-in.
    left_out = (COMPILE, INSTRUCTIONS, *(["import"] if settings.counted else []))
    chosen = suites or [suite for suite in SUITES if suite not in left_out]
    return [case for suite in chosen for case in SUITES[suite](settings)]
