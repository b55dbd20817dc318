"""`StepState` saves the state before a step, and restores it bit for bit and in place."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.gloo_ranks import end_group
from torch_promote.checking.comparison import same_bits
from torch_promote.errors import OptionError, StepError
from torch_promote.numerics.step_state import StepState, objects_of


@pytest.fixture(autouse=True)
def global_generators() -> Iterator[None]:
    python, of_numpy = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(python)
    numpy.random.set_state(of_numpy)


def snapshot(*objects: Any) -> Any:
    """The bits of everything, with the identity of gradients."""
    found: list[Any] = [random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()]
    for one in objects:
        if isinstance(one, nn.Module):
            for name, tensor in (*one.named_parameters(), *one.named_buffers()):
                found.append((name, id(tensor), tensor.tolist(), tensor.requires_grad, tensor.dtype))
                gradient = tensor.grad
                found.append((id(gradient), None if gradient is None else gradient.to_dense().tolist()))
            found.append([module.training for module in one.modules()])
        elif isinstance(one, torch.Generator):
            found.append(one.get_state().tolist())
        elif isinstance(one, random.Random):
            found.append(one.getstate())
        else:
            found.append(repr(one.state_dict()))
    return found


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
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "LBFGS": functools.partial(torch.optim.LBFGS, max_iter=2),
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
    assert len(set(losses)) == 1
    assert model.calls >= 3, "a counter is the program's"


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

    assert [name for name, _ in objects_of(step)] == ["model"]
    before = snapshot(model, *holder.inner.both)  # type: ignore[attr-defined]
    state = StepState(model, step=step)
    watching = state.watch_optimizers()
    for _ in range(2):
        step()
        state.restore()
        assert snapshot(model, *holder.inner.both) == before  # type: ignore[attr-defined]
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
    step()
    scale = scaler._scale
    state = StepState(model, step=step)
    for _ in range(2):
        with pytest.raises(ValueError):
            step(fails=True)
        state.restore()  # else: "unscale_() has already been called on this optimizer since the last update()"
    assert scaler._scale is scale
    assert scaler.get_scale() == 2 * 65536


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
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
        StepState(model, [model, optimizer, list(model.parameters())], step)
    clones = [event for event in found.function_events if event.name == "aten::clone"]
    assert sum(event.cpu_memory_usage for event in clones) <= weights + gradients + moments + more + 64 * 20


# --- modules and tensors


def replace(model: Any) -> None:
    """As with averages that are swapped in for an evaluation, which replaces the memory or the parameter."""
    model.weight.data = torch.zeros(2, 2)
    model.bias = nn.Parameter(torch.zeros(2))
    model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    model.register_buffer("made_in_the_step", torch.zeros(1))


def set_flags(model: Any) -> None:
    model.train()
    model[0].eval()
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: nn.Linear(2, 2), replace),
        (lambda: nn.Linear(2, 2), lambda model: model.half()),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval()), set_flags),
        (lambda: torch.jit.script(nn.Linear(2, 2)), lambda model: model.weight.data.add_(1)),
        (lambda: nn.Embedding(4, 2, sparse=True), lambda model: model(torch.tensor([1, 2])).sum().backward()),
    ],
)
def test_changes_of_modules_are_undone(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    model = make()
    if isinstance(model, nn.Embedding):
        model(torch.tensor([1])).sum().backward()
    before, state = snapshot(model), StepState(model)
    places = [weight.data_ptr() for weight in model.parameters()]
    for _ in range(2):
        change(model)
        assert snapshot(model) != before
        state.restore()
        assert snapshot(model) == before
        assert [weight.data_ptr() for weight in model.parameters()] == places


def test_tensors_that_are_no_parameters() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2))
            self.weight = nn.Parameter(torch.ones(2))
            self.seen: Any = None

        def forward(self) -> torch.Tensor:
            self.state.add_(self.weight)  # it is part of the graph now
            self.seen = self.state.detach() + 1
            self.made = torch.ones(2)
            return self.state.sum()

    model = Recurrent()
    state = StepState(model)
    for _ in range(2):
        model().backward()
        state.restore()
        assert (model.state.tolist(), model.state.grad_fn, model.seen) == ([0, 0], None, None)
        assert not hasattr(model, "made")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # one is in beta state, the other is deprecated
    COMPRESSED, QUANTIZED = torch.eye(2).to_sparse_csr(), torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return torch.quantize_per_tensor(tensor.dequantize() + 1, 0.5, 0, torch.qint8)
    return tensor * 2 if tensor.layout is torch.sparse_csr else torch.ones_like(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(3),
        torch.zeros(2, 3).t(),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
        COMPRESSED,
        QUANTIZED,
        torch.zeros(2, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {tensor.device}",
)
def test_unusual_buffers(tensor: torch.Tensor) -> None:
    model = nn.Module()
    model.register_buffer("buffer", tensor)
    state = StepState(model)
    state.restore()
    if tensor.device.type == "cpu" and tensor.numel() and tensor.layout is torch.strided:
        before = tensor.clone()
        with torch.no_grad():
            tensor.data = other_values(tensor)
        assert not same_bits(tensor, before)
        state.restore()
        assert same_bits(tensor, before)


def test_sharded_weights(tmp_path: Path) -> None:
    """Between a forward and its backward, modules hold whole weights in place of their shards."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(3, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = [weight.to_local().clone() for weight in model.parameters()]  # type: ignore[attr-defined]
        state = StepState(model, [optimizer])
        outputs = []
        for _ in range(2):
            outputs.append(model(x).detach())
            state.restore()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.restore()
            now = [weight.to_local() for weight in model.parameters()]  # type: ignore[attr-defined]
            assert all(map(torch.equal, now, before))
        assert torch.equal(*outputs)
    finally:
        end_group()


