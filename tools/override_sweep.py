"""Runs calls of PyTorch's op database under a casting policy of every op that they call, at any depth; also a script.

    python tools/override_sweep.py --entries add median --samples 2

Each call first runs without autocast, while an observer lists the overloads that it calls, also inside kernels. Then,
for each of these and each casting policy that is legal for it, the call runs with only that override. Its result must
be equal except for rounding, or an error. Corrupted memory shows as a crash or garbage, so the entries run in a forked
process in which freed memory is overwritten.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in (".", "tests", "tools")]

import torch
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from helpers.subprocesses import environment
from torch_promote.observe.observer import observe_dispatch
from torch_promote.observe.ops import facts_of
from torch_promote.parity.samples import op_database
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import CastPolicy
from torch_promote.policy.overrides import legal_policies

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
#: The dtype of the inputs, the policy, and the relative rounding that it may cause. Numbers lose nothing in float64.
PASSES: tuple[tuple[torch.dtype, CastPolicy | torch.dtype, float], ...] = (
    (F32, F64, 1e-2),
    (F32, CastPolicy.lower_precision_fp, 0.5),
    (BF16, CastPolicy.fp32, 0.5),
    (BF16, CastPolicy.promote, 0.5),
)
MODES = {"grad": torch.enable_grad, "inference": torch.inference_mode}
#: Results that rounding changes beyond a bound: random numbers, decompositions that are unique up to signs or bases,
#: differences of nearly equal numbers, and jumps. A crash of these is still a crash.
_ILL_CONDITIONED = re.compile(
    r"""
    linalg\. | svd | pca_lowrank | svd_lowrank | geqrf | ormqr | lu | qr | symeig | logdet | pinverse | cholesky | det
    | triangular_solve | matrix_exp | bernoulli | multinomial | normal | rand | dropout | cauchy | exponential | uniform
    | geometric | log_normal | empty | new_empty | resize | fft\. | stft | istft | asin | acos | arc | atanh | acosh
    | tan | erfinv | logcumsumexp | grid_sampler | cdist | special\. | polygamma | mvlgamma | igamma | digamma | polar
    | torch\.ops\.aten\._safe_softmax
    | nn\.functional\.(?: (feature_alpha_|alpha_)? dropout | rrelu | gumbel | fractional | grid_sample | max_
    | adaptive_max | multi_head | scaled_dot)
    """,
    re.VERBOSE,
)


class Run(NamedTuple):
    """One call under one override, and its problem.

    Attributes:
        entry: The entry of the op database.
        sample: The number of its sample.
        mode: "grad" or "inference".
        op: The overload that has the policy.
        policy: The policy.
        inside: Whether a kernel calls the overload, and not the program or a composite op.
        found: "" if there is no problem; otherwise "crash", or a description of the difference.
    """

    entry: str
    sample: int
    mode: str
    op: str
    policy: str
    inside: bool = False
    found: str = ""


class _Lister:
    """Lists the overloads that are called, and whether a kernel calls them."""

    stock_too = False
    see_through = True

    def __init__(self) -> None:
        self.ops: dict[str, bool] = {}
        self.open: list[bool] = []

    def begin(self, op: Any, args: list[Any]) -> Any:
        name = facts_of(op).name
        inside = bool(self.open) and self.open[-1]
        if any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in tree_leaves(args)):
            self.ops[name] = self.ops.get(name, False) or inside
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        self.open.append(inside or not composite)
        return self

    def end(self, token: object, results: list[Any]) -> None:
        self.open.pop()

    def failed(self, token: object) -> None:
        self.open.pop()


def explained(run: Run) -> bool:
    """Whether a difference may be rounding. Inside a kernel, nothing may be rounded."""
    return run.found != "crash" and not run.inside and _ILL_CONDITIONED.match(run.entry) is not None


def _samples(entry: Any, dtype: torch.dtype, grad: bool, count: int) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    try:
        return list(itertools.islice(entry.sample_inputs_func(entry, "cpu", dtype, grad), count))
    except Exception:  # an entry that this machine cannot make samples of
        return []


def _call(entry: Any, sample: Any, mode: str, region: Any = None) -> list[torch.Tensor] | None:
    """The results of a call, and its gradients; None if it raises."""
    leaves = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(0)
    try:
        with MODES[mode]():
            if region is None:
                result = entry.op(sample.input, *sample.args, **sample.kwargs)
            else:
                with region:
                    result = entry.op(sample.input, *sample.args, **sample.kwargs)
            made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            if mode == "grad":
                wanted = [x.float().sum() for x in made if x.requires_grad and not x.is_complex()]
                if wanted:
                    sum(wanted).backward()  # type: ignore[union-attr]
        grads = [leaf.grad for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
        return [x.detach().clone() for x in (*made, *grads)]
    except Exception:
        return None


def _difference(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor], rounding: float) -> str:
    if len(want) != len(got):
        return f"{len(got)} results instead of {len(want)}"
    for a, b in zip(want, got, strict=True):
        if a.layout is not torch.strided or b.layout is not torch.strided or a.is_nested or a.is_quantized:
            continue
        if a.shape != b.shape:
            return f"the shape {tuple(b.shape)} instead of {tuple(a.shape)}"
        if not (a.is_floating_point() and b.is_floating_point()) or not a.numel():
            continue  # rounding may change which element is the largest
        x, y = a.double(), b.double()
        finite = x.isfinite() & y.isfinite()
        scale = float(x[finite].abs().max()) if finite.any() else 0.0
        if int((~y.isfinite() & x.isfinite()).sum()):
            return "infinities or NaNs"
        error = float((x - y)[finite].abs().max()) if finite.any() else 0.0
        if error > rounding * (scale + 1):
            return f"off by {error:.3g} where values are up to {scale:.3g}"
    return ""


def _work(name: str, samples: int, skip: set[Run]) -> None:
    """Makes the runs of an entry: prints a line before each, and a line after it if it has a problem."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entry = op_database()[name]
    for dtype, policy, rounding in PASSES:
        if dtype not in entry.supported_dtypes("cpu"):
            continue
        for mode in MODES:
            grad = mode == "grad" and entry.supports_autograd
            for number, sample in enumerate(_samples(entry, dtype, grad, samples)):
                lister = _Lister()
                with observe_dispatch(lister):
                    plain = _call(entry, sample, mode)
                again = _call(entry, sample, mode)
                if plain is None or again is None or _difference(plain, again, 0.0):
                    continue
                for op, inside in lister.ops.items():
                    run = Run(name, number, mode, op, str(policy), inside)
                    legal = legal_policies(op)
                    if run in skip or (CastPolicy.fp32 if isinstance(policy, torch.dtype) else policy) not in legal:
                        continue
                    print("run", json.dumps(run), flush=True)
                    region = tp.my_autocast("cpu", policy="off", overrides={exact_key(op): policy})
                    got = _call(entry, sample, mode, region)
                    if got is not None and (found := _difference(plain, got, rounding)):
                        print("bad", json.dumps(run._replace(found=found)), flush=True)
    print("done []", flush=True)


