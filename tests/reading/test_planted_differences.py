"""`tp.diff` of two runs with one planted difference: the kind, the first call, what differs, and no false sentence."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint, dlpack

import torch_promote as tp
from helpers.subprocesses import run_python
from torch_promote.reading.difference import Difference
from torch_promote.reading.trace_report import TraceReport

Program = Callable[[int], object]


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Both runs of a comparison start alike, and leave nothing to later tests."""
    state, numbers = torch.get_rng_state(), random.getstate()
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(numbers)


def parts_of(program: Program, run: int) -> Iterator[None]:
    """What is not recorded, up to the program's `yield` if it has one, and what is."""
    if inspect.isgeneratorfunction(program):
        yield from program(run)
    else:
        yield
        program(run)


def recorded(program: Program, run: int) -> TraceReport:
    with seeded():
        parts = iter(parts_of(program, run))
        next(parts)
        with tp.trace(values=True) as report:
            next(parts, None)
    return report


def in_a_file(name: str, run: int, folder: Path) -> TraceReport:
    """The recording of another process."""
    path = folder / f"{run}.jsonl.gz"
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1])['record_in_a_file'](sys.argv[2], int(sys.argv[3]), sys.argv[4])"
    )
    done = run_python(code, __file__, name, str(run), str(path))
    assert done.returncode == 0, done.stderr
    return tp.load(path)


def record_in_a_file(name: str, run: str, path: str) -> None:
    with seeded():
        parts = iter(parts_of(PLANTED[name].program, int(run)))
        next(parts)
        with tp.trace(record=path):
            next(parts, None)