# --- what the step refers to, and what the caller lists


MODEL = nn.Linear(2, 2)
GENERATOR = torch.Generator()


def helper() -> Any:
    return MODEL(torch.rand(1, 2, generator=GENERATOR))


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def __call__(self) -> None:
        self.step()


def test_where_it_looks() -> None:
    trainer, schedules = Trainer(), [random.Random(0), numpy.random.default_rng(0)]
    loader = torch.utils.data.DataLoader([1], generator=GENERATOR)

    def names(step: Any) -> list[str]:
        return sorted(name for name, _ in objects_of(step))

    assert names(lambda: MODEL) == ["MODEL"]
    assert names(helper) == ["GENERATOR", "MODEL"]
    assert names(lambda: helper()) == ["GENERATOR", "MODEL"]
    assert names(lambda: [MODEL for _ in range(2)]) == ["MODEL"]
    assert names(trainer.step) == ["self.model"]
    assert names(trainer) == ["self.model"]
    assert names(lambda: trainer.step()) == ["trainer.model"]
    assert names(functools.partial(print, MODEL, end=GENERATOR)) == ["argument 0", "end"]
    assert names(lambda: schedules) == ["schedules[0]", "schedules[1]"]
    assert "loader.generator" in names(lambda: next(iter(loader)))
    assert names(print) == []
    assert names(lambda: never) == []
    never = 1


def test_generators() -> None:
    one, other, of_numpy = torch.Generator(), random.Random(0), numpy.random.default_rng(0)
    of_numpy_too = numpy.random.RandomState(0)

    def step() -> list[float]:
        found = [torch.rand(1, generator=one).item(), other.random(), of_numpy.random(), of_numpy_too.rand()]
        return [*found, random.random(), numpy.random.rand(), torch.rand(1).item()]

    state = StepState(None, step=step)
    first = step()
    state.restore()
    state.check()
    assert step() == first
    state.restore()
    state.use_other_random_numbers()
    held_out = step()
    assert not set(held_out) & set(first)
    state.restore()
    state.use_other_random_numbers()
    assert step() == held_out
    state.restore()
    assert step() == first


def test_what_the_caller_lists() -> None:
    class Loader:
        position = 0

        def state_dict(self) -> Any:
            return {"position": self.position}

        def load_state_dict(self, state: Any) -> None:
            self.position = state["position"]

    class Scales(nn.Module):
        history = 0

        def get_extra_state(self) -> Any:
            return {"history": self.history}

        def set_extra_state(self, state: Any) -> None:
            self.history = state["history"]

    averages, loader, log, names, scales = {"weight": torch.zeros(2)}, Loader(), [1], {"a"}, Scales()
    array, tensor = numpy.zeros(2), torch.zeros(2)
    shadow = averages["weight"]
    state = StepState(None, [averages, loader, log, array, tensor, names, scales])
    for _ in range(2):
        averages["weight"].add_(1)
        averages["bias"] = torch.ones(1)
        loader.position, array[0], scales.history = 7, 1, 3
        tensor.add_(1)
        log.append(2)
        names.add("b")
        with pytest.raises(StepError, match=r"Different: restore\[1\], restore\[3\], restore\[6\]\."):
            state.check()
        state.restore()
        state.check()
        assert (averages, names) == ({"weight": shadow}, {"a"})
        assert (shadow.tolist(), loader.position, log, array.tolist()) == ([0, 0], 0, [1], [0, 0])
        assert (tensor.tolist(), scales.history) == ([0, 0], 0)


def test_what_it_cannot_restore() -> None:
    class Forgetful:
        steps = 0

        def state_dict(self) -> Any:
            return {"steps": self.steps}

        def load_state_dict(self, state: Any) -> None:
            pass

    one = Forgetful()
    state = StepState(None, [one])
    one.steps = 1
    state.restore()
    with pytest.raises(StepError, match=r"could not be restored. Different: restore\[0\]. Pass the changed objects"):
        state.check()
    with pytest.raises(
        OptionError, match=r"restore\[1\] is of type int, whose state cannot be restored. Legal: modules"
    ):
        StepState(None, [nn.Linear(1, 1), 5])
    with pytest.raises(OptionError, match=r"restore\[0\] is of type type, whose state cannot be restored."):
        StepState(None, [nn.Linear])  # which has the functions state_dict and load_state_dict
