"""The suite `models`: forwards, training steps and an evaluation loop of small models, each forward in a region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial

from torch import nn

import torch_promote as tp
from torch_promote.bench.by_hand import cast_before
from torch_promote.bench.cases import ALREADY_CAST, HAND, LOW, OURS, PLAIN, STOCK, Case, Prepared, Settings
from torch_promote.bench.steps import MODELS, Region, Step, Subject, evaluate, forward, measured, subject, train
from torch_promote.bench.timing import stopwatch

__all__ = ["cases", "evaluation_steps", "forward_steps", "prepare_steps", "training_steps"]

#: Makes the steps of all contenders.
_Steps = Callable[[Subject, Region, Region], Mapping[str, Step]]


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite."""
    for model in MODELS:
        yield Case("models", f"{model}, forward", partial(_prepare, model, forward_steps))
        yield Case("models", f"{model}, forward and backward", partial(_prepare, model, training_steps))
    yield Case("models", "MLP, evaluation loop", partial(_prepare, "MLP", evaluation_steps))


def _prepare(model: str, steps: _Steps, settings: Settings) -> Prepared:
    stock, ours = (partial(autocast, settings.device, LOW) for autocast in (tp.stock_autocast, tp.my_autocast))
    return prepare_steps(model, lambda made: steps(made, stock, ours), settings)


def prepare_steps(model: str, steps: Callable[[Subject], Mapping[str, Step]], settings: Settings) -> Prepared:
    """Prepares a case of a model. It also measures casts and memory.

    Args:
        model: A key of `MODELS`.
        steps: Makes the contenders' steps from the model.
        settings: The device, and whether the model is tiny.
    """
    made = subject(model, settings)
    contenders = steps(made)
    timers = {name: stopwatch(step, {}, settings) for name, step in contenders.items()}
    weights = [*made.net.parameters(), *made.by_hand.parameters()]
    return Prepared(timers, (HAND, ALREADY_CAST), partial(measured, contenders, made, settings.device), weights)


def forward_steps(made: Subject, stock: Region, ours: Region, graph: bool = False) -> dict[str, Step]:
    """Makes forwards.

    Args:
        made: The model.
        stock: Makes stock's regions.
        ours: Makes ours.
        graph: Whether to record a graph.
    """
    return {
        STOCK: forward(made.net, made.x, stock, graph),
        OURS: forward(made.net, made.x, ours, graph),
        HAND: forward(made.by_hand, made.x, graph=graph),
        ALREADY_CAST: forward(cast_before(made.by_hand), made.x, graph=graph),
        PLAIN: forward(made.net, made.x, graph=graph),
    }


def training_steps(
    made: Subject, stock: Region, ours: Region, batches: int = 1, around: bool = False
) -> dict[str, Step]:
    """Makes training steps.

    Args:
        made: The model.
        stock: Makes stock's regions.
        ours: Makes ours.
        batches: The number of forwards and backwards in a step.
        around: Whether one region is around all of them, and not one in each forward.
    """

    def step(net: nn.Module, region: Region = nullcontext) -> Step:
        return train(made, net, nullcontext if around else region, batches, region if around else nullcontext)

    return {
        STOCK: step(made.net, stock),
        OURS: step(made.net, ours),
        HAND: step(made.by_hand),
        ALREADY_CAST: step(cast_before(made.by_hand)),
        PLAIN: step(made.net),
    }


def evaluation_steps(made: Subject, stock: Region, ours: Region) -> dict[str, Step]:
    """Makes evaluation loops. The version by hand casts the weights once, because they do not change.

    Args:
        made: The model.
        stock: Makes stock's regions.
        ours: Makes ours.
    """
    return {
        STOCK: evaluate(made.net, made.x, stock),
        OURS: evaluate(made.net, made.x, ours),
        HAND: evaluate(cast_before(made.by_hand), made.x),
        PLAIN: evaluate(made.net, made.x),
    }
