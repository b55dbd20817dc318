"""`monitor`: its figures are those of the tensors, its alarms are right, and the training does not notice it."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_promote as tp
from helpers.gloo_ranks import in_ranks
from helpers.ordinary_trainings import TRAININGS, Training
from torch_promote.cli.program import main
from torch_promote.errors import MissingPackageError, OptionError
from torch_promote.observe import observer, surroundings
from torch_promote.reading import monitor as module_of_monitor

Written = dict[int, dict[str, float]]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test ends without hooks, whatever it raised."""
    update = torch.amp.GradScaler.update
    yield
    assert is_unobserved()
    assert not surroundings._listeners
    assert not surroundings._before_listeners
    assert not surroundings._hooks
    assert torch.amp.GradScaler.update is update


def is_unobserved() -> bool:
    return not observer._thread.observers and not surroundings._blocks


def into(found: Written) -> Callable[[int, dict[str, float]], None]:
    return lambda step, figures: found.__setitem__(step, figures)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Dropout(0.1), nn.Linear(8, 2))


def training(model: nn.Module, lr: float = 0.1) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()

    return step


def watched(steps: int, step: Callable[[], None] | None = None, **options: Any) -> tuple[tp.types.Monitor, Written]:
    """The monitor of so many steps of a training, and the figures that it has written."""
    found, step = Written(), step or training(net())
    with tp.monitor(**{"to": into(found), **options}) as monitor:
        for _ in range(steps):
            step()
    return monitor, found


# --- figures


def shares(tensor: torch.Tensor) -> dict[str, float]:
    """What a monitor says of a tensor, by PyTorch's own casts, and for float8 by exponents."""
    finite, size = tensor[tensor.isfinite()], tensor.numel()
    found = {
        "amax": finite.abs().max().item(),
        "zeros": (tensor == 0).sum().item() / size,
        "infs": tensor.isinf().sum().item() / size,
        "nans": tensor.isnan().sum().item() / size,
        "saturated": (finite.abs() == torch.finfo(tensor.dtype).max).sum().item() / size,
    }
    for name in ("float16", "bfloat16"):
        cast = finite.float().to(getattr(torch, name))
        found[f"under_{name}"] = ((cast == 0) & (finite != 0)).sum().item() / size
        found[f"over_{name}"] = cast.isinf().sum().item() / size
    for name, smallest, beyond in (("e4m3", 2.0**-10, 2.0**9), ("e5m2", 2.0**-17, 2.0**16)):
        found[f"under_{name}"] = ((finite.abs() < smallest) & (finite != 0)).sum().item() / size
        found[f"over_{name}"] = (finite.abs() >= beyond).sum().item() / size
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_figures_of_a_module_are_those_of_its_results(dtype: torch.dtype) -> None:
    numbers = [0.0, 1.0, -3.0, 2.0**-11, 2.0**-10, 5e-8, 1e-9, 500.0, 512.0, 448.0, 61440.0, 65504.0, 3e4, math.inf]
    wide = [7e4, 1e38, 1e-41, 3e-39] if dtype is not torch.float16 else []
    values = torch.tensor([*numbers, *wide, math.nan, torch.finfo(dtype).max], dtype=dtype)

    model = nn.Sequential(nn.LeakyReLU(1.0), nn.Linear(1, 1))  # the first returns what it gets
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model[0](values)
        model[1](torch.ones(1)).backward()
        optimizer.step()

    _, found = watched(2, step, model=model, every=1)
    expected = shares(values)
    assert {name: found[2][f"0/{name}"] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fused", [False, True])  # which leaves the versions of weights
def test_norms_updates_groups_and_casts(fused: bool) -> None:
    model, found = net(), Written()
    big = nn.Linear(6, 40_000)
    model.big = big
    groups = [{"params": model[0].parameters(), "name": "first layer"}, {"params": [*model[1:4].parameters()]}]
    optimizer = torch.optim.SGD([*groups, {"params": big.parameters(), "lr": 0.5}], lr=0.1, fused=fused)
    expected: dict[str, float] = {}
    squares = {"first_layer": 0.0, "group_1": 0.0, "group_2": 0.0}
    with tp.monitor(model, every=2, to=into(found)):
        for _ in range(2):
            with tp.my_autocast("cpu"):
                x = model[3](model[2](model[1](model[0](torch.randn(4, 6)))))
                loss = x.float().square().mean() + big(torch.randn(4, 6)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            before = [one.detach().clone() for one in model.parameters()]
            optimizer.step()
        for (name, one), old in zip(model.named_parameters(), before, strict=True):
            assert one.grad is not None
            expected[f"{name}/gradient"] = one.grad.norm().item()
            expected[f"{name}/weight"] = one.norm().item()
            expected[f"{name}/update"] = ((one - old).norm() / old.norm()).item()
            group = "first_layer" if name[0] == "0" else "group_2" if name.startswith("big") else "group_1"
            squares[group] += one.grad.norm().item() ** 2
    assert [*found] == [2]
    figures = found[2]
    # The update of the largest weight is measured in a sample.
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=2e-2)
    exact = {name: number for name, number in expected.items() if not name.startswith("big.weight/update")}
    assert {name: figures[name] for name in exact} == pytest.approx(exact, rel=1e-4)
    for group, number in squares.items():
        assert figures[f"training.{group}/gradient"] == pytest.approx(math.sqrt(number), rel=1e-4)
    assert figures["training/gradient"] == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-4)
    assert figures["training.group_1/gradient_amax"] == max(one.grad.abs().max() for one in model[1:4].parameters())
    assert (figures["0/casts"], figures["1/casts"], figures["1.1/casts"]) == (3, 2, 2)
    assert figures["_model_/casts"] == 10


