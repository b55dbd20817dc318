"""Measures `infer` on the calls of PyTorch's op database: the overloads that have a rule, and all wrong answers.

    cd tests && python -m helpers.op_db_coverage [--samples N] [--backward] [--variants]

Without options: every sample input of every op, in every dtype that it supports on the CPU, forward. `--backward` lets
inputs require grad and runs the backward as well, `--variants` runs the in-place and out= variants. Exits 1 if an
answer is wrong or fewer than 95% of the overloads have a rule.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_promote.reference.ops.infer import Inference, infer

#: What to do with a sample.
Run = Callable[[OpInfo, SampleInput], None]
#: What is asked of the rules.
LEAST_COVERED = 0.95


@dataclass
class Measure:
    """The counts of a measurement, by aten overload; refused samples by the name of the op."""

    ruled: Counter[str] = field(default_factory=Counter)
    unruled: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def covered(self) -> float:
        """The share of the distinct overloads that have a rule."""
        return len(self.ruled) / max(1, len(self.ruled) + len(self.unruled))

    def __str__(self) -> str:
        lines = [
            f"{self.samples} samples, of which PyTorch refuses {self.refused.total()}",
            f"{self.ruled.total() + self.unruled.total()} calls of aten ops",
            f"{len(self.ruled) + len(self.unruled)} distinct aten overloads",
            f"{len(self.ruled)} with a rule ({self.covered:.2%}), {len(self.unruled)} without",
            f"{len(self.wrong)} overloads with wrong answers",
        ]
        lines += [f"no rule: {name} ({count} calls)" for name, count in sorted(self.unruled.items())]
        lines += [f"wrong: {name}: {text}" for name, text in sorted(self.wrong.items())]
        return "\n".join(lines)


class Measuring(TorchDispatchMode):
    """Infers each aten op that arrives before it runs, and compares afterwards."""

    def __init__(self, measure: Measure) -> None:
        super().__init__()
        self.measure = measure

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        name = str(func)
        try:
            inferred = infer(func, args, kwargs)
        except Exception as error:
            result = func(*args, **kwargs)
            self.measure.ruled[name] += 1
            self.measure.wrong.setdefault(name, f"{described((args, kwargs))} raises {error!r}")
            return result
        result = func(*args, **kwargs)
        if not inferred:
            self.measure.unruled[name] += 1
            return result
        assert isinstance(inferred, Inference)
        self.measure.ruled[name] += 1
        difference = differs(inferred, func, result)
        if difference is not None:
            self.measure.wrong.setdefault(name, f"{described((args, kwargs))} by {inferred.rule!r}: {difference}")
        return result


def differs(inferred: Inference, op: Any, result: Any) -> str | None:
    """The difference between an inference and a result, or None."""
    returns = op._schema.returns
    results = (
        [leaf for leaf in tree_leaves(result) if leaf is None or isinstance(leaf, torch.Tensor)] if returns else []
    )
    dtypes = tuple(None if leaf is None else leaf.dtype for leaf in results)
    if inferred.dtypes != dtypes:
        return f"dtypes {inferred.dtypes} against {dtypes}"
    if inferred.shape is not None and inferred.shape != tuple(results[0].shape):
        return f"shape {inferred.shape} against {tuple(results[0].shape)}"
    if inferred.strides is not None and inferred.strides != results[0].stride():
        return f"strides {inferred.strides} against {results[0].stride()}"
    return None


def described(tree: Any) -> str:
    """The arguments of a call, with dtype, shape and strides for tensors."""

    def describe(tensor: torch.Tensor) -> str:
        strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{strides}"

    return str(tree_map_only(torch.Tensor, describe, tree))


def forward(op: OpInfo, sample: SampleInput) -> None:
    """Runs a sample."""
    op(sample.input, *sample.args, **sample.kwargs)


def backward(op: OpInfo, sample: SampleInput) -> None:
    """Runs a sample and its backward."""
    outputs = [out for out in tree_leaves(op(sample.input, *sample.args, **sample.kwargs)) if torch.is_tensor(out)]
    outputs = [out for out in outputs if out.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])


def variants(op: OpInfo, sample: SampleInput) -> None:
    """Runs a sample's in-place and out= variants, where there are any."""
    inplace = op.get_inplace()
    if inplace is not None:
        copy = tree_map_only(torch.Tensor, torch.clone, (sample.input, sample.args, sample.kwargs))
        inplace(copy[0], *copy[1], **copy[2])
    if op.supports_out:
        made = op(sample.input, *sample.args, **sample.kwargs)
        op(sample.input, *sample.args, **sample.kwargs, out=tree_map_only(torch.Tensor, torch.empty_like, made))


def measure(ops: Iterable[OpInfo] = op_db, run: Run = forward, limit: int | None = None) -> Measure:
    """Measures over sample inputs.

    Args:
        ops: Entries of the op database.
        run: What to do with a sample.
        limit: The maximum number of samples per op and dtype; None for all.

    Returns:
        The counts.
    """
    result = Measure()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, sample in samples(ops, run is backward, limit):
            result.samples += 1
            try:
                with Measuring(result):
                    run(op, sample)
            except Exception:
                # An op that needs a GPU, an in-place op whose result needs another dtype: PyTorch's affair. What was
                # dispatched until then has been compared.
                result.refused[op.name] += 1
    return result


def samples(ops: Iterable[OpInfo], grad: bool, limit: int | None) -> Iterator[tuple[OpInfo, SampleInput]]:
    """Yields samples of every dtype that an op supports, or is differentiable in."""
    for op in ops:
        if grad and not op.supports_autograd:
            continue
        torch.manual_seed(0)
        for dtype in sorted(op.supported_dtypes("cpu"), key=str):
            if not grad or dtype.is_floating_point or dtype.is_complex:
                # Not through op.sample_inputs, which walks the stack for each sample to name the test that it is for.
                for sample in itertools.islice(op.sample_inputs_func(op, "cpu", dtype, grad), limit):
                    yield op, sample


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, help="how many samples to take of each op and dtype (default: all)")
    parser.add_argument("--backward", action="store_true", help="run the backward too")
    parser.add_argument("--variants", action="store_true", help="run in-place and out= variants instead")
    options = parser.parse_args()
    run = backward if options.backward else variants if options.variants else forward
    result = measure(run=run, limit=options.samples)
    print(result)
    return 1 if result.wrong or result.covered < LEAST_COVERED else 0


if __name__ == "__main__":
    sys.exit(main())
