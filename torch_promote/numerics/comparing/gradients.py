"""The backwards of a comparison, and the resulting gradients of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_promote.numerics.comparing.comparison import GradientError
from torch_promote.numerics.comparing.impacts import Impacts, random_cotangents
from torch_promote.numerics.ranges.unnoticed import unnoticed
from torch_promote.numerics.runs.results import distance, named_tensors

__all__ = ["Backwards", "errors_of", "watch_gradients"]


class Backwards:
    """Runs the backwards that a step has not run itself.

    Attributes:
        count: The number of backwards, including those of the step.
        random: Whether random cotangents replaced a loss.
        failed: The error of a backward that the step does not run itself, or "".
        gradients: Copies of the parameters' gradients after the last backward, by name.
    """

    def __init__(self) -> None:
        self.count = 0
        self.random = False
        self.failed = ""
        self.gradients: dict[str, torch.Tensor] = {}

    def after_step(self, result: Any, has_run: bool, impacts: Impacts | None = None) -> None:
        """Runs a backward on the result of a step.

        Args:
            result: The result.
            has_run: Whether the step ran a backward itself.
            impacts: Receives the gradients.
        """
        tensors = named_tensors(result)
        loss = _loss_of(tensors)
        generator = torch.Generator().manual_seed(0)
        if has_run:
            self.count += 1
            if impacts is not None:
                impacts.settle(loss)
            return
        if loss is not None and not loss.requires_grad and impacts is not None:
            loss = impacts.scalar_like(loss) or loss
        if loss is not None and loss.requires_grad:
            of, cotangents = [loss], None
        else:
            of = [one for one in tensors.values() if one.requires_grad and one.is_floating_point()]
            if not of:
                return
            cotangents = random_cotangents(of, generator)
            self.random = True
            if impacts is not None:
                impacts.random = True
        times = impacts.backwards if impacts is not None and impacts.random else 1
        for number in range(times):
            if number and cotangents is not None:
                cotangents = random_cotangents(of, generator)
            self.count += 1
            try:
                torch.autograd.backward(of, cotangents, retain_graph=number < times - 1)
            except RuntimeError as error:  # a program without a backward may overwrite tensors that it would need
                if number:
                    break
                self.failed = str(error).partition("\n")[0]
                if impacts is not None:
                    impacts.settle(loss, failed=True)
                return
            if impacts is not None:
                impacts.end_backward()
        if impacts is not None:
            impacts.settle(None)


def _loss_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The loss among the results of a step: the one named "loss", or the only number."""
    if "loss" in tensors and tensors["loss"].numel() == 1:
        return tensors["loss"]
    numbers = [one for one in tensors.values() if one.numel() == 1 and one.is_floating_point()]
    return numbers[0] if len(numbers) == 1 else None


@contextlib.contextmanager
def watch_gradients(model: nn.Module, backwards: Backwards) -> Iterator[None]:
    """Copies the gradients of parameters in a block, before the program can drop them."""
    handles = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_leaf:

            def keep(parameter: torch.Tensor, name: str = name) -> None:
                with unnoticed():
                    if parameter.grad is not None:
                        backwards.gradients[name] = _local(parameter.grad).detach().clone()

            handles.append(parameter.register_post_accumulate_grad_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def errors_of(candidate: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[GradientError]:
    """Returns the error of each gradient, largest first; infinite if only one side has the gradient."""
    found = []
    for name in {**reference, **candidate}:
        ours, theirs = candidate.get(name), reference.get(name)
        norm = 0.0 if theirs is None else float(torch.linalg.vector_norm(theirs.double()))
        error = float("inf") if ours is None or theirs is None else distance(ours, theirs)
        found.append(GradientError(name, error, norm))
    return sorted(found, key=lambda one: (-one.error, one.name))