def test_figures_of_a_module_have_those_of_the_modules_inside() -> None:
    figures = watched(2, every=1)[1][2]
    assert figures["1/amax"] == max(figures["1.0/amax"], figures["1.1/amax"])
    assert figures["_model_/amax"] >= figures["3/amax"]


def test_what_tensorboards_reader_finds(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    def run(to: Any) -> None:
        model = net()
        step = training(model)
        with tp.monitor(model, every=3, to=to):
            for number in range(12):
                if number == 10:
                    model[0].weight.data.mul_(1000)
                step()

    found = Written()
    run(into(found))
    run(tmp_path / "by path")
    with SummaryWriter(tmp_path / "by writer") as writer:
        run(writer)
        writer.add_scalar("own", 1.0, 0)
    assert [*found] == [3, 6, 9, 12]
    for folder in ("by path", "by writer"):
        reader = accumulators.EventAccumulator(str(tmp_path / folder))
        reader.Reload()
        tags = {*reader.Tags()["scalars"]} - {"own"}
        assert tags == {*found[3]}
        for tag in tags:
            read = {event.step: event.value for event in reader.Scalars(tag)}
            assert read == pytest.approx({step: figures[tag] for step, figures in found.items()}, rel=1e-6)
        (mark,) = reader.Tensors("alarms/text_summary")
        assert mark.step == 12
        assert b"the amax of 0 is" in mark.tensor_proto.string_val[0]
        assert sorted(os.listdir(tmp_path / folder / "looks"))[0] == "step00000003.jsonl.gz"


def test_another_writer_of_scalars() -> None:
    found: set[tuple[str, int]] = set()
    watched(2, every=2, to=types.SimpleNamespace(add_scalar=lambda tag, number, step: found.add((tag, step))))
    assert ("0.weight/gradient", 2) in found


# --- steps


def test_steps_count_from_the_start_of_a_resumed_training() -> None:
    monitor, found = watched(7, every=4, start=6)
    assert ([*found], monitor.steps, monitor.looks) == ([8, 12], 13, 2)


def test_between_looks_nothing_observes() -> None:
    step, seen = training(net()), []
    with tp.monitor(every=5, to=lambda step, figures: None):
        for _ in range(11):
            seen.append(is_unobserved())
            step()
        assert is_unobserved()
    assert [number for number, unobserved in enumerate(seen, 1) if not unobserved] == [5, 10]


def test_two_optimizers_are_one_step() -> None:
    model, found = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)}), Written()
    a, b, other = (torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "abc")
    watched = nn.ModuleList([model["a"], model["b"]])
    with tp.monitor(watched, every=2, to=into(found)) as monitor:
        for _ in range(4):
            model["b"](model["a"](model["c"](torch.randn(2, 3)))).sum().backward()
            for one in (other, a, b):  # the first does not update the model
                one.step()
    assert ([*found], monitor.steps) == ([2, 4], 4)
    assert {"0.weight/gradient", "1.weight/gradient", "training.group_0_of_optimizer_1/gradient"} <= {*found[4]}


