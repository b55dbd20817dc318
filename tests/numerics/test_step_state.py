"""StepState saves the state before a step, and restores it bit for bit and in place."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from helpers.state_bits import snapshot
from torch_promote.numerics.step_state import StepState, found_in


@pytest.fixture(autouse=True)
def global_generators() -> Iterator[None]:
    python, of_numpy = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(python)
    numpy.random.set_state(of_numpy)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.hidden.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.memory = torch.zeros(4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.tied(torch.relu(self.hidden(self.norm(x))))
        self.mean = self.mean * 0.5 + x.detach().mean(0)  # another tensor than before
        self.memory.add_(self.mean)
        return self.frozen(nn.functional.dropout(x))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "LBFGS": functools.partial(torch.optim.LBFGS, max_iter=2),
    "Adagrad": torch.optim.Adagrad,
}


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        x = torch.randn(3, 4) + random.random() + numpy.random.rand()

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        return optimizer.step(loss)  # type: ignore[arg-type,return-value]

    return step


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step(name: str, steps_before: int) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    step = training_step(model, optimizer)
    for _ in range(steps_before):
        step()
    before, state = snapshot(model, optimizer), StepState(model, step=step)
    losses = []
    for _ in range(3):
        losses.append(step().item())
        assert snapshot(model, optimizer) != before
        state.restore()
        assert snapshot(model, optimizer) == before
        state.check()
    assert len(set(losses)) == 1
    assert model.calls >= 3, "a counter is the program's"


def test_a_training_goes_on_as_if_nothing_had_been() -> None:
    def trained(with_state: bool) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        step = training_step(model, optimizer)
        for _ in range(3):
            if with_state:
                state = StepState(model, [schedule], step)
                step()
                schedule.step()
                state.restore()
                state.check()
            step()
            schedule.step()
        return [parameter.tolist() for parameter in model.parameters()]

    assert trained(True) == trained(False)


# --- optimizers


def test_state_of_an_optimizer_keeps_its_dtype_and_identity() -> None:
    """`load_state_dict` would cast it to the weight's dtype."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    master = torch.full((2,), 1.001)
    optimizer.state[weight]["master"] = master
    group = optimizer.param_groups[0]
    state = StepState(None, [optimizer])
    master.add_(1)
    group["lr"] = 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    weight.data.add_(1)
    state.restore()
    assert optimizer.state[weight]["master"] is master
    assert master.tolist() == torch.full((2,), 1.001).tolist()
    assert optimizer.param_groups == [group]
    assert group["lr"] == 0.1
    assert weight.tolist() == [1, 1], "its weights, too"
    state.check()


def test_optimizers_that_their_first_step_shows() -> None:
    """Two of one kind, which the step reaches by an object of an object."""

    class Holder:
        pass

    holder, model = Holder(), nn.Linear(2, 2)
    holder.inner = Holder()  # type: ignore[attr-defined]
    holder.inner.both = [torch.optim.AdamW([p], lr=0.1) for p in model.parameters()]  # type: ignore[attr-defined]

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in holder.inner.both:  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()

    assert [name for name, _ in found_in(step)] == ["model"]
    before = snapshot(model, *holder.inner.both)  # type: ignore[attr-defined]
    state = StepState(model, step=step)
    watching = state.watch_optimizers()
    for _ in range(2):
        step()
        state.restore()
        assert snapshot(model, *holder.inner.both) == before  # type: ignore[attr-defined]
        state.check()
    watching.remove()


def test_a_scaler() -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", growth_interval=1)

    def step(fails: bool = False) -> torch.Tensor:
        loss = model(torch.ones(1, 2)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if fails:
            raise ValueError
        scaler.step(optimizer)
        scaler.update()
        return loss

    state = StepState(model, step=step)
    assert scaler._scale is None
    for _ in range(2):
        step()
        state.restore()
        assert scaler._scale is None
        state.check()
    step()
    scale = scaler._scale
    state = StepState(model, step=step)
    for _ in range(2):
        with pytest.raises(ValueError):
            step(fails=True)
        state.restore()  # else: "unscale_() has already been called on this optimizer since the last update()"
        state.check()
    assert scaler._scale is scale
    assert scaler.get_scale() == 2 * 65536


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.5**epoch),
        functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=3),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)], [2]
        ),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ],
)
def test_a_scheduler(make: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = make(optimizer)
    arguments = [1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []

    def rates() -> list[float]:
        found = []
        for _ in range(13):
            optimizer.step()
            schedule.step(*arguments)
            found.append(optimizer.param_groups[0]["lr"])
        return found

    state = StepState(None, step=rates)
    first = rates()
    state.restore()
    state.check()
    assert rates() == first
    assert len(set(first)) > 1


def test_one_copy_of_each_tensor() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(model, optimizer)
    step()
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    more = sum(b.nbytes for b in model.buffers()) + model.memory.nbytes
    with torch.autograd.profiler.profile(profile_memory=True) as found:
        state = StepState(model, [model, optimizer, list(model.parameters())], step)
    assert state.hashes()
    clones = [event for event in found.function_events if event.name == "aten::clone"]
    assert sum(event.cpu_memory_usage for event in clones) <= weights + gradients + moments + more + 64 * 20
