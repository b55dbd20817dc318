"""What an iteration of a soak makes: one function for each feature, and new things at each call.

A function gets a random number generator and the iteration's number, which makes its names and policies new ones. What
it makes is garbage when it returns.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp

Feature = Callable[[random.Random, int], None]

#: The features by their names, in the order of the table.
FEATURES: dict[str, Feature] = {}

#: Ops with and without a row in the op table, which any floating policy is legal for.
OPS = (
    "mm", "bmm", "addmm", "linear", "matmul", "exp", "log", "softmax.int", "layer_norm", "tanh", "sin", "cos",
    "sqrt", "rsqrt", "sigmoid", "gelu", "mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor", "sum.dim_IntList",
    "mean.dim", "cumsum", "prod", "norm.Scalar", "baddbmm", "addmv", "dot", "mv",
)  # fmt: skip
POLICIES = ("lower", "fp32", "promote", "keep", "fallthrough", "float64", "float16", torch.bfloat16)
PATTERNS = ("linalg_*", "conv?d", "*_loss", "softm*", "cum*")
FUNCTIONS = (torch.mm, torch.softmax, torch.nn.functional.linear, torch.ops.aten.exp, torch.ops.aten.tanh.default)

X = torch.ones(4, 4)


def feature(function: Feature) -> Feature:
    """Registers a feature under the name of its function."""
    FEATURES[function.__name__] = function
    return function


def new_overrides(draw: random.Random) -> dict[Any, Any]:
    """Returns overrides that hardly any other call returns."""
    return {op: draw.choice(POLICIES) for op in draw.sample(OPS, draw.randint(3, 8))}


def new_model(draw: random.Random) -> nn.Module:
    width = draw.choice((4, 5, 8))
    return nn.Sequential(nn.Linear(4, width), draw.choice((nn.ReLU, nn.Tanh, nn.GELU))(), nn.Linear(width, 4))


def step(model: nn.Module) -> None:
    model(X).float().square().mean().backward()


@feature
def modules(draw: random.Random, number: int) -> None:
    """New modules, trained some steps with new optimizers."""
    model = new_model(draw)
    optimizer = draw.choice((torch.optim.SGD, torch.optim.AdamW))(model.parameters(), lr=0.1, fused=draw.random() < 0.5)
    for _ in range(2):
        with tp.my_autocast("cpu", cache=draw.choice((None, "weights", "all", "none"))):
            step(model)
        optimizer.step()
        optimizer.zero_grad()


@feature
def regions(draw: random.Random, number: int) -> None:
    """Regions with new combinations of options, nested and as decorators."""

    def region() -> Any:
        dtype = draw.choice((None, torch.bfloat16, torch.float16, "bf16"))
        cache = draw.choice((None, "weights", "persistent", "all", "none"))
        return tp.my_autocast(draw.choice(("cpu", ["cpu"])), dtype, enabled=draw.random() < 0.9, cache=cache)

    weight = nn.Parameter(torch.ones(4, 4))
    with region(), region(), torch.autocast("cpu", enabled=draw.random() < 0.5):
        X @ weight
    region()(lambda: X @ weight)()
    repr(region())


@feature
def overrides(draw: random.Random, number: int) -> None:
    """New overrides by name, pattern and function, nested."""
    asked = new_overrides(draw)
    if draw.random() < 0.3:
        asked[draw.choice(PATTERNS)] = draw.choice(("lower", "fp32", "keep"))
    inner = {function: draw.choice(("lower", "fp32")) for function in draw.sample(FUNCTIONS, 2)}
    with tp.my_autocast("cpu", overrides={**asked, "relu": "fp32"}), tp.my_autocast("cpu", overrides=inner):
        torch.relu(X)


@feature
def policies(draw: random.Random, number: int) -> None:
    """New Policy objects: changed, compared, saved, read, opened, made the default."""
    policy = tp.Policy.named(draw.choice(("stock", "cpu", "fp32_safe"))).override(new_overrides(draw))
    str(policy.diff(tp.Policy.stock()))
    with tp.my_autocast("cpu", policy=policy):
        torch.relu(X)
    if draw.random() < 0.2:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"policy{number}.toml"
            policy.save(file)
            with tp.my_autocast("cpu", policy=file):
                torch.relu(X)
    before = tp.set_default_policy(policy)
    with tp.my_autocast("cpu"):
        torch.relu(X)
    tp.set_default_policy(before)


@feature
def registered_policies(draw: random.Random, number: int) -> None:
    """register_policy, replaced and removed."""
    op = draw.choice(("tanh", "sin", "cos", "sqrt", "sigmoid"))
    with tp.register_policy(op, draw.choice(("lower", "fp32", torch.float64))):
        again = tp.register_policy(op, draw.choice(("keep", torch.float16)), device_type="cpu", replace=True)
        with tp.my_autocast("cpu"):
            torch.tanh(X)
        again.remove()


@feature
def rules(draw: random.Random, number: int) -> None:
    """New rules of make_rule, and regions with them."""
    table = {
        pair: draw.choice((torch.float16, torch.float32, torch.float64))
        for pair in ((torch.int32, torch.float16), (torch.int8, torch.float16), (torch.int64, torch.bfloat16))
    }
    rule = tp.make_rule(f"rule {number}", table, over=draw.choice(("torch", "strict", "jax")))
    with tp.promotion(rule):
        torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)


@feature
def promotions(draw: random.Random, number: int) -> None:
    """Promotion regions with new lints, on several default dtypes."""
    events: list[Any] = []
    rule = draw.choice(("torch", "jax", "numpy"))
    default = torch.get_default_dtype()
    torch.set_default_dtype(draw.choice((torch.float32, torch.float64)))
    try:
        with tp.promotion(rule, on_promotion=events.append, matmul=draw.random() < 0.5):
            torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float64) + 1
    finally:
        torch.set_default_dtype(default)


@feature
def module_policies(draw: random.Random, number: int) -> None:
    """Policies of new modules: set, used, copied and removed."""
    model = new_model(draw)
    tp.set_module_policy(model, {"0": "fp32", nn.Linear: new_overrides(draw) | {"linear": "float16"}})
    with tp.my_autocast("cpu"):
        step(model)
    copied = copy.deepcopy(model)
    tp.module_policies(copied)
    if draw.random() < 0.5:
        tp.remove_module_policy(model)
        model(X)


@feature
def module_tables(draw: random.Random, number: int) -> None:
    """New policies with tables for modules, in regions with a model and by apply_to."""
    model = new_model(draw)
    policy = tp.Policy.stock().override_modules({"0": new_overrides(draw) | {"linear": "float16"}, "2": "fp32"})
    with tp.my_autocast("cpu", policy=policy, model=model):
        step(model)
    handle = policy.apply_to(model)
    with tp.my_autocast("cpu", policy=policy):
        model(X)
    if draw.random() < 0.5:
        handle.remove()


@feature
def threads(draw: random.Random, number: int) -> None:
    """Threads that open regions, leave one open, or suspend one, and end."""
    weight = nn.Parameter(torch.ones(4, 4))
    left_open = draw.random() < 0.3
    overrides = new_overrides(draw) | {"matmul": "lower"}

    def work() -> torch.dtype:
        region = tp.my_autocast("cpu", overrides=overrides)
        region.__enter__()
        product = X @ weight
        product.float().relu().backward(X)
        if not left_open:
            region.__exit__(None, None, None)
        return product.dtype

    with ThreadPoolExecutor(number := draw.randint(1, 3)) as pool:  # its threads end with it
        found = [future.result() for future in [pool.submit(work) for _ in range(number)]]
    assert set(found) == {torch.bfloat16}


@feature
def persistent_casts(draw: random.Random, number: int) -> None:
    """Persistent casts of new weights, written to and dropped."""
    dtypes = [draw.choice((torch.float32, torch.float64)) for _ in range(3)]
    weights = [nn.Parameter(torch.ones(8, 4, dtype=dtype), requires_grad=False) for dtype in dtypes]
    for weight in weights:
        with tp.my_autocast("cpu", cache="persistent"), torch.no_grad():
            nn.functional.linear(X.to(weight.dtype), weight)
            weight.data.add_(1)
            nn.functional.linear(X.to(weight.dtype), weight)
    if draw.random() < 0.1:
        tp.clear_cache()


@feature
def installs(draw: random.Random, number: int) -> None:
    """install() and remove(), with new overrides."""
    asked = new_overrides(draw) if draw.random() < 0.5 else None
    with tp.install(overrides=asked, cache=draw.choice((None, "weights", "all"))):
        with torch.autocast("cpu"):
            torch.relu(X)
        torch.autocast("cpu")(lambda: torch.relu(X))()


@feature
def errors(draw: random.Random, number: int) -> None:
    """Exceptions that leave regions, and arguments that are refused."""
    for wrong in ({f"softmx{number}": "fp32"}, {"softmax": f"fp{number}x"}):
        try:
            tp.my_autocast("cpu", overrides=wrong)
        except tp.PolicyError as error:
            str(error)
        else:
            raise AssertionError("it was accepted")
    try:
        with tp.my_autocast("cpu", overrides={"matmul": "banned"}), tp.promotion("strict"):
            X @ X
    except RuntimeError:
        pass
    else:
        raise AssertionError("it was not banned")


@feature
def generators(draw: random.Random, number: int) -> None:
    """Generators and coroutines that are suspended inside regions, and dropped or finished."""
    weight = nn.Parameter(torch.ones(4, 4))

    @tp.my_autocast("cpu", overrides=new_overrides(draw) | {"matmul": "lower"})
    def steps() -> Iterator[Any]:
        with tp.my_autocast("cpu", cache="all"):
            for _ in range(3):
                yield X @ weight

    suspended = [steps() for _ in range(2)]
    for one in suspended:
        next(one)
    list(suspended[0])

    @tp.my_autocast("cpu")
    async def work() -> Any:
        return X @ weight

    coroutine = work()
    if draw.random() < 0.5:
        coroutine.close()
        return
    with contextlib.suppress(StopIteration):
        coroutine.send(None)


@feature
def checkpoints(draw: random.Random, number: int) -> None:
    """Checkpoints under new overrides, recomputed or dropped."""
    weight = nn.Parameter(torch.ones(4, 4))
    with tp.my_autocast("cpu", overrides=new_overrides(draw) | {"matmul": torch.float16}):
        result = checkpoint(lambda x: (x @ weight).relu(), X, use_reentrant=False)
    if draw.random() < 0.7:
        result.float().sum().backward()


@feature
def copies(draw: random.Random, number: int) -> None:
    """Pickles and deep copies of regions, policies and modules with policies."""
    region = tp.my_autocast("cpu", overrides=new_overrides(draw))
    for one in (region, tp.Policy.stock().override(new_overrides(draw)), tp.promotion("jax")):
        pickle.loads(pickle.dumps(one))
        copy.deepcopy(one)
    with pickle.loads(pickle.dumps(region)):
        torch.relu(X)


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
    """Warnings of overrides of hidden ops, from new lines of code."""
    code = f"with tp.my_autocast('cpu', overrides={{'mm': 'fp32'}}):\n    X @ X  # {number}\n"
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default", tp.errors.UnusedOverrideWarning)
        exec(compile(code, f"<code {number}>", "exec"), {"tp": tp, "X": X, "__name__": f"code{number}"})


@feature
def custom_ops(draw: random.Random, number: int) -> None:
    """Custom ops with policies, defined again and again under a few names: PyTorch keeps something of each new name."""
    name = f"again{number % 8}"
    library = torch.library.Library("soaked", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
    op = getattr(torch.ops.soaked, name)
    try:
        with tp.register_policy(f"soaked::{name}", draw.choice(("lower", "fp32"))), tp.my_autocast("cpu"):
            op(X)
        with tp.my_autocast("cpu", overrides={f"soaked::{name}": "float16", **new_overrides(draw)}):
            op(X)
    finally:
        library._destroy()
