"""Trains a small GPT in float32, in bfloat16, in float8 everywhere, and in float8 where tune allows it.

    python examples/float8_gpt.py
    python examples/float8_gpt.py --recipe float8:tensorwise --seed 1

The model and the text are those of train_gpt.py. After a few steps in bfloat16, `tune` looks for the largest set of
linear layers that may run in float8, with the logits at most twice as far from float32's as in bfloat16. Then four
trainings go side by side from the same weights on the same batches. A CPU shows the numbers of float8, not its speed.
Needs rich, matplotlib and jinja2: pip install rich torch-promote[trace].

Exit status: 0 if the last loss in tuned float8 is within the tolerance of bfloat16's, 1 if not, 2 for a wrong command.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

# As in train_gpt.py: before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import torch_promote as tp

try:
    import jinja2  # noqa: F401 (the page of the report needs it)
    from rich.console import Console

    from gpt import report
    from gpt.float8_report import Float8Report
except ModuleNotFoundError as missing:
    package = (missing.name or "").partition(".")[0]
    print(f"float8_gpt.py: error: {package} is not installed: pip install {package}", file=sys.stderr)
    sys.exit(2)
from gpt.data import SYMBOLS, Batches, Corpus, stdlib_corpus
from gpt.model import Config
from gpt.options import parse, parser_of
from gpt.train import Run, start_runs, train

BATCH = 8
#: At the rate of train_gpt.py, two trainings that round differently drift apart within 300 steps.
LEARNING_RATE = 1e-3
#: The number of steps in bfloat16 before tune: new weights say little about the layers.
STEPS_BEFORE_TUNE = 50
#: The number of batches per trial of tune.
TUNED_BATCHES = 4
#: How many times further from float32's the logits may be than in bfloat16.
FACTOR = 2.0
FP32, BF16, FLOAT8, TUNED = "float32", "bfloat16", "float8 everywhere", "float8, tuned"


def tune(run: Run, corpus: Corpus, seed: int, recipe: str, budget: int) -> tp.types.Tuning:
    """Finds the layers of a model in training that may run in float8."""
    batches = Batches(corpus, BATCH, Config.context, seed, "cpu")
    for _ in train([run], run, batches, STEPS_BEFORE_TUNE):
        pass
    taken = [batches.next()[0] for _ in range(4 * TUNED_BATCHES)]  # the rest verifies

    def step(number: int) -> torch.Tensor:
        with torch.no_grad(), run.region():
            logits: torch.Tensor = run.model(taken[number])
        return logits

    in_bfloat16 = tp.compare(step, model=run.model, batches=TUNED_BATCHES, progress=False)
    tolerance = FACTOR * in_bfloat16.metrics[0].error
    speed: dict[str, Any] = {"level": "module", "direction": "speed", "formats": ("lower", recipe)}
    return tp.tune(step, model=run.model, tolerance=tolerance, batches=TUNED_BATCHES, budget=budget, **speed)


def main(argv: list[str] | None = None) -> int:
    """Tunes, trains, compares and reports; returns the exit status."""
    parser = parser_of("float8_gpt.py", __doc__ or "")
    recipes = ("float8:tensorwise", "float8:rowwise", "float8:rowwise_with_gw_hp")
    parser.add_argument("--recipe", choices=recipes, default="float8:rowwise", help="default: %(default)s")
    arguments = parse(parser, argv)
    seed, steps, recipe = arguments.seed, arguments.steps, arguments.recipe
    policy, page, plot = (arguments.out / f"float8_gpt.{suffix}" for suffix in ("toml", "html", "png"))
    console, began = Console(highlight=False), time.monotonic()
    say = partial(console.print, soft_wrap=True, markup=False)

    region = partial(tp.my_autocast, "cpu", torch.bfloat16)
    regions = {FP32: nullcontext, BF16: region, FLOAT8: partial(region, overrides={"linear": recipe}), TUNED: region}
    config, rate = Config(symbols=len(SYMBOLS)), LEARNING_RATE
    start = partial(start_runs, regions, config, device="cpu", seed=seed, scale_loss=False, learning_rate=rate)
    runs = start()
    everyone, low, tuned = list(runs.values()), runs[BF16], runs[TUNED]
    title = f"A small GPT, {recipe}, {low.model.size():,} parameters, cpu, seed {seed}, torch {torch.__version__}"
    say(f"{title}\n\n1. tune: the layers that may run in float8.")
    try:
        corpus = stdlib_corpus()
        tuning = tune(start()[BF16], corpus, seed, recipe, arguments.budget)
    except (FileNotFoundError, tp.errors.TuningError) as error:
        print(f"float8_gpt.py: error: {error}", file=sys.stderr)
        return 1
    tuning.save(policy)
    say(f"{tuning.content().verdict} {tuning.certificate.text}\n\n2. Train {steps} steps four times.")

    tuned.region = partial(region, policy=tp.Policy.load(policy), model=tuned.model)
    batches = Batches(corpus, BATCH, config.context, seed, "cpu")
    report.show_progress(console, everyone, train(everyone, low, batches, steps), steps)
    result = Float8Report(title, everyone, tuning, arguments.tolerance)
    print(f"\n{result}")
    result.save(page)
    result.plot().savefig(plot, dpi=144)
    say(f"{time.monotonic() - began:.0f} s. The policy, the page and the plot: {policy}, {page}, {plot}")
    return 0 if result.content().good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