def batch(seed: int = 1, *shape: int) -> Tensor:
    return torch.randn(*(shape or (8, 8)), generator=torch.Generator().manual_seed(seed))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    before: Callable[[int], object] = lambda step: None,
    between: Callable[[int], object] = lambda step: None,
    batches: Callable[[int], Tensor] = batch,
) -> None:
    """`before` a step; `between` its backward and the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if optimizer is None else optimizer
    for step in range(steps):
        before(step)
        model(batches(step)).float().square().mean().backward()
        between(step)
        optimizer.step()
        optimizer.zero_grad()


# --- weights


@torch.no_grad()
def another_weight(k: int) -> None:
    model = net()
    model[2].weight[0, 0] += 0.1 * k
    model(batch())


def another_initialization(k: int) -> None:
    model = nn.Linear(8, 8)
    nn.init.normal_(model.weight, std=0.02 + 0.02 * k)
    model(batch()).sum().backward()


def another_buffer(k: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    model[1].running_mean.fill_(0.5 * k)  # type: ignore[operator, union-attr]
    model(batch())


def another_buffer_in_training(k: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].running_mean.fill_(0.5 * k)  # type: ignore[operator, union-attr]
    train(model)


def written_through(how: Callable[[nn.Parameter], object]) -> Program:
    def program(k: int) -> None:
        model = net()
        train(model, before=lambda step: how(model[2].weight) if k and step == 1 else None)  # type: ignore[arg-type]

    return program


def by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] *= 1.5


def by_dlpack(weight: nn.Parameter) -> None:
    dlpack.from_dlpack(weight.detach()).mul_(1.5)


def a_gradient_by_numpy(k: int) -> None:
    model = net()

    def scale(step: int) -> None:
        if step == 1:
            model[2].weight.grad.numpy()[:] *= 1 + k  # type: ignore[operator, union-attr]

    train(model, between=scale)


# --- states


def resumed(make: Callable[[Any], torch.optim.Optimizer], loads: bool = False) -> Program:
    """A training of six steps, recorded from step 3 on, and one that was resumed there."""

    def program(k: int) -> Iterator[None]:
        model = net()
        optimizer = make(model.parameters())
        train(model, optimizer)
        if not k:
            yield
        else:
            weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
            yield
            model = net()
            model.load_state_dict(weights)
            optimizer = make(model.parameters())
            if loads:
                optimizer.load_state_dict(state)
        train(model, optimizer)

    return program


def resumed_in_a_new_process(k: int, of_average: bool = True) -> Iterator[None]:
    """The recording of an uninterrupted run starts at the end of a step, with what the program does behind that."""

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = net()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=4.0)
        return model, optimizer, scaler, copy.deepcopy(model)

    def step(number: int) -> None:
        scaler.scale(model(batch(number)).square().mean()).backward()
        scaler.step(optimizer)

    def after_step() -> None:
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for one, other in zip(average.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)

    parts = model, optimizer, scaler, average = make()
    step(0)
    if not k:
        yield
    after_step()
    if k:
        states = [copy.deepcopy(one.state_dict()) for one in parts]
        yield
        parts = model, optimizer, scaler, average = make()
        for one, state in zip(parts, states, strict=True):
            if one is not average or of_average:
                one.load_state_dict(state)
    for number in range(1, 4):
        step(number)
        after_step()
    average(batch(9))


def resumed_without_average(k: int) -> Iterator[None]:
    yield from resumed_in_a_new_process(k, of_average=False)


def later_steps(k: int) -> Iterator[None]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer, steps=1 + 2 * k)
    yield
    train(model, optimizer)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda one: torch.optim.AdamW(one, 1e-2, foreach=False),
    "foreach": lambda one: torch.optim.AdamW(one, 1e-2, foreach=True),
    "fused": lambda one: torch.optim.AdamW(one, 1e-2, fused=True),
    "momentum": lambda one: torch.optim.SGD(one, 1e-2, momentum=0.9),
}


def with_numbers(k: int, **both: tuple[Any, Any]) -> None:
    model = net()
    train(model, torch.optim.AdamW(model.parameters(), **{name: values[k] for name, values in both.items()}))


def norms_that_decay(foreach: bool) -> Program:
    """Are in another group, so that the optimizer has its parameters in another order."""

    def program(k: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
        groups: list[list[nn.Parameter]] = [[], []]
        for name, parameter in model.named_parameters():
            groups[name.endswith("bias") or (not k and name[0] in "13")].append(parameter)
        settings = [{"params": one, "weight_decay": by} for one, by in zip(groups, (0.1, 0.0), strict=True)]
        train(model, torch.optim.AdamW(settings, 1e-2, foreach=foreach))

    return program


def another_lr(k: int) -> None:
    model = net()
    train(model, torch.optim.SGD(model.parameters(), 0.1 if k else 0.01))


def a_schedule(k: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5 if k else 0.9)
    train(model, optimizer, before=lambda step: schedule.step() if step else None)


def a_scaler(k: int) -> None:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0 + 4 * k)
    for step in range(2):
        scaler.scale(model(batch(step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


# --- inputs


def another_batch(k: int) -> Iterator[None]:
    batches = [batch(step + 10 * k) for step in range(3)]
    yield
    train(net(), batches=lambda step: batches[step])


def in_another_order(part: Callable[[Tensor, int], Tensor]) -> Program:
    def program(k: int) -> None:
        order, data = ([0, 1, 2], [1, 0, 2])[k], batch(0, 15, 8)
        train(net(), batches=lambda step: part(data, order[step]))

    return program


def another_seed(k: int) -> None:
    model = net()
    torch.manual_seed(k)
    functional.dropout(model(batch()), 0.5).sum().backward()


def another_generator(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    net()(torch.randn(8, 8, generator=generator))


def drawn_once_more(k: int) -> None:
    model = net()
    if k:
        torch.randn(1)
    functional.dropout(model(batch()), 0.5).sum().backward()


def drawn_by_python(k: int) -> Iterator[None]:
    batches = [batch(step) for step in range(9)]
    random.seed(k)
    yield
    train(net(), batches=lambda step: random.choice(batches))


# --- arguments


def attention(**changed: Any) -> Program:
    q = batch(0, 1, 2, 8, 8)
    return lambda k: functional.scaled_dot_product_attention(q, q, q, **(changed if k else {}))


def call_of(function: Callable[[Tensor, Any], object], one: Any, other: Any) -> Program:
    def program(k: int) -> None:
        model = net()
        function(model(batch()), (one, other)[k])

    return program


def a_slot_of_a_cache(k: int) -> Iterator[None]:
    rows = [batch(i, 1, 4) for i in range(4)]
    yield
    cache = torch.zeros(1, 8, 4)
    for i in range(4):
        place = i + (k if i > 1 else 0)
        cache[:, place] = rows[i]
        (cache @ cache[:, place].unsqueeze(-1)).softmax(1)


def another_average(k: int) -> None:
    """Of the weights, from which the average is evaluated at the end."""
    model = net()
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update(step: int) -> None:
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.mul_(0.99 - 0.09 * k).add_(other, alpha=0.01)

    train(model, before=update)
    average(batch(9))


def an_average_of_the_weights_before_the_step(k: int) -> None:
    model = net()
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update(step: int) -> None:
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.lerp_(other, 0.1 if step else 0.0)

    if k:
        train(model, between=update)
    else:
        train(model, before=lambda step: update(step) if step else None)
        update(3)
    average(batch(9))


def parts_of_a_batch(k: int) -> Iterator[None]:
    x = batch(0, 24, 8)
    yield
    starts = [8 * ((step + k) % 3) for step in range(3)]
    train(net(), batches=lambda step: x[starts[step] : starts[step] + 8])


def normalized(k: int) -> Iterator[None]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].train(k == 0)
    yield
    model(torch.ones(4, 8)).sum().backward()


def validated(k: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4))

    def validate(step: int) -> None:
        if k and step == 1:
            model.eval()(batch(9)).sum().item()

    train(model, before=validate)


def randomly_ordered(k: int) -> None:
    batches = [torch.randn(4, 8), torch.randn(4, 8)]
    train(nn.Linear(8, 8), steps=2, batches=lambda step: batches[step ^ k])


# --- shapes, dtypes, structure


def in_micro_batches(k: int) -> None:
    """Of ids, as a language model has them, whose loss is averaged over each of its batches."""
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(0, 32, (8, 10), generator=torch.Generator().manual_seed(0))
    for x in ids.chunk(1 + k):
        logits = model(x)
        (functional.cross_entropy(logits.flatten(0, 1), x.roll(-1, 1).flatten()) / (1 + k)).backward()
    optimizer.step()


def another_batch_size(k: int) -> None:
    train(net(), batches=lambda step: batch(step)[: 8 - 4 * k])


def wider(k: int) -> None:
    torch.manual_seed(0)
    train(nn.Sequential(nn.Linear(8, 16 + 8 * k), nn.GELU(), nn.Linear(16 + 8 * k, 8)))


def twice(k: int) -> None:
    model = net()
    x = model(batch())
    (model(x) if k else x).sum().backward()


def another_branch(k: int) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    owner = nn.Module()
    owner.layers = layers
    owner.forward = lambda x: layers[1 + k](layers[0](x))  # type: ignore[method-assign]
    owner(batch())


def swapped(k: int) -> None:
    model = net()
    a, b = model(batch()), model(batch(2))
    (b - a if k else a - b).relu().sum().backward()


def two_models(k: int) -> None:
    """Are trained in another order."""
    models = nn.Linear(8, 4), net()
    x, optimizers = torch.ones(8, 8), [torch.optim.Adam(model.parameters(), 1e-2) for model in models]
    for place in ((0, 1), (1, 0))[k]:
        models[place](x).square().mean().backward()
        optimizers[place].step()


def in_bfloat16(k: int) -> None:
    model = net().bfloat16() if k else net()
    model(batch().bfloat16() if k else batch()).float().square().mean().backward()


def under_a_policy(k: int) -> None:
    model = net()
    with tp.my_autocast("cpu", overrides={"gelu": "fp32"} if k else {}):
        model(batch()).float().square().mean().backward()


def autocast_or_not(k: int) -> None:
    model = net()
    with tp.my_autocast("cpu", enabled=bool(k)):
        model(batch()).float().square().mean().backward()


def with_modules(
    one: list[Callable[[], nn.Module]], other: list[Callable[[], nn.Module]], evaluates: bool = False
) -> Callable[..., None]:
    def program(k: int, x: Tensor | None = None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *(make() for make in (one, other)[k]))
        if evaluates and k:
            model.eval()
        with torch.set_grad_enabled(not evaluates):
            model(batch() if x is None else x)

    return program


def last(function: Callable[[Tensor, int], object]) -> Program:
    def program(k: int) -> None:
        model = net()
        function(model(batch()).detach(), k)

    return program


def other_programs(k: int) -> None:
    if k:
        x = batch(0, 4, 3, 8, 8)
        functional.conv2d(x, batch(1, 2, 3, 3, 3)).relu().mean((2, 3)).log_softmax(1).argmax(1)
    else:
        train(net())


def compiled(change: str) -> Program:
    def program(k: int) -> None:
        model = net()
        if change == "weight" and k:
            with torch.no_grad():
                model[2].weight[0, 0] += 0.1  # type: ignore[index, operator]
        function: Any = model
        if k:
            torch._dynamo.reset()
            function = torch.compile(model, backend="eager" if change == "eager" else "aot_eager")
        factor = 3 if change == "op" and k else 2
        for _ in range(2):
            (function(batch()) * factor).square().mean().backward()

    return program


# --- what shows elsewhere than where it was planted


def frozen(k: int) -> None:
    model = net()
    model[0].requires_grad_(not k)  # type: ignore[operator]
    train(model)


def not_zeroed(k: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        if not k:
            optimizer.zero_grad()


def in_channels_last(k: int) -> Iterator[None]:
    layout = (torch.contiguous_format, torch.channels_last)[k]
    x = batch(1, 4, 3, 16, 16).contiguous(memory_format=layout)
    yield
    functional.batch_norm(x, None, None, training=True)  # rounds differently


def stale_casts(k: int) -> None:
    """Of weights, which the cache of a region around the whole training serves after a step."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=not k):
        train(net(), steps=2)