def scaled_training(overflows: Callable[[int], bool]) -> Callable[[], None]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    numbers = iter(range(1000))

    def step() -> None:
        optimizer.zero_grad()
        with tp.my_autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 6)).float().square().mean()
        scaler.scale(loss * (math.inf if overflows(next(numbers)) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def test_skipped_steps_count() -> None:
    monitor, found = watched(8, scaled_training(lambda number: number in (0, 1, 5)), every=2)
    assert (monitor.steps, monitor.skipped_steps, monitor.alarms) == (8, 3, [])
    assert [figures["training/scale"] for figures in found.values()] == [512, 256, 512, 256]
    assert [figures["training/skipped_steps"] for figures in found.values()] == [2, 2, 3, 3]


# --- alarms


def run_with(change: Callable[[nn.Sequential], object], at: int = 13, steps: int = 20, **options: Any) -> Any:
    """The monitor of a training whose model changes before a step."""
    model = net()
    step = training(model, lr=1e-4)
    with tp.monitor(model, every=2, to=lambda step, figures: None) as monitor, tp.my_autocast("cpu", **options):
        for number in range(1, steps + 1):
            if number == at:
                change(model)
            step()
    return monitor


def zero_gradients(model: nn.Sequential) -> None:
    model[1].register_full_backward_hook(lambda module, gradients, of: (torch.zeros_like(gradients[0]),))
    model[1][1].register_full_backward_pre_hook(lambda module, of: (torch.zeros_like(of[0]),))


def squared_results(model: nn.Sequential) -> None:
    model[3].weight.data.fill_(3e3)  # fits into float16 before it is squared
    model[3].forward = lambda x: nn.Linear.forward(model[3], x).square()  # type: ignore[method-assign]


FLOAT16: dict[str, Any] = {"dtype": torch.float16}
SAID_OF_0 = "is 0 in 2 looks, and was not before. Others that became 0 with it: {}."
#: What changes a model, in what it runs, what is noticed, and what is said of it. docs/monitor.md has one in float16.
ALARMS: dict[str, tuple[Callable[[nn.Sequential], object], dict[str, Any], tuple[int, str, str] | None, list[str]]] = {
    "amax": (
        lambda model: model[3].weight.data.mul_(100),
        {"policy": "off"},
        (14, "3", "amax"),
        ["aten::linear", "No override gives it more range: autocast lowers no op there."],
    ),
    "detached": (
        lambda model: model[1].register_forward_hook(lambda module, args, result: result.detach()),
        {},
        (16, "1.1", "gradient"),
        [SAID_OF_0.format(3)],
    ),
    "gradients of 0": (zero_gradients, {}, (16, "1.1", "gradient"), [SAID_OF_0.format(3)]),
    "dead": (
        lambda model: model[1][1].register_forward_hook(lambda module, args, result: result * 0),
        {},
        (16, "1.1", "gradient"),
        [SAID_OF_0.format(4)],
    ),
    "frozen": (lambda model: model[0].requires_grad_(False), {}, None, []),
    "NaN": (
        lambda model: model[3].weight.data.fill_(math.nan),
        {},
        (14, "(model)", "loss"),
        ["the only loss is NaN, and so was 0.weight before this step. "],
    ),
    "overflow": (
        lambda model: model[3].weight.data.fill_(6e4),
        {**FLOAT16, "at": 14},
        (14, "(model)", "loss"),
        [
            "the only loss is inf, first in aten::square, forward, (model), ",
            'Try: my_autocast(overrides={"square": "fp32"}).',
        ],
    ),
    "overflow in a module": (
        squared_results,
        {**FLOAT16, "at": 14},
        (14, "3", "loss"),
        ['Try: tp.set_module_policy(model, {"3": {"square": "fp32"}}), or my_autocast(overrides={"square": "fp32"}).'],
    ),
}


@pytest.mark.parametrize("what", ALARMS)
def test_alarms(what: str) -> None:
    change, options, expected, texts = ALARMS[what]
    alarms = run_with(change, **options).alarms
    if expected is None or expected[2] != "loss":
        assert [alarm[:3] for alarm in alarms] == [expected] * (expected is not None)
    found = [alarm for alarm in alarms if expected is not None and alarm.figure == expected[2]]
    assert [alarm[:3] for alarm in found] == [expected] * (expected is not None)  # told of once
    assert all(text in found[0].text for text in texts)


def test_an_amax_that_grows_from_look_to_look() -> None:
    model = net()
    step = training(model)
    numbers = iter(range(80))

    def grow() -> None:
        if next(numbers) > 40:
            model[3].weight.data.mul_(1.4)
            model[3].bias.data.mul_(1.4)
        saved = copy.deepcopy(model.state_dict())
        step()
        model.load_state_dict(saved)

    monitor, _ = watched(80, grow, model=model, every=2)
    assert [alarm[1:3] for alarm in monitor.alarms][:1] == [("3", "amax")]


def test_a_scale_that_keeps_falling() -> None:
    monitor, _ = watched(14, scaled_training(lambda number: number >= 4), every=2)
    assert [alarm[:3] for alarm in monitor.alarms] == [(10, "(model)", "scale")]
    assert "keeps falling: 1024, 1024, 512" not in monitor.alarms[0].text
    assert monitor.skipped_steps == 10


LONGER = [pytest.param(*one, marks=pytest.mark.slow) for one in ((80, 2), (300, 10), (1000, 50))]


@pytest.mark.parametrize("make", TRAININGS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("steps", "every"), [(44, 4), *LONGER])
def test_ordinary_trainings_raise_no_alarm_and_keep_their_bits(
    make: Callable[[], Training], steps: int, every: int
) -> None:
    def run(steps: int, every: int) -> tuple[dict[str, torch.Tensor], tp.types.Monitor]:
        torch.manual_seed(2)
        model, step = make()
        with tp.monitor(model, every=every, to=lambda step, figures: None) as monitor:
            for _ in range(steps):
                step()
        return model.state_dict(), monitor

    (plain, unlooked), (watched, monitor) = run(steps, 10_000), run(steps, every)
    assert (unlooked.looks, monitor.looks, monitor.alarms) == (0, steps // every, [])
    assert all(torch.equal(one, watched[name]) for name, one in plain.items())


# --- the training does not notice


@pytest.mark.parametrize("strict", [False, True])
def test_a_function_that_raises_is_told_of_once(strict: bool) -> None:
    calls = []

    def to(step: int, figures: dict[str, float]) -> None:
        calls.append(step)
        raise ConnectionError("no route")

    with warnings.catch_warnings(record=not strict) as said:
        warnings.simplefilter("error" if strict else "always")
        monitor, _ = watched(6, every=2, to=to)
    assert (calls, monitor.steps) == ([2, 4, 6], 6)
    if said is not None:
        assert [str(one.message) for one in said] == [
            "tp.monitor goes on without to, which raised ConnectionError: no route"
        ]


@pytest.mark.parametrize("number", [1, 3, 4])
def test_an_error_of_the_training_leaves_nothing_installed(number: int, tmp_path: Path) -> None:
    @tp.monitor(every=2, to=lambda step, figures: None, looks=tmp_path)
    def run() -> None:
        step = training(net())
        for _ in range(number):
            step()
        net()(torch.randn(2, 6))
        raise KeyError

    with pytest.raises(KeyError):
        run()
    files = sorted(path.name for path in tmp_path.iterdir())
    looked_at = {1: [], 3: [2, 4], 4: [2, 4]}[number]  # the look that was open is kept, too
    assert files == [f"step{step:08d}.jsonl.gz" for step in looked_at]
    assert all(tp.load(tmp_path / name).calls for name in files)


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="goes on without recordings"):
        _, found = watched(2, every=1, looks=tmp_path / "file" / "looks")
    assert [*found] == [2]


# --- recordings


def test_recordings_are_few_and_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_monitor, "_WRITTEN", 1)
    model = net()
    step = training(model, lr=1e-4)
    with tp.monitor(model, every=1, to=lambda step, figures: None, looks=tmp_path) as monitor:
        for number in range(30):
            if number == 9:
                model[0].weight.data.mul_(50)
            step()
    (alarm,) = monitor.alarms
    steps = [int(path.name[4:12]) for path in sorted(tmp_path.iterdir())]
    assert steps == [9, 10, *range(23, 31)]
    assert alarm.step == 10
    reports = [tp.load(tmp_path / f"step{step:08d}.jsonl.gz") for step in (9, 10)]
    assert tp.diff(*reports).kind is not None
    assert {call.phase for call in reports[0].calls} == {"forward", "backward"}
    assert set(reports[0].ends[0].gradients) == {name for name, _ in model.named_parameters()}


# --- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "`every` must be an int of at least 1, got 0"),
        ({"every": True}, "`every` must be an int"),
        ({"start": -1}, "`start` must be an int of at least 0, got -1"),
        ({"to": 3}, "`to` is a SummaryWriter, the path of a folder for TensorBoard, or a function"),
        ({"to": __file__}, "is a file. Name a folder."),
        ({"model": "model"}, "model must be an nn.Module or None, got 'model'"),
    ],
)
def test_invalid_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message), tp.monitor(**{"to": print, **options}):
        pass


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackageError, match="pip install tensorboard"), tp.monitor(to=tmp_path):
        pass
    with tp.monitor(to=print):
        pass


