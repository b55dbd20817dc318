"""The features of a soak that look into a program (traces, checks), and those that make code and custom ops.

The twins in STOCK do the same without torch_promote, for what PyTorch itself keeps.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from features import FEATURES, Feature, X, feature, new_model, new_overrides, step

import torch_promote as tp

__all__ = ["ALONE", "STOCK"]

#: Features that make PyTorch itself grow. They are left out of a run of all features, and run with their twins alone.
ALONE = ("new_custom_ops", "compiles")

#: What these features do without torch_promote, by their names.
STOCK: dict[str, Feature] = {}


@feature
def traces(draw: random.Random, number: int) -> None:
    """Trace and find_nonfinite of new models."""
    model = new_model(draw)
    with tp.trace(model, values=draw.random() < 0.3) as report, tp.my_autocast("cpu", overrides=new_overrides(draw)):
        step(model)
    str(report)
    with tp.find_nonfinite(model) as found, tp.my_autocast("cpu", torch.float16):
        model(X * 1e5)
    str(found)


@feature
def checks(draw: random.Random, number: int) -> None:
    """Crosscheck and check_casts of new models."""
    model = new_model(draw)
    with tp.crosscheck() as report, tp.my_autocast("cpu", overrides={"linear": draw.choice(("fp32", "float16"))}):
        step(model)
    assert report.ok, report
    with tp.check_casts(), tp.my_autocast("cpu"):
        model(X)
        model(X)


@feature
def unused_overrides(draw: random.Random, number: int) -> None:
    """Warnings of overrides without effect, from new lines of code."""
    code = f"with tp.my_autocast('cpu', overrides={{'mm': 'fp32'}}):\n    X @ X  # {number}\n"
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default", tp.UnusedOverrideWarning)
        exec(compile(code, f"<code {number}>", "exec"), {"tp": tp, "X": X, "__name__": f"code{number}"})


@contextlib.contextmanager
def _custom_op(name: str) -> Iterator[Any]:
    library = torch.library.Library("soaked", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
    try:
        yield getattr(torch.ops.soaked, name)
    finally:
        library._destroy()


def _use_with_policies(name: str, op: Any, draw: random.Random) -> None:
    with tp.register_policy(f"soaked::{name}", draw.choice(("lower", "fp32"))), tp.my_autocast("cpu"):
        op(X)
    with tp.my_autocast("cpu", overrides={f"soaked::{name}": "float16", **new_overrides(draw)}):
        op(X)


@feature
def custom_ops(draw: random.Random, number: int) -> None:
    """Custom ops with policies, defined again and again under a few names."""
    name = f"again{number % 8}"
    with _custom_op(name) as op:
        _use_with_policies(name, op, draw)


@feature
def new_custom_ops(draw: random.Random, number: int) -> None:
    """Custom ops with policies, each under a new name."""
    name = f"op{number}"
    with _custom_op(name) as op:
        _use_with_policies(name, op, draw)


def _stock_custom_ops(draw: random.Random, number: int) -> None:
    with _custom_op(f"op{number}") as op, torch.autocast("cpu"):
        op(X)
        op(X)


STOCK["new_custom_ops"] = _stock_custom_ops


def _compiled(region: Any, number: int) -> None:
    def function(x: Any) -> Any:
        with region():
            return x @ x

    torch.compile(function, backend="eager")(X)
    torch._dynamo.reset()


@feature
def compiles(draw: random.Random, number: int) -> None:
    """Functions that open a region, compiled anew."""
    _compiled(lambda: tp.my_autocast("cpu"), number)


STOCK["compiles"] = lambda draw, number: _compiled(lambda: torch.autocast("cpu"), number)

assert set(STOCK) == set(ALONE) <= set(FEATURES)