def unscaled_late(k: int) -> None:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(model(batch()).square().mean()).backward()
    if not k:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)


def deeper(k: int) -> None:
    torch.manual_seed(0)
    nn.GRU(8, 8, num_layers=1 + k)(batch())


def without_effect(k: int) -> Iterator[None]:
    x = batch(1, 4, 4)
    x[0, 0] = -1.0 - k
    yield
    x.relu().sum()


def a_schedule_at_another_epoch(k: int) -> Iterator[None]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if k:
        schedule.step()
    yield
    train(model, optimizer)


def compiled_alone(change: str) -> Program:
    """Compiled code in both runs."""

    def program(k: int) -> None:
        torch._dynamo.reset()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1 * k if change == "step" else 0.0)
        torch.manual_seed(k if change == "seed" else 0)
        function: Any = torch.compile(lambda x: functional.dropout(model(x), 0.5), backend="aot_eager")
        step: Any = torch.compile(optimizer.step, backend="aot_eager") if change == "step" else optimizer.step
        for number in range(2):
            (model if change == "step" else function)(batch(number)).square().mean().backward()
            step()
            optimizer.zero_grad()

    return program


@dataclass(frozen=True)
class Planted:
    """A program, and what the difference of its runs 0 and 1 has to say."""

    program: Program
    kind: str | None
    op: str | None = None
    module: str | None = None
    parameter: str | None = None
    arguments: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    state: str = ""
    step: int | None = None
    phase: str | None = None
    says: str = ""
    never: tuple[str, ...] = ()


def arguments(program: Program, op: str, **both: tuple[Any, Any]) -> Planted:
    return Planted(program, "arguments", op, arguments=both, never=("draws", "equal inputs"))


WEIGHT = Planted(another_weight, "weight", "aten::linear", "2", "2.weight", step=0)


MEAN = torch.tensor([123.0, 116.0, 103.0])