def test_an_alarm_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    run_with(lambda model: model[3].weight.data.mul_(100))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tp.monitor, step 14: the amax of 3 is")


def test_a_run_without_a_look_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run_with(lambda model: None, steps=1)
    assert capsys.readouterr().err.startswith("tp.monitor has looked at no step of 1: looks are at 2, 4, ...")


# --- processes


def test_a_process_that_is_forked_in_a_look_has_no_monitor() -> None:
    found, step = Written(), training(net())
    with tp.monitor(every=1, to=into(found)):
        step()
        assert not is_unobserved()
        loader = torch.utils.data.DataLoader(Told(), num_workers=1, multiprocessing_context="fork")
        assert [bool(one) for one in loader] == [True, True]
        step()
    assert [*found] == [2]


class Told(torch.utils.data.Dataset[bool]):
    """Says whether a worker is observed."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return is_unobserved()


def ranks(shards: bool, rank: int, world_size: int) -> dict[str, Any]:
    """What a rank's monitor says of the last of four steps, and what it should."""
    model = net()
    model[2].p = 0.0
    wrapped: nn.Module = model
    if shards:
        mesh = init_device_mesh("cpu", (world_size,))
        for one in (model[0], model[1], model):
            fully_shard(one, mesh=mesh)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    peaks = [0.0]
    model[1].register_forward_hook(lambda module, args, result: peaks.append(result.detach().abs().max().item()))
    found, optimizer = Written(), torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    with tp.monitor(model, every=2, to=into(found)) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            wrapped((1 + rank) * torch.randn(4, 6, generator=generator)).square().mean().backward()
            before = {name: whole(one) for name, one in model.named_parameters()}
            optimizer.step()
    largest = torch.tensor(peaks[-1])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    expected = {}
    for name, one in model.named_parameters():
        assert one.grad is not None
        gradient, weight = whole(one.grad), whole(one)
        expected[f"{name}/gradient"] = gradient.norm().item()
        expected[f"{name}/weight"] = weight.norm().item()
        expected[f"{name}/update"] = (0.1 * gradient.norm() / before[name].norm()).item()
    norms = [number for name, number in expected.items() if name.endswith("/gradient")]
    expected["training/gradient"] = math.hypot(*norms)
    figures = found.get(4, {})
    return {
        "steps": [*found],
        "looks": monitor.looks,
        "found": {name: figures.get(name) for name in expected},
        "expected": expected,
        "amax": (figures.get("1.1/amax"), largest.item()),
    }


