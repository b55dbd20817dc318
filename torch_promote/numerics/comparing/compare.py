"""`compare`: finds the ops that lose accuracy under a policy, and estimates the effect on the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from torch_promote.errors import OptionError
from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.comparing.rounds import Rounds
from torch_promote.numerics.runs.policy_in_force import present_policy
from torch_promote.numerics.runs.progress import show_progress
from torch_promote.numerics.runs.step_runs import StepRuns
from torch_promote.policy.policy import Policy

__all__ = ["REFERENCE", "compare", "compare_runs"]

#: The policy of the reference "fp32": the step without casts.
REFERENCE = "off"


def compare(
    step: Callable[..., Any],
    *,
    model: nn.Module,
    reference: Policy | str = "fp32",
    candidate: Policy | str | None = None,
    gradients: bool = False,
    batches: int = 1,
    restore: Iterable[Any] = (),
    progress: bool = True,
) -> Comparison:
    """Runs a step under two policies, and reports the errors of the candidate for each op in each module.

    It runs the reference twice and the candidate once, and the reference once more if the gradients of the loss are
    zero. If the results of all calls take more than a quarter of the free memory, it repeats these runs, each time for
    another part of the results.

    Args:
        step: A training or evaluation step: `step()`, or `step(i)` with the number of the batch. It opens its own
            regions, of `my_autocast` or `torch.autocast`, and returns a loss, outputs, or a dict of metrics. If it does
            not run a backward, `compare` runs one on the loss.
        model: The model. Sites are named after its modules.
        reference: A policy, its name or its file; "fp32" is the step without casts.
        candidate: The policy to judge, given like `reference`. None: the current policy, set by `install` or
            `set_default_policy`, or PyTorch's.
        gradients: Whether to compare the gradients of the parameters, too.
        batches: How many times a run calls the step.
        restore: What else the step changes: see `StepState`. Parameters, buffers, gradients, random numbers, and
            optimizers, schedulers and scalers that the step refers to are restored anyway.
        progress: Whether to show a bar, if stderr is a terminal and rich is installed.

    Returns:
        The comparison. All state is restored.

    Raises:
        StepError: Two runs of the reference differ, the step returns nothing to compare, or its changes cannot be
            undone. The message names the cause.
        OptionError: An argument is invalid.
        PolicyError: A policy does not exist.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> def step():
        ...     with torch.autocast("cpu", torch.float16):
        ...         return model(torch.ones(2, 8)).square().mean()
        >>> comparison = compare(step, model=model)
        >>> sorted({site.op for site in comparison.sites})
        ['aten::linear', 'aten::mean', 'aten::square', 'aten::tanh']
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be the nn.Module that the step runs, got {model!r}.")
    of_reference = _policy_of(reference)
    of_candidate = present_policy() if candidate is None else _policy_of(candidate)
    with (
        StepRuns(step, model, batches=batches, restore=restore) as runs,
        show_progress("compare", 3 * batches, wanted=progress) as show,
    ):
        runs.on_step = lambda number: show(number, "")
        return compare_runs(runs, of_reference, of_candidate, gradients=gradients)


def _policy_of(policy: Policy | str) -> Policy:
    return Policy.of(REFERENCE if isinstance(policy, str) and policy == "fp32" else policy)


def compare_runs(
    runs: StepRuns,
    reference: Policy,
    candidate: Policy,
    *,
    gradients: bool = False,
    most_runs: int | None = None,
    strict: bool = True,
) -> Comparison:
    """Compares two policies like `compare`, with the runs of an open `StepRuns`.

    Args:
        runs: The runs. They must have a model.
        reference: The policy of the reference.
        candidate: The policy to judge.
        gradients: Whether to also compare the gradients of the parameters.
        most_runs: The maximum number of runs, 3 or more. The comparison's notes list what they could not cover.
        strict: Whether to raise if two runs of the reference differ. Otherwise `Comparison.noise` has the difference.

    Raises:
        StepError: As `compare`.
    """
    return Rounds(runs, reference, candidate, gradients, most_runs, strict).compare()