class Pictures(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Prepares a picture by two ops, in one order or the other."""

    def __init__(self, flips_first: bool) -> None:
        self.flips_first = flips_first
        self.all = torch.arange(288, dtype=torch.uint8).view(24, 3, 4)
        self.labels = torch.arange(24) % 2

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = self.all[i].float()
        x = x.flip(0) - MEAN[:, None] if self.flips_first else (x - MEAN[:, None]).flip(0)
        return x / 58.0, self.labels[i]


def two_ops_of_a_dataset(k: int) -> None:
    loader = torch.utils.data.DataLoader(Pictures(bool(k)), batch_size=8, shuffle=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        functional.cross_entropy(model(x).mean(1), y).backward()
        optimizer.step()
        optimizer.zero_grad()


PLANTED: dict[str, Planted] = {
    "a weight": WEIGHT,
    "an initialization": Planted(another_initialization, "weight", "aten::linear", "", "weight", never=("draws",)),
    "a buffer": Planted(another_buffer, "weight", "aten::batch_norm", "1", "1.running_mean", step=0),
    "a buffer in training": Planted(another_buffer_in_training, "weight", "aten::batch_norm", "1", "1.running_mean"),
    **{
        f"a weight through {name}, later": Planted(
            written_through(how), "weight", "aten::linear", "2", "2.weight", step=1, never=("equal inputs",)
        )
        for name, how in {
            ".data": lambda weight: weight.data.mul_(1.5),
            "NumPy": by_numpy,
            "DLPack": by_dlpack,
        }.items()
    },
    "a gradient through NumPy": Planted(
        a_gradient_by_numpy, "input", phase="optimizer", parameter="2.weight", step=1, never=("equal inputs",)
    ),
    **{
        f"fresh state, {name}": Planted(
            resumed(make),
            "state",
            phase="optimizer",
            state=f"{'momentum_buffer' if name == 'momentum' else 'exp_avg'} of 0.weight",
            says="missing in B",
        )
        for name, make in OPTIMIZERS.items()
    },
    "an average that was not resumed": Planted(
        resumed_without_average, "input", "aten::lerp_", says="(self) reads other contents"
    ),
    "later steps": Planted(later_steps, "state", says="the number of steps is 1 in A and 3 in B, exp_avg of 0.weight"),
    "a scale of gradients": Planted(a_scaler, "state", state="scale of GradScaler"),
    "a batch": Planted(another_batch, "input", "aten::linear", "0", step=0),
    **{
        f"batches in another order, {name}": Planted(
            in_another_order(part), None, phase="forward", step=0, never=("equal inputs",)
        )
        for name, part in {
            "slice": lambda x, i: x[5 * i : 5 * i + 5],
            "select": lambda x, i: x.view(3, 5, 8)[i],
            "unbind": lambda x, i: x.view(3, 5, 8).unbind()[i],
            "index": lambda x, i: x[torch.arange(5) + 5 * i],
            "narrow": lambda x, i: x.narrow(0, 5 * i, 5),
        }.items()
    },
    "a seed": Planted(another_seed, "input", "aten::dropout", "", state="the generator cpu"),
    "an initialization by another seed": Planted(
        lambda k: [torch.manual_seed(k), nn.init.normal_(torch.empty(8, 8))],
        "input",
        "aten::normal_",
        state="generator cpu",
    ),
    "a seed of a generator": Planted(another_generator, "input", "aten::randn", state="its own generator"),
    "numbers that were drawn before": Planted(drawn_once_more, "input", "aten::dropout", state="the generator cpu"),
    "a batch that Python draws": Planted(drawn_by_python, "input", "aten::linear", "0", says="generator python"),
    "lr of SGD": Planted(
        another_lr, "arguments", phase="optimizer", arguments={"alpha": (-0.01, -0.1)}, says="lr of group 0"
    ),
    "lr of AdamW": Planted(
        lambda k: with_numbers(k, lr=(1e-2, 1e-3)), "arguments", phase="optimizer", says="lr of group 0"
    ),
    "weight decay": Planted(
        lambda k: with_numbers(k, weight_decay=(0.0, 0.1)),
        "state",
        phase="optimizer",
        state="weight_decay of group 0",
        says="weight_decay of group 0 is 0.0 in A and 0.1 in B",
    ),
    **{
        f"norms that decay, foreach {foreach}": Planted(
            norms_that_decay(foreach),
            "state",
            state="weight_decay of 3.weight",
            says="weight_decay of 1.weight (and 1 more) is 0.0 in A and 0.1 in B.",
            never=(" of another call", " the parameter 0", "Only"),
        )
        for foreach in (False, True)
    },
    "betas": Planted(
        lambda k: with_numbers(k, betas=((0.9, 0.999), (0.8, 0.999))),
        "arguments",
        phase="optimizer",
        says="betas of group 0",
    ),
    "lr of fused AdamW": Planted(
        lambda k: with_numbers(k, lr=(1e-2, 1e-3), fused=(True, True)),
        "arguments",
        phase="optimizer",
        says="lr of group 0",
    ),
    "a schedule": Planted(
        a_schedule, "state", phase="optimizer", step=0, says="gamma of StepLR is 0.9 in A and 0.5 in B"
    ),
    "is_causal": arguments(attention(is_causal=True), "aten::scaled_dot_product_attention", is_causal=(False, True)),
    "scale": arguments(attention(scale=0.3), "aten::scaled_dot_product_attention", scale=(None, 0.3)),
    "p": arguments(call_of(functional.dropout, 0.5, 0.25), "aten::dropout", p=(0.5, 0.25)),
    "dim": arguments(call_of(torch.softmax, 0, 1), "aten::softmax", dim=(0, 1)),
    "a factor": arguments(call_of(lambda x, by: x * by, 2.0, 3.0), "aten::mul", other=(2.0, 3.0)),
    "a factor of minus zero": arguments(call_of(lambda x, by: x * by, 0.0, -0.0), "aten::mul", other=(0.0, -0.0)),
    "a factor of another type": arguments(call_of(lambda x, by: x.long() * by, 2, 2.0), "aten::mul", other=(2, 2.0)),
    "approximate": arguments(
        call_of(lambda x, by: functional.gelu(x, approximate=by), "none", "tanh"),
        "aten::gelu",
        approximate=("none", "tanh"),
    ),
    "a slot of a cache": arguments(a_slot_of_a_cache, "aten::select", index=(2, 3)),
    "an average": Planted(another_average, "arguments", "aten::mul_", step=0, never=("another input", "parameter")),
    "an average before the step": Planted(
        an_average_of_the_weights_before_the_step,
        "structure",
        "aten::lerp_",
        says="B calls aten::lerp_ in (model), test_",
        never=("Only", "such"),
    ),
    "two ops of a dataset": Planted(two_ops_of_a_dataset, "structure", says="in another place than", never=("index",)),
    "parts of a batch": Planted(parts_of_a_batch, "arguments", "aten::slice", step=0, never=("relative L2 0)",)),
    "a target": Planted(
        lambda k: functional.cross_entropy(net()(batch()), torch.tensor([0, 1 + k] * 4)),
        "input",
        "aten::cross_entropy_loss",
        says="(target) reads another input",
    ),
    "micro-batches": Planted(in_micro_batches, "shape", says="[8, 10]", never=("equal inputs", "equal bits")),
    "a batch size": Planted(another_batch_size, "shape", says="[8, 8]", never=("equal inputs",)),
    "a width": Planted(wider, None, says="[16, 8]", never=("equal inputs",)),
    "the dtype of a model": Planted(in_bfloat16, "policy", says="bfloat16"),
    "a policy": Planted(under_a_policy, "policy", "aten::gelu", "1", says="fp32"),
    "autocast": Planted(autocast_or_not, "policy", "aten::linear", "0"),
    "relu for gelu": Planted(with_modules([nn.GELU], [nn.ReLU]), "structure", module="1", says="B calls aten::relu"),
    "a module more": Planted(
        with_modules([nn.GELU], [nn.GELU, nn.Tanh]), "structure", "aten::tanh", "2", says="Only B calls aten::tanh"
    ),
    "a module less": Planted(
        with_modules([nn.GELU, nn.Tanh], [nn.GELU]), "structure", "aten::tanh", "2", says="Only A calls aten::tanh"
    ),
    "a model twice": Planted(twice, "structure", says="Only B calls aten::linear", never=("has the shape",)),
    "another branch": Planted(another_branch, "structure", says=" where B calls aten::linear in layers.2, test_"),
    "swapped operands": Planted(swapped, "structure", "aten::sub", says="of another call", never=("other elements",)),
    "two models": Planted(two_models, None, never=("has the shape", "has other contents")),
    "dropout in eval, last": Planted(
        with_modules([nn.Dropout], [nn.Dropout], True),
        "arguments",
        "aten::dropout",
        "1",
        arguments={"train": (True, False)},
    ),
    "dropout in eval, inside": Planted(
        with_modules([nn.Dropout, nn.GELU], [nn.Dropout, nn.GELU], True),
        "arguments",
        "aten::dropout",
        "1",
        arguments={"train": (True, False)},
    ),
    "batch norm in eval": Planted(normalized, "arguments", says="training True in A, False in B"),
    "a validation": Planted(
        validated,
        "arguments",
        "aten::dropout",
        "1",
        arguments={"train": (True, False)},
        step=1,
        says="12 calls in A, 16",
    ),
    "batches of random numbers": Planted(randomly_ordered, "input", says="reads the result of aten::randn"),
    "item()": Planted(last(lambda x, k: x[0, k].item()), None, "aten::select"),
    "tolist()": Planted(last(lambda x, k: x[k].tolist()), None, "aten::select"),
    "numpy()": Planted(last(lambda x, k: x[k].numpy().sum()), None, "aten::select"),
    "a conversion, last": Planted(last(lambda x, k: x.to((torch.float16, torch.bfloat16)[k])), "policy", "aten::to"),
    "a view, last": Planted(last(lambda x, k: x[k]), None, "aten::select"),
    "a view more, last": Planted(last(lambda x, k: x.t() if k else x), "structure", "aten::t"),
    "rounded through bfloat16, last": Planted(last(lambda x, k: (x.bfloat16().float() if k else x).tolist()), None),
    "columns": Planted(last(lambda x, k: x[:, k : 4 + k].square().sum()), None, "aten::slice", never=("equal inputs",)),
    "a transpose": Planted(
        last(lambda x, k: (x.t() if k else x).softmax(1)), "structure", "aten::t", never=("equal inputs",)
    ),
    "other programs": Planted(other_programs, "structure", says="different programs"),
    "a frozen layer": Planted(
        frozen, "structure", parameter="0.weight", step=0, says="Of gradients, A alone has those of 0.weight, 0.bias"
    ),
    "a gradient that is not zeroed": Planted(not_zeroed, "structure", step=1, says="B adds to a gradient of step 0"),
    "another layout": Planted(in_channels_last, "rounding", "aten::batch_norm", says="has other strides"),
    "stale casts": Planted(stale_casts, "policy", "aten::linear", "0", step=1, says="reused", never=("rounding",)),
    "gradients that are unscaled late": Planted(
        unscaled_late, "structure", says="in another place than", never=("Only A calls aten::_amp",)
    ),
    "an input without effect": Planted(without_effect, "input", "aten::relu", says="reads another input"),
    "p of a dropout in eval": arguments(
        lambda k: functional.dropout(batch(), 0.1 + 0.1 * k, training=False), "aten::dropout", p=(0.1, 0.2)
    ),
    "layers of an RNN": Planted(deeper, None, says="num_layers 1 in A, 2 in B"),
    "a schedule at another epoch": Planted(
        a_schedule_at_another_epoch, "state", phase="optimizer", says="last_epoch of StepLR is 0 in A and 1 in B"
    ),
    "a seed of compiled code": (
        Planted(compiled_alone("seed"), "op", says="compiled code has computed")  # the call of a lambda is not seen
        if torch.__version__.startswith("2.11")
        else Planted(compiled_alone("seed"), "input", "torch.compile", state="generator cpu", never=("other results",))
    ),
    "a compiled optimizer": (
        Planted(compiled_alone("step"), "op", says="compiled code has computed")
        if sys.version_info < (3, 13)  # since then, the state before a compiled step is recorded
        else Planted(compiled_alone("step"), "state", state="weight_decay of group 0")
    ),
    "a weight of compiled code": Planted(compiled("weight"), "weight", parameter="2.weight"),
    "a factor beside compiled code": arguments(compiled("op"), "aten::mul", other=(2, 3)),
}


def check(planted: Planted, difference: Difference) -> None:
    text = str(difference)
    assert not difference.equal, text
    assert difference.first is not None, text
    first = difference.first
    if planted.kind is not None:
        assert difference.kind == planted.kind, text
    for name in ("op", "module", "parameter", "step", "phase"):
        if getattr(planted, name) is not None:
            assert getattr(first, name) == getattr(planted, name), text
    for name, both in planted.arguments.items():
        assert difference.arguments.get(name) == both, text
    if planted.state:
        assert any(planted.state in one for one in difference.state), text
    lines = " ".join(difference.evidence[:3])
    assert planted.says in lines, text
    for word in planted.never:
        assert word not in " ".join(difference.evidence), text
    assert difference.facts[0].text in difference.content().verdict, text


def compared(program: Program) -> Difference:
    """The difference of both runs, whose sentences about calls of one run alone are true."""
    runs = {name: recorded(program, k) for k, name in enumerate("AB")}
    difference = runs["A"].diff(runs["B"])
    for text in difference.evidence:
        for run, ops, module, phase, line in re.findall(
            r"Only ([AB]) calls ([\w:, ]+) in ([\w.()]+)(?: \((\w+)\))?(?:, (\w+\.py:\d+))?(?=\.| where)", text
        ):
            calls = [call for call in runs["BA"["AB".index(run)]].calls if call.phase == (phase or "forward")]
            made = {c.op for c in calls if (c.module or "(model)") == module and c.line.endswith(line)}
            assert made.isdisjoint(ops.split(", ")), text
    return difference


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name: str) -> None:
    planted = PLANTED[name]
    check(planted, compared(planted.program))


@pytest.mark.parametrize(
    "name",
    [
        "a weight",
        "a buffer in training",
        "a weight through NumPy, later",
        "fresh state, foreach",
        "a batch",
        "is_causal",
    ],
)
def test_a_planted_difference_is_found_in_files_of_two_processes(name: str, tmp_path: Path) -> None:
    planted = PLANTED[name]
    difference = in_a_file(name, 0, tmp_path).diff(in_a_file(name, 1, tmp_path))
    check(planted, difference)
    memory = recorded(planted.program, 0).diff(recorded(planted.program, 1))
    assert [fact.text for fact in difference.facts] == [fact.text for fact in memory.facts]


# --- calls of one run alone, and what is said of the others


def one_group_decays(k: int) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.LayerNorm(8))
    parameters = [*model.parameters()]
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.1 * k}]
    train(model, torch.optim.AdamW(groups, 1e-2, foreach=False))


class Language(nn.Module):
    """An embedding whose weight is that of the output as well, or not."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.table, self.inner, self.out = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.out.weight = self.table.weight if is_tied else nn.Parameter(self.table.weight.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(self.table(ids)).tanh())
        return out


def a_tie_that_is_lost(k: int) -> None:
    model = Language(is_tied=not k)
    train(model, torch.optim.SGD(model.parameters(), 0.1, foreach=False), batches=lambda step: torch.arange(9))


def weights_that_are_normalized(k: int) -> None:
    """The backward adds gradients of two shapes, in one run of one of them."""
    model = nn.Linear(8, 8)
    for step in range(3):
        scores = model(batch(step)).softmax(-1)
        best, chosen = scores.topk(2)
        best = best if k else best / best.sum(-1, keepdim=True)
        (scores.mean() * 3 + scores.square().mean() + (best * chosen).mean()).backward()


def logged(k: int) -> None:
    """One run looks at its weights, and tries the model."""
    model = net()

    def look(step: int) -> None:
        if k and step:
            sum(one.detach().norm().item() for one in model.parameters())
            with torch.no_grad():
                (model(batch(9)) > 0).float().mean().item()

    train(model, before=look)


SHAPES = "Calls with other shapes"
ALONE: dict[str, tuple[Planted, dict[str, int]]] = {
    "a group that decays": (
        Planted(
            one_group_decays,
            "state",
            says=": 36 calls in A, 48 in B. B makes more on the parameter 0.bias.",
            never=(SHAPES, "Only", "such"),
        ),
        {},
    ),
    "a tie that is lost": (
        Planted(
            a_tie_that_is_lost, "structure", says="on the parameter out.weight", never=(SHAPES, "where B", "reads [")
        ),
        {"aten::add in table": 3},
    ),
    "weights that are normalized": (
        Planted(weights_that_are_normalized, "structure", never=(SHAPES, " reads ", "where B")),
        {"aten::sum, aten::div": 6},
    ),
    "calls for a log": (
        Planted(logged, "structure", says="15 calls in A, 25 in B.", never=(SHAPES, "where B")),
        {"aten::linalg_": 20},
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_calls_of_one_run_alone_are_counted_and_the_others_are_pairs(name: str) -> None:
    planted, counts = ALONE[name]
    difference = compared(planted.program)
    check(planted, difference)
    told = [one for one in difference.facts if one.text.startswith("Only ")]
    assert {text: one.calls for one in told for text in counts if f"calls {text}" in one.text} == counts, str(
        difference
    )
    for one in told:
        assert f"{one.text} In all, {one.text[5]} alone makes {one.calls} such calls." in difference.evidence


def recomputed(k: int) -> None:
    model, x = net(), batch().requires_grad_()
    (checkpoint.checkpoint(model, x, use_reentrant=False) if k else model(x)).sum().backward()


@pytest.mark.parametrize(
    ("program", "start", "end", "aside"),
    [
        (logged, "1 on: Only B calls aten::linalg_vector_norm", " No call in both reads what the 30 calls of B ", 30),
        (recomputed, "0 on: Only B calls aten::linear, aten::gelu in 0, 1, 2 (recompute)", " B alone makes 3 such ", 0),
    ],
)
def test_calls_of_one_run_alone_without_effect_come_after_what_is_equal(
    program: Program, start: str, end: str, aside: int
) -> None:
    difference = compared(program)
    begin = f"The results of all {difference.compared} calls in both runs have equal bits. Different from step {start}"
    assert difference.content().verdict.startswith(begin), str(difference)
    assert end in " ".join(str(difference).split())
    assert (difference.kind, difference.aside, difference.largest) == ("structure", aside, 0.0)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (a_gradient_by_numpy, "After step 1, of 4 parameters, 2.weight alone differs (relative L2 "),
        (
            an_average_of_the_weights_before_the_step,
            " after every step; results after the last step differ (relative L2 ",
        ),
    ],
)
def test_which_parameters_differ_and_what_runs_after_the_last_step(program: Program, text: str) -> None:
    difference = compared(program)
    assert text in difference.content().verdict
    assert bool(difference.after) == ("\nafter " in str(difference)) == ("last step" in text)


# --- equal programs


class Experts(nn.Module):
    """Sends each row to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


class Last(nn.Module):
    """The outputs of an RNN."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x[None])[0]
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return out


def gan(k: int) -> None:
    generator, critic = net(), nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(one.parameters(), 1e-2) for one in (generator, critic)]
    for step in range(2):
        for turn, optimizer in enumerate(optimizers):
            fake = generator(torch.randn(4, 8))
            loss = critic(fake).mean() if turn == 0 else critic(fake.detach()).mean() - critic(batch(step)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def trained(make: Callable[[], nn.Module], change: Callable[[Tensor], object] | None = None, at: int = 0) -> Program:
    """A training; in run 1, `change` has the last parameter at the start of a step."""

    def program(k: int) -> None:
        model = make()
        parameter = [*model.parameters()][-1]
        before = (lambda step: change(parameter) if step == at else None) if k and change else lambda step: None
        train(model, torch.optim.AdamW(model.parameters(), 1e-2), before=before)

    return program


MODELS: dict[str, Callable[[], nn.Module]] = {
    "an RNN": Last,
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3, 3)
    ),
    "a transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "experts": Experts,
    "a checkpoint": Checkpointed,
}