def one_rank_alone(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    found, step = Written(), training(net())
    module_of_monitor._PATIENCE = 1
    with warnings.catch_warnings(record=True) as said, contextlib.ExitStack() as block:
        warnings.simplefilter("always")
        if rank == 0:
            block.enter_context(tp.monitor(every=2, to=into(found)))
        for _ in range(6):
            step()
    return [*found], [str(one.message) for one in said]


def test_ranks_are_added_up(tmp_path: Path) -> None:
    programs = {"ddp": functools.partial(ranks, False), "fsdp2": functools.partial(ranks, True)}
    first, second = in_ranks({**programs, "alone": one_rank_alone}, 2, tmp_path)
    for program in programs:
        of_first, of_second = first[program], second[program]
        assert isinstance(of_first, dict), of_first
        assert (of_first["steps"], of_second["steps"], of_second["looks"]) == ([2, 4], [], 2)
        assert of_first["found"] == pytest.approx(of_first["expected"], rel=1e-4)
        assert of_first["amax"][0] == pytest.approx(of_first["amax"][1], rel=1e-6)
    steps, said = first["alone"]
    assert steps == [2, 4, 6]
    assert len(said) == 1
    assert said[0].startswith("tp.monitor goes on without the figures of the ranks [1], which raised TimeoutError")


SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
print([one.double().sum().item() for one in model.parameters()])
"""


def test_the_command_monitors_a_program_that_knows_nothing(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch_promote", "run"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options, "train.py", "9"], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    plain, monitored = run(), run("--monitor", "logs", "--every", "4")
    assert monitored.returncode == 0
    assert monitored.stderr == (
        "torch-promote: the monitor looked at 2 of 9 steps, alarms: 0. To see them: `tensorboard --logdir logs`. "
        "Recordings of looks: logs/looks.\n"
    )
    assert monitored.stdout == plain.stdout
    reader = accumulators.EventAccumulator(str(tmp_path / "logs"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("0.weight/update")] == [4, 8]
    assert sorted(os.listdir(tmp_path / "logs" / "looks")) == ["step00000004.jsonl.gz", "step00000008.jsonl.gz"]
    assert run("--monitor", "none").stderr == (
        "tp.monitor has looked at no step of 9: looks are at 100, 200, ... Pass a smaller `every` (--every).\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--every", "3"], "--every N goes with --monitor DIR"),
        (["--monitor", "logs", "--every", "0"], "N is 1 or more"),
        (["--monitor", sys.executable], "is a file. Name a folder."),
    ],
)
def test_an_invalid_command_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *options, "-c", "raise SystemExit(3)"]) == 2
    assert message in capsys.readouterr().err
