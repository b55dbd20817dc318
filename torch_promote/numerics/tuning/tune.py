"""`tune`: finds the smallest set of overrides with which a policy meets a tolerance."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean
from torch_promote.numerics.runs.policy_in_force import present_policy
from torch_promote.numerics.runs.progress import show_progress
from torch_promote.numerics.tuning.agreement import Agreement
from torch_promote.numerics.tuning.candidates import LEVELS
from torch_promote.numerics.tuning.compiled import is_compiled
from torch_promote.numerics.tuning.measured_runs import MeasuredRuns
from torch_promote.numerics.tuning.resume import ResumeFile
from torch_promote.numerics.tuning.trials import Trials
from torch_promote.numerics.tuning.tuner import Tuner
from torch_promote.numerics.tuning.tuning import Tuning
from torch_promote.numerics.tuning.verdict import Judge
from torch_promote.policy.dtype_names import parse_dtype

__all__ = ["tune"]

_DIRECTIONS = ("accuracy", "speed")
#: Two runs of the reference, one of the policy, one with all candidates in float32, two on held-out batches.
_LEAST = 6


def tune(
    step: Callable[..., Any],
    *,
    model: nn.Module,
    tolerance: float | Mapping[str, float],
    metric: Callable[[Any], Any] | str | None = None,
    batches: int = 1,
    check: Callable[[Any], bool] | None = None,
    budget: int = 60,
    level: Literal["op", "module", "site"] = "op",
    direction: Literal["accuracy", "speed"] = "accuracy",
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
    restore: Iterable[Any] = (),
) -> Tuning:
    """Finds the smallest set of overrides with which the current policy meets a tolerance.

    The current policy is that of `install` or `set_default_policy`, or PyTorch's. The reference is the same step
    without casts. `compare` ranks the ops that the policy runs in a lower dtype by their effect on the loss. `tune`
    then runs the step: it searches for the shortest prefix of the ranking that passes in float32, removes overrides
    that are not needed, and checks the result on held-out batches. More float32 does not always mean a smaller error,
    so `Tuning.certificate` states what the runs have proved, and lists runs that contradict monotonicity.

    Args:
        step: A training or evaluation step, as in `compare`.
        model: The model.
        tolerance: How far each metric may be from the reference's, relative to it: |a - b| <= tolerance * |b| for a
            number, the relative L2 norm of the difference for a tensor. Or a number for each metric by its name; the
            others are then not judged.
        metric: What is compared: a function of what step returns, the name of a part of it, or None for all of it.
        batches: How many times a run calls the step. Held-out batches are as many: those with the next numbers if step
            takes a number, otherwise the same step with other random numbers. If what was found fails on them, they
            become part of the tuning while the budget lasts, and others are held out.
        check: A function of what step returns that has to be true of each batch.
        budget: The most runs: those that rank and those on held-out batches count. A run calls step `batches` times.
        level: What gets overrides: "op", an op everywhere; "module", all ops of a module; "site", an op in a module.
        direction: "accuracy": the fewest overrides to float32 that meet the tolerance. "speed": the policy meets it,
            and what runs in float32 is lowered while it does, as many bytes as possible.
        dtype: The dtype of regions that name none: torch.float16 or torch.bfloat16, or its name.
        seed: Orders candidates that no estimate tells apart.
        resume: A file that keeps each run. A later call with the same arguments goes on from it, in another process,
            too; runs in the file count as part of the budget.
        progress: Whether to show a bar, if stderr is a terminal and rich is installed.
        restore: Other state that the step changes, as in `compare`.

    Returns:
        The tuning. All state is restored. After Ctrl-C, the results so far; during the first three runs there are none,
        and the KeyboardInterrupt propagates.

    Raises:
        OptionError: An argument is invalid, or the file in `resume` belongs to another tuning.
        NoiseFloorError: Two runs of the reference differ by more than the tolerance.
        NothingToTuneError: The policy meets the tolerance without overrides.
        Fp32FailsError: With all candidates in float32, the step does not meet it either.
        StepError: As `compare`.
        TuningError: The ranks of the process group run different ops.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> def step():
        ...     with torch.autocast("cpu", torch.float16):
        ...         return (model(torch.ones(2, 4)) * 1e6).square().mean()  # 1e6 is too large for float16
        >>> tuning = tune(step, model=model, tolerance=1e-2)
        >>> tuning.overrides, tuning.met
        ({'aten::mul': 'fp32'}, True)
    """
    _check_choice("level", level, LEVELS)
    _check_choice("direction", direction, _DIRECTIONS)
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be the nn.Module that the step runs, got {model!r}.")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise OptionError(f"seed is an int, got {seed!r}.")
    if dtype is not None:
        dtype = parse_dtype(dtype)
    judge = Judge(tolerance, metric, check)
    compiled = is_compiled(step, model)
    least = _LEAST + compiled + (direction == "speed")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < least:
        raise OptionError(
            f"budget (the maximum number of runs) must be {least} or more, got {budget!r}: two runs of the "
            f"reference, one of the policy, one with all candidates overridden, two on held-out batches"
            f"{', one of the compiled step' if compiled else ''}"
            f"{', one more of the policy to time it' if direction == 'speed' else ''}."
        )
    base = present_policy()
    group = Agreement()
    identity = {
        "torch": str(torch.__version__),
        "policy": base.to_dict(),
        "tolerance": tolerance if not isinstance(tolerance, Mapping) else dict(tolerance),
        "metric": metric if isinstance(metric, str) else getattr(metric, "__qualname__", None),
        "check": getattr(check, "__qualname__", None),
        "batches": batches,
        "level": level,
        "direction": direction,
        "dtype": None if dtype is None else str(dtype),
        "seed": seed,
        "parameters": _digest_of(model),
        "ranks": group.ranks,
    }
    with MeasuredRuns(step, model, judge, budget, batches=batches, restore=restore, dtype=dtype) as runs:
        file = _file(resume, identity, group)
        with show_progress("tune", budget, wanted=progress and group.rank == 0) as show:
            trials = Trials(runs, judge, group, file, show)
            tuner = Tuner(trials, file, base, model, level=level, direction=direction, seed=seed, compiled=compiled)
            return tuner.tune()


def _check_choice(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise OptionError(
            f"{name} is {' or '.join(map(repr, legal))}, got {value!r}.{did_you_mean(str(value), legal, 1)}"
        )


def _digest_of(model: nn.Module) -> str:
    """A digest of the names and shapes of a model's parameters."""
    shapes = [(name, list(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _file(path: str | os.PathLike[str] | None, identity: Mapping[str, Any], group: Agreement) -> ResumeFile:
    """The file, which rank 0 reads and writes."""
    file, error = ResumeFile(None, identity), None
    if group.rank == 0:
        try:
            file = ResumeFile(path, identity)
        except TorchPromoteError as raised:
            error = raised
    kept, error = group.of_first_rank((file.kept, error))
    if error is not None:
        raise error
    file.kept = kept
    return file