def sweep(name: str, samples: int) -> tuple[int, list[Run]]:
    """Runs an entry of the op database under overrides, in forks of this process, which has run no op yet.

    Args:
        name: The entry.
        samples: The number of its samples.

    Returns:
        The number of runs, and the runs with problems.
    """
    total, wrong, skip = 0, [], set[Run]()
    while True:
        with tempfile.TemporaryFile("w+") as printed:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                try:
                    os.dup2(printed.fileno(), 1)
                    _work(name, samples, skip)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            printed.seek(0)
            lines = [line.split(" ", 1) for line in printed.read().splitlines()]
        made = [Run(*json.loads(text)) for kind, text in lines if kind == "run"]
        wrong += [Run(*json.loads(text)) for kind, text in lines if kind == "bad"]
        total += len(made)
        if not made or lines[-1][0] == "done":  # without a run, the machine cannot run it even without overrides
            return total, wrong
        wrong.append(made[-1]._replace(found="crash"))
        skip.update(made)


def main() -> None:
    """Runs the sweep from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", nargs="*", help="entries of the op database; default: all that take float32")
    parser.add_argument("--samples", type=int, default=2, help="samples of each (default: %(default)s)")
    asked = parser.parse_args()
    if "MALLOC_PERTURB_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], environment(MALLOC_PERTURB_="165"))
    entries = asked.entries or [name for name, entry in op_database().items() if F32 in entry.supported_dtypes("cpu")]
    for number, name in enumerate(entries, 1):
        count, wrong = sweep(name, asked.samples)
        print(f"{number} of {len(entries)}, {name}: {count} runs", flush=True)
        for run in wrong:
            print(f"  {'explained by rounding: ' if explained(run) else ''}{run}", flush=True)


if __name__ == "__main__":
    main()
