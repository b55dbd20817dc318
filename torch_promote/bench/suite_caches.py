"""The suite `caches`: workloads for the modes of the cast cache, compared with stock, whose cache has one mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch_promote as tp
from torch_promote.bench.cases import LOW, Case, Prepared, Settings
from torch_promote.bench.steps import Region, Step, Subject
from torch_promote.bench.suite_models import evaluation_steps, prepare_steps, training_steps

__all__ = ["cases"]

_MODES = ("weights", "persistent", "all", "none")

_Steps = Callable[[Subject, Region, Region], Mapping[str, Step]]

# The model and its steps, by the name of the workload.
_WORKLOADS: dict[str, tuple[str, _Steps]] = {
    "MLP, evaluation loop": ("MLP", evaluation_steps),
    "MLP, four batches to a step": ("MLP", partial(training_steps, batches=4)),
    "Llama-like, evaluation loop": ("Llama-like", evaluation_steps),
    "Llama-like, forward and backward": ("Llama-like", training_steps),
    "Llama-like, no rotary, forward and backward": ("Llama-like, no rotary", training_steps),
}


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite."""
    for name, (model, steps) in _WORKLOADS.items():
        for mode in _MODES:
            yield Case("caches", f'{name}, cache="{mode}"', partial(_prepare, model, steps, mode))


def _prepare(model: str, steps: _Steps, mode: str, settings: Settings) -> Prepared:
    stock = partial(tp.stock_autocast, settings.device, LOW, cache_enabled=mode != "none")
    ours = partial(tp.my_autocast, settings.device, LOW, cache=mode)
    return prepare_steps(model, lambda made: steps(made, stock, ours), settings)
