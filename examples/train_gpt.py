"""Trains a small GPT three times from the same seed: in float32, under torch.autocast and under my_autocast.

    python examples/train_gpt.py
    python examples/train_gpt.py --device cuda --steps 2000

The text is the source of Python's own standard library, character by character. The three trainings go side by side on
the same batches; at every step the loss and every gradient under my_autocast are compared with those under
torch.autocast, bit by bit. Needs rich and matplotlib: pip install rich matplotlib.

Exit status: 0 if all bits are the same, 1 if some differ, 2 for an invalid command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

# Let waiting threads sleep. By default they spin, which makes small ops ten times slower on a busy machine. OpenMP
# reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import torch_promote as tp

try:
    from rich.console import Console

    from gpt import report
except ModuleNotFoundError as missing:
    package = (missing.name or "").partition(".")[0]
    print(f"train_gpt.py: error: {package} is not installed: pip install {package}", file=sys.stderr)
    sys.exit(2)
from gpt.data import SYMBOLS, Batches, Corpus, stdlib_corpus
from gpt.model import Config
from gpt.train import Region, Run, start_runs, train

BATCH = 32
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
STOCK, OURS = "torch.autocast", "tp.my_autocast"


def regions(device: str, dtype: torch.dtype) -> dict[str, Region]:
    """Returns the three variants. The last two lines differ only in the name."""
    return {
        "fp32": nullcontext,
        STOCK: lambda: tp.stock_autocast(device, dtype),
        OURS: lambda: tp.my_autocast(device, dtype),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; exits with status 2 and a one-line error if it is invalid."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="train_gpt.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="the autocast dtype (default: that of torch.autocast)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and the batches (default: %(default)s)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", default=Path("out/train_gpt.png"), help="(default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measurements")
    arguments = parser.parse_args(argv)
    problem = find_problem(arguments)
    if problem:
        print(f"train_gpt.py: error: {problem}", file=sys.stderr)
        sys.exit(2)
    return arguments


def find_problem(arguments: argparse.Namespace) -> str:
    """Returns a sentence about the first invalid argument, or "". Creates the folders for the results."""
    if arguments.steps < 1:
        return f"--steps must be at least 1, got {arguments.steps}"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: this PyTorch sees no CUDA device; without the option the training runs on the CPU"
    if arguments.plot.suffix.removeprefix(".") not in report.PLOT_FORMATS:
        return f"--plot {arguments.plot}: the name has to end in one of: {', '.join(sorted(report.PLOT_FORMATS))}"
    for path in filter(None, (arguments.plot, arguments.json)):
        if path.is_dir():
            return f"cannot write {path}: it is a folder"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot write {path}: {error.strerror}"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16, float16."""
    return str(dtype).removeprefix("torch.")


def be_deterministic(device: str) -> None:
    """Makes CUDA choose deterministic kernels: otherwise two stock trainings differ."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def main(argv: list[str] | None = None) -> int:
    """Trains, compares and reports; returns the exit status."""
    arguments = parse(argv)
    device, seed = arguments.device, arguments.seed
    dtype = DTYPES[arguments.dtype] if arguments.dtype else torch.get_autocast_dtype(device)
    be_deterministic(device)
    try:
        corpus = stdlib_corpus()
    except FileNotFoundError as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2

    console = Console(highlight=False)
    config = Config(symbols=len(SYMBOLS))
    batches = Batches(corpus, BATCH, config.context, seed, device)
    runs = start_runs(regions(device, dtype), config, device=device, seed=seed, scale_loss=dtype is torch.float16)
    everyone, stock, ours = list(runs.values()), runs[STOCK], runs[OURS]
    subtitle = (
        f"{stock.model.size():,} parameters, {device}, {dtype_name(dtype)}, seed {seed}, torch {torch.__version__}"
    )
    console.print(f"{len(corpus.ids):,} characters from {corpus.files} files of the standard library", soft_wrap=True)
    console.print(f"{subtitle}\n", soft_wrap=True)

    report.show_progress(console, everyone, train(everyone, stock, batches, arguments.steps), arguments.steps)
    extra = batches.next()
    for run in everyone:
        run.count_casts(*extra)

    console.print()
    console.print(report.results_table(everyone, stock))
    console.print("ms and ratio: medians over the steps", style="dim")
    console.print(f"\n{report.verdict(ours)}", soft_wrap=True)
    report.save_plot(arguments.plot, everyone, stock, subtitle)
    console.print(f"The loss curves: {arguments.plot}", soft_wrap=True)
    if arguments.json:
        report.save_json(arguments.json, settings(arguments, dtype, corpus, stock), everyone, stock)
        console.print(f"All that was measured: {arguments.json}", soft_wrap=True)
    return 0 if ours.comparison.same else 1


def settings(arguments: argparse.Namespace, dtype: torch.dtype, corpus: Corpus, run: Run) -> dict[str, object]:
    """Returns the settings of the whole training for the JSON file."""
    return {
        "torch": torch.__version__,
        "torch_promote": tp.__version__,
        "device": arguments.device,
        "dtype": dtype_name(dtype),
        "steps": arguments.steps,
        "seed": arguments.seed,
        "parameters": run.model.size(),
        "characters": len(corpus.ids),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
