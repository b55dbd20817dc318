"""`make tuned-models`: tunes and trains small models of transformers and timm, and prints the table of docs/tuning.md.

    python tools/tuned_models --models BERT --dtypes bfloat16 --levels op

The models are built from configs and trained on local text and digits, so no network is needed. Each is tuned in
float16 and bfloat16 for a fraction of the error of its logits in that dtype without overrides: half of it at the levels
op and site, and a tenth at the level site.

Exit status: 0; 2 if transformers or timm is not installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import torch
from cases import MODELS, Case, declare_ops_of_torchvision, loss_of
from torch import nn

import torch_promote as tp

#: The levels and the parts of the error that they are tuned for.
_ASKED = (("op", 2), ("site", 2), ("site", 10))
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: How many steps in float32 come before tune: what it tunes is a training on its way.
_WARM_UP = 20
_BATCHES = 4
#: How many batches come after those that are tuned on, for tune to hold out.
_HELD_OUT = 5 * _BATCHES
_LOSS_SCALE = 1024.0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(prog="tools/tuned_models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="", help="only models whose name contains this")
    parser.add_argument("--dtypes", nargs="*", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--levels", nargs="*", choices=("op", "site"), default=["op", "site"])
    parser.add_argument("--budget", type=int, default=60, help="runs of tune (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps of training (default: %(default)s)")
    options = parser.parse_args(argv)
    missing = [name for name in ("transformers", "timm") if find_spec(name) is None]
    if missing:
        print(f"tools/tuned_models: error: {' and '.join(missing)} not installed: make tuned-models", file=sys.stderr)
        return 2
    declare_ops_of_torchvision()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the frameworks
    print(f"torch {torch.__version__}, transformers {version('transformers')}, timm {version('timm')}\n")
    asked = [(level, part) for level, part in _ASKED if level in options.levels]
    cases = [case for case in MODELS if options.models.lower() in case.name.lower()]
    head_is_printed = False
    for case in cases:
        for dtype in options.dtypes:
            for row in measure(case, _DTYPES[dtype], asked, budget=options.budget, steps=options.steps):
                if not head_is_printed:
                    print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
                    head_is_printed = True
                print(f"| {' | '.join(row.values())} |", flush=True)
    return 0


def measure(
    case: Case, dtype: torch.dtype, asked: Iterable[tuple[str, int]], *, budget: int, steps: int
) -> Iterator[dict[str, str]]:
    """Yields the cells of a row for each level and part: part 2 tunes for half of the error without overrides.

    "error without" and "error with" are the errors of the logits, and "held out" that on as many other batches.
    "training without" says how far the losses of a training without overrides are from float32's, as a mean over the
    steps; "training with" is the same with the policy that tune found.
    """
    model, step = _step(case, dtype)
    comparison = tp.compare(step, model=model, batches=_BATCHES)
    before = next(metric.error for metric in comparison.metrics if metric.name == "logits")
    float32 = _losses(case, steps, dtype, tp.Policy.named("off"))
    without = _deviation(_losses(case, steps, dtype, tp.Policy.stock()), float32)
    for level, part in asked:
        tolerance = float(f"{before / part:.1e}")
        began = time.monotonic()
        tuning = tp.tune(
            step,
            model=model,
            tolerance={"logits": tolerance},
            metric="logits",
            batches=_BATCHES,
            budget=budget,
            level=level,  # type: ignore[arg-type]
            progress=False,
        )
        seconds = time.monotonic() - began
        held_out = (tuning.certificate.held_out or {}).get("logits")
        yield {
            "model": case.name,
            "dtype": str(dtype).removeprefix("torch."),
            "level": level,
            "error without": f"{before:.1e}",
            "tolerance": f"{tolerance:.1e}",
            "overrides": _describe(tuning),
            "error with": f"{tuning.errors['logits']:.1e}",
            "held out": ("-" if held_out is None else f"{held_out:.1e}") + ("" if tuning.met else ", not met"),
            "proved": tuning.certificate.kind,
            "runs": str(tuning.runs),
            "seconds": f"{seconds:.0f}",
            "training without": f"{without:.1e}",
            "training with": f"{_deviation(_losses(case, steps, dtype, tuning.policy), float32):.1e}",
        }


def _describe(tuning: tp.types.Tuning) -> str:
    """The overrides if they are few, or else how many candidates have one."""
    if tuning.level == "op":
        names = [_short(op) for op in tuning.overrides]
    else:
        names = [f"{module}: {_short(op)}" for module, table in tuning.overrides.items() for op in table]
    if len(names) <= 3:
        return ", ".join(f"`{name}`" for name in sorted(names))
    count = len(next(trial for trial in reversed(tuning.trials) if trial.passed).overrides)
    return f"{count} of {len(tuning.candidates)} {tuning.level}s"


def _short(op: str) -> str:
    return op.removeprefix("aten::").partition(".")[0]


def _step(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    """Returns a model after some steps in float32, and a forward and backward of it."""
    training = _Training(case, _WARM_UP + _BATCHES + _HELD_OUT)
    for number in range(_WARM_UP):
        training.step(number)
    model, batches = training.model, training.batches[_WARM_UP:]

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs, labels = batches[number]
        with torch.autocast("cpu", dtype):
            logits = case.logits(model, inputs)
            loss = loss_of(logits, labels)
        loss.backward()
        return {"loss": loss, "logits": logits}

    return model, step


@dataclass
class _Training:
    """A training of a model from its beginning."""

    case: Case
    steps: int
    seed: int = 0
    batches: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.case.make()
        self.batches = self.case.batches(self.steps, self.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.case.learning_rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=_LOSS_SCALE)

    def step(self, number: int, dtype: torch.dtype = torch.bfloat16, policy: tp.Policy | None = None) -> float:
        """Trains a step and returns the loss; without a policy in float32."""
        inputs, labels = self.batches[number]
        torch.manual_seed(number)  # of dropout
        policy = policy or tp.Policy.named("off")
        with tp.my_autocast("cpu", dtype, policy=policy, model=self.model):
            loss = loss_of(self.case.logits(self.model, inputs), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return float(loss.detach())


def _losses(case: Case, steps: int, dtype: torch.dtype, policy: tp.Policy) -> torch.Tensor:
    training = _Training(case, steps)
    return torch.tensor([training.step(number, dtype, policy) for number in range(steps)])


def _deviation(losses: torch.Tensor, reference: torch.Tensor) -> float:
    return float(((losses - reference).abs() / reference.abs()).mean())


if __name__ == "__main__":
    sys.exit(main())
