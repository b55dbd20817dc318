"""A GPT that overflows in float16: find the op, find the smallest set of overrides, and train with the saved policy.

    python examples/tune_gpt.py

The model and the text are those of train_gpt.py, but the head starts with larger weights, and the loss has label
smoothing and a term for the softmax's normaliser. Under PyTorch's op list for the CPU, its first loss in float16 is
infinite. `find_nonfinite` names the op, `tune` finds the overrides that bring the loss within a tolerance of float32's,
and a training with the saved policy is compared with one in float32. Needs rich, matplotlib and jinja2: pip install
torch-promote[demo,trace].

Exit status: 0 if each loss is within the tolerance, 1 if one is not, 2 for an invalid command line.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext

# As in train_gpt.py: before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import torch_promote as tp

try:
    import jinja2  # noqa: F401 (the page of the report needs it)
    from rich.console import Console

    from gpt import report, tuned_report
except ModuleNotFoundError as missing:
    package = (missing.name or "").partition(".")[0]
    print(f"tune_gpt.py: error: {package} is not installed: pip install {package}", file=sys.stderr)
    sys.exit(2)
from gpt.data import SYMBOLS, Batches, Corpus, stdlib_corpus
from gpt.model import GPT, Config
from gpt.options import parse, parser_of
from gpt.smoothed_loss import smoothed_loss
from gpt.train import Region, Run, train

BATCH = 8
LEARNING_RATE = 1e-3
#: A power of 2, which is exact in float32. With PyTorch's default of 65536, float16 would skip its first steps.
LOSS_SCALE = 1024.0
#: The factor by which the head's initial weights are larger than train_gpt.py's.
HEAD_GAIN = 25.0
#: The number of batches per trial of tune, each with an optimizer step.
TUNED_BATCHES = 4
#: The number of steps that show the failure of float16 without overrides.
STEPS_OF_FAILURE = 20
FP32, LOW, TUNED = "float32", "float16", "float16, tuned"


def start(name: str, region: Region, seed: int) -> Run:
    """Returns a new run. The same seed gives the same weights."""
    torch.manual_seed(seed)
    model = GPT(Config(symbols=len(SYMBOLS)))
    with torch.no_grad():
        model.head.weight.mul_(HEAD_GAIN)
    scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
    return Run(name, region, "cpu", model, scaler, loss_of=smoothed_loss, learning_rate=LEARNING_RATE)


def float16(policy: tp.Policy | None = None) -> Region:
    """Returns a function that makes float16 regions with the policy, or with the current one for None."""
    return lambda: tp.my_autocast("cpu", torch.float16, policy=policy)


def tune(corpus: Corpus, seed: int, tolerance: float, budget: int) -> tp.types.Tuning:
    """Finds the overrides that a few steps of training need."""
    run = start(TUNED, float16(), seed)
    batches = make_batches(corpus, seed)
    taken = [batches.next() for _ in range(4 * TUNED_BATCHES)]  # the rest verifies

    def step(number: int) -> torch.Tensor:
        run.backward(*taken[number])
        run.update()
        return run.loss

    return tp.tune(
        step,
        model=run.model,
        tolerance=tolerance,
        batches=TUNED_BATCHES,
        budget=budget,
        restore=(run.optimizer, run.scaler),
    )


def make_batches(corpus: Corpus, seed: int) -> Batches:
    """Returns the batches of a training, from the first one."""
    return Batches(corpus, BATCH, Config.context, seed, "cpu")


def find_origin(corpus: Corpus, seed: int) -> tp.types.NonfiniteReport:
    """Runs one step in float16 under find_nonfinite."""
    run = start(LOW, float16(), seed)
    with tp.find_nonfinite(run.model) as found:
        run.backward(*make_batches(corpus, seed).next())
    return found


def main(argv: list[str] | None = None) -> int:
    """Finds, tunes, trains, compares and reports; returns the exit status."""
    arguments = parse(parser_of("tune_gpt.py", __doc__ or ""), argv)
    seed, tolerance, out = arguments.seed, arguments.tolerance, arguments.out
    try:
        corpus = stdlib_corpus()
    except FileNotFoundError as error:
        print(f"tune_gpt.py: error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    low = start(LOW, float16(), seed)
    subtitle = f"{low.model.size():,} parameters, cpu, float16, seed {seed}, torch {torch.__version__}"
    say(f"{len(corpus.ids):,} characters from {corpus.files} files of the standard library\n{subtitle}\n")

    say("1. Train in float16 under PyTorch's op list for the CPU.")
    for _ in train([low], low, make_batches(corpus, seed), min(STEPS_OF_FAILURE, arguments.steps)):
        pass
    say(f"   {tuned_report.failure(low, LOSS_SCALE)}\n")

    say("2. find_nonfinite: find the first inf or NaN.")
    found = find_origin(corpus, seed)
    say(tuned_report.indent(str(found)) + "\n")

    share = tuned_report.percent(tolerance)
    say(f"3. tune: the smallest set of overrides that keeps {TUNED_BATCHES} steps within {share} of float32.")
    try:
        tuning = tune(corpus, seed, tolerance, arguments.budget)
    except tp.errors.TuningError as error:
        print(f"tune_gpt.py: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    policy, page, plot = (out / f"tune_gpt.{suffix}" for suffix in ("toml", "html", "png"))
    tuning.save(policy)
    tuning.save(page)
    say(tuned_report.indent(str(tuning)) + "\n")

    say(f"4. Train {arguments.steps} steps with {policy}, and in float32.")
    runs = [start(FP32, nullcontext, seed), start(TUNED, float16(tp.Policy.load(policy)), seed)]
    report.show_progress(
        console, runs, train(runs, runs[0], make_batches(corpus, seed), arguments.steps), arguments.steps
    )
    say("")
    reference, tuned = runs
    console.print(tuned_report.results_table([reference, low, tuned], reference, LOSS_SCALE))
    deviations = tuned_report.deviations(tuned, reference)
    within = max(deviations) <= tolerance
    say(f"\n{tuned_report.verdict(deviations, policy, tolerance)}")
    tuned_report.save_plot(plot, reference, tuned, low, tolerance, subtitle)
    say(f"{time.monotonic() - began:.0f} s. The policy, tune's report and the plot: {policy}, {page}, {plot}")
    return 0 if within else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