def with_parameters_in_another_order(foreach: bool) -> Program:
    """An optimizer of the parameters from last to first, of which two are zeros and have one shape."""

    def program(k: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
        parameters = [*model.parameters()][:: 1 - 2 * k]
        norms = {one: one.detach().square().sum() for one in parameters}
        sum(norms[one] for one in model.parameters())
        train(model, torch.optim.AdamW(parameters, 1e-2, foreach=foreach))

    return program


class Augmented(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Rows that are shifted by a number of a generator of their own, and scaled by one that is read out of them."""

    def __init__(self) -> None:
        self.rows = batch(1, 12, 8).exp()

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        shift = torch.randint(4, (2,), generator=torch.Generator().manual_seed(i)).tolist()[0]
        return self.rows[i].roll(shift, -1) / self.rows[i].max().item(), i

    def __len__(self) -> int:
        return len(self.rows)


def with_workers(*counts: int, augments: bool = False, logs: bool = False) -> Program:
    """A sampler that is asked for its batches when a worker needs them."""

    def program(k: int) -> None:
        rows: Any = Augmented() if augments else torch.utils.data.TensorDataset(batch(1, 12, 8), torch.arange(12))
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, num_workers=counts[k])
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            for x, y in loader:
                (model(x).mean(1) - y).square().mean().backward()
                optimizer.step()
                if logs and not k:
                    model[0].weight.grad.norm().item()  # type: ignore[operator, union-attr]
                optimizer.zero_grad()

    return program


def with_other_names(k: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = nn.Linear(8, 8), nn.Linear(8, 8)
            if k == 0:
                self.fc1, self.fc2 = parts
            else:
                self.mlp = nn.ModuleDict({"up": parts[0], "down": parts[1], "act": nn.Tanh()})

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = (
                self.fc2(torch.tanh(self.fc1(x))) if k == 0 else self.mlp["down"](self.mlp["act"](self.mlp["up"](x)))
            )
            return found

    model = Net()
    train(model, torch.optim.AdamW(model.parameters(), 1e-2))


def with_towers(k: int) -> None:
    """Two models, of which the first to run differs."""
    towers = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4)), nn.Sequential(nn.Linear(8, 4))
    optimizer = torch.optim.SGD([*towers[0].parameters(), *towers[1].parameters()], 0.1)
    for step in range(2):
        found = {number: towers[number](batch(step)) for number in ((0, 1), (1, 0))[k]}
        loss = (found[0] @ found[1].T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


EQUAL: dict[str, Program] = {
    "modules of other names, and one in place of a function": with_other_names,
    "two models, of which another one runs first": with_towers,
    "parameters in another order": with_parameters_in_another_order(False),
    "parameters in another order, foreach": with_parameters_in_another_order(True),
    "no worker, and one": with_workers(0, 1),
    "one worker, and two": with_workers(1, 2),
    "no worker, and one, of random rows": with_workers(0, 1, augments=True),
    **{name: trained(make) for name, make in MODELS.items()},
    "a GAN": gan,
    "compiled and eager": compiled(""),
    "compiled by eager, and eager": compiled("eager"),
    "a right resume in a new process": resumed_in_a_new_process,
    **{f"a right resume, {name}": resumed(make, loads=True) for name, make in OPTIMIZERS.items()},
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_programs_are_equal(name: str) -> None:
    difference = recorded(EQUAL[name], 0).diff(recorded(EQUAL[name], 1))
    assert difference.equal, str(difference)
    assert (difference.kind, difference.first, difference.largest) == (None, None, 0.0)
    assert difference.is_within(0.0)
    assert difference.compared > 10


def test_another_order_and_what_a_worker_has_made_are_said() -> None:
    program = with_workers(0, 1)
    difference = recorded(program, 0).diff(recorded(program, 1))
    assert (difference.moved, difference.received) == (2, {"A": 12})
    assert difference.content().verdict.endswith(
        " In B, 2 of them ran in another order. What 12 calls of A alone compute, B reads with equal bits from "
        "outside, as from a worker process."
    )
    for logs in (False, True):
        program = with_workers(0, 1, augments=True, logs=logs)
        difference = recorded(program, 0).diff(recorded(program, 1))
        assert (difference.received, difference.beside) == ({"A": 54}, {"A": 72})
        verdict = difference.content().verdict
        assert verdict.endswith("; 72 more calls of A stand among these, and no other call reads what they compute.")
        told = "Only A calls aten::linalg_vector_norm in (model), test_planted_differences.py:"
        assert (told in verdict, difference.equal) == (logs, not logs)


def test_modules_of_other_names_are_said() -> None:
    difference = recorded(with_other_names, 0).diff(recorded(with_other_names, 1))
    assert difference.other_names == {"mlp.up": "fc1", "mlp.act": "", "mlp.down": "fc2"}
    assert difference.unmatched == 0  # gradients and parameters by name
    assert difference.content().verdict.endswith(
        " Calls stand in other modules in B: those of fc1 in mlp.up, those of (model) in mlp.act, those of fc2 in "
        "mlp.down."
    )


def test_a_second_model_has_names() -> None:
    def program(k: int) -> None:
        generator, critics = net(), [nn.Sequential(nn.Linear(8, 4)) for _ in range(2)]
        critics[1][0].bias.data += k
        loss = sum(critic(generator(batch())).mean() for critic in critics)
        torch.as_tensor(loss).backward()

    difference = recorded(program, 0).diff(recorded(program, 1))
    assert difference.first is not None
    assert (difference.kind, difference.first.parameter) == ("weight", "Sequential_2.0.bias")


def test_all_calls_with_other_arguments_are_counted() -> None:
    def program(k: int) -> None:
        x = batch()
        for number in range(4):
            x = x.mul(2.0 + k if number < 3 else 5.0 + k)

    difference = recorded(program, 0).diff(recorded(program, 1))
    (fact,) = difference.facts
    assert (fact.kind, fact.calls, fact.others) == ("arguments", 3, 1)
    assert difference.evidence[0].endswith(
        "other 2.0 in A, 3.0 in B. The same in 2 more calls. Other values in 1 more call."
    )


def test_the_first_view_of_other_elements_is_named() -> None:
    def program(k: int) -> None:
        ids = torch.zeros(2, 8)
        for row, length in enumerate((3, 5)):
            ids[row, 8 - length :] if k else ids[row, :length]
            (ids[row, 8 - length :] if k else ids[row, :length]).copy_(batch(row, length))
        ids.exp()

    difference = recorded(program, 0).diff(recorded(program, 1))
    assert difference.first is not None
    assert difference.first.a is not None
    assert difference.first.a.op == "aten::slice"
    assert difference.first.call == 0


def test_a_worker_that_makes_another_batch_is_told() -> None:
    def program(k: int) -> None:
        rows = torch.utils.data.TensorDataset(batch(k, 8, 8))
        for (x,) in torch.utils.data.DataLoader(rows, batch_size=4, num_workers=k):
            x.exp()

    difference = recorded(program, 0).diff(recorded(program, 1))
    assert (difference.kind, difference.received) == ("input", {})
    assert difference.first is not None
    assert difference.first.op in ("aten::randn", "aten::exp")


def test_an_order_without_effect_is_said() -> None:
    def program(k: int) -> None:
        x = batch()
        for number in ((0, 1), (1, 0))[k]:
            (x.exp, x.sin)[number]()
        x.cos()

    difference = recorded(program, 0).diff(recorded(program, 1))
    assert (difference.kind, difference.moved) == (None, 1)
    assert "In B, 1 of them ran in another order." in str(difference)


def test_the_error_that_ended_a_run_is_said() -> None:
    def program(k: int) -> None:
        batch().exp()
        batch(2).matmul(batch(3, 8 - k, 8))

    whole = recorded(program, 0)
    with pytest.raises(RuntimeError, match="shapes") as error, tp.trace(values=True) as ended:
        program(1)
    difference = whole.diff(ended)
    assert not difference.equal
    assert f"B ended with an error: RuntimeError: {error.value}" in " ".join(str(difference).split())


@torch.no_grad()
def shifted(parameter: Tensor) -> None:
    parameter.add_(0.5)


def shifted_by_numpy(parameter: Tensor) -> None:
    parameter.detach().numpy()[:] += 0.5


def test_the_calls_of_experts_are_aligned_by_their_number() -> None:
    def program(k: int) -> None:
        model = Experts()
        with torch.no_grad():
            model.router.bias[0] += k
        train(model)

    difference = recorded(program, 0).diff(recorded(program, 1))
    check(Planted(program, "weight", parameter="router.bias", never=("aten::eq",)), difference)


def test_another_op_is_told_beside_another_batch() -> None:
    """As with ranks, whose batches differ by design."""

    def program(k: int) -> Iterator[None]:
        x = batch(k)
        yield
        with_modules([nn.GELU], [nn.ReLU])(k, x)

    difference = recorded(program, 0).diff(recorded(program, 1))
    check(Planted(program, "input", says="A calls aten::gelu where B calls aten::relu in 1"), difference)


def test_the_buffers_of_ranks() -> None:
    """Their batches differ by design, and with them running statistics that nothing exchanges."""

    def recorded_by(rank: int) -> TraceReport:
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            return recorded(with_buffers, rank)
        finally:
            dist.destroy_process_group()

    def with_buffers(k: int) -> Iterator[None]:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        yield
        for step in range(3):
            model(batch(8 * k + step)).sum().backward()
            optimizer.step()

    found = recorded_by(0).diff(recorded_by(1))
    start = "The parameters of the two ranks are equal after every step. Buffers differ after step 0: "
    assert (
        found.text(None).splitlines()[1].startswith(f"{start}1.running_mean, 1.running_var. Different from step 0 on: ")
    )
    assert [one.buffers for one in found.steps] == [("1.running_mean", "1.running_var")] * 3
    assert found.to_dict()["environment"] == {"rank": ["0", "1"]}


def test_what_follows_from_a_mask_is_no_fact() -> None:
    def program(k: int) -> Iterator[None]:
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        mask[0, 1] = mask[0, 1] if not k else 0.0
        yield
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        layer(batch(0, 2, 5, 8), src_mask=mask).sum().backward()

    difference = recorded(program, 0).diff(recorded(program, 1))
    check(Planted(program, "input", says="(attn_mask)", never=("other elements",)), difference)
    assert len(difference.facts) == 1


@pytest.mark.parametrize(("change", "at"), [(shifted, 0), (shifted_by_numpy, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_of_each_model(name: str, change: Callable[[Tensor], object], at: int) -> None:
    program = trained(MODELS[name], change, at)
    parameter = [path for path, _ in MODELS[name]().named_parameters()][-1]
    check(
        Planted(
            program, "weight", parameter=parameter, step=at, never=("equal inputs", "other programs", "other elements")
        ),
        recorded(program, 0).diff(recorded(program, 1)),
    )
