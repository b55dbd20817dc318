"""The phase of a call: forward, backward, recompute, or that of an optimizer and its tools."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import torch_promote as tp
from torch_promote.reading.trace_report import TraceReport
from torch_promote.report.base import Tree

X = torch.randn(4, 8)


def loss_of(model: nn.Module) -> torch.Tensor:
    with tp.my_autocast("cpu"):
        return model(X).square().mean()  # type: ignore[no-any-return]


def phases_of(report: TraceReport) -> dict[str, Counter[str]]:
    """The ops of each phase."""
    found: dict[str, Counter[str]] = {}
    for call in report.calls:
        found.setdefault(call.phase, Counter())[call.name] += 1
    return found


def model_and_expected() -> tuple[nn.Module, dict[str, Counter[str]]]:
    """A model, and the phases of its forward and backward without an optimizer."""
    model = nn.Linear(8, 8)
    with tp.trace() as report:
        loss_of(model).backward()
    model.zero_grad()
    return model, phases_of(report)


def kinds_of_step() -> dict[str, Callable[[Any], Optimizer]]:
    """Each optimizer of PyTorch, in each of its implementations."""
    found: dict[str, Callable[[Any], Optimizer]] = {}
    for name, cls in vars(torch.optim).items():
        if not (inspect.isclass(cls) and issubclass(cls, Optimizer)) or name in ("Optimizer", "SparseAdam"):
            continue
        options = inspect.signature(cls).parameters
        lr = {"lr": 0.1} if name == "SGD" else {}
        for way in ("foreach", "fused"):
            if way in options:
                found[f"{name}, {way}"] = functools.partial(cls, **lr, **{way: True})
        found[name] = functools.partial(cls, **lr)
    return found


KINDS = kinds_of_step()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_pytorchs_optimizers(kind: str) -> None:
    model, expected = model_and_expected()
    weights = [one for one in model.parameters() if "Muon" not in kind or one.dim() == 2]
    optimizer = KINDS[kind](weights)
    with tp.trace() as report:
        loss = loss_of(model)
        loss.backward()
        optimizer.step() if "LBFGS" not in kind else optimizer.step(lambda: loss)  # type: ignore[call-arg]
        optimizer.zero_grad(set_to_none=False)
    found = phases_of(report)
    assert found.pop("optimizer")
    assert found == expected
    assert {call.module for call in report.calls.where(phase="optimizer")} == {""}


class Plain(Optimizer):
    """An optimizer of the program."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def weights(self) -> list[torch.Tensor]:
        return [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for one in self.weights():
            one.sub_(decayed(one.grad))

    @torch.no_grad()
    def first_step(self) -> None:
        for one in self.weights():
            one.add_(one.grad * 0.1)  # type: ignore[operator]


def decayed(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient * 0.9


class Unregistered(Plain):
    """It does not call `Optimizer.__init__`, so PyTorch does not wrap its step."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()


class Closure:
    """An object that is a closure, as of Lightning."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.run = run

    def __call__(self) -> torch.Tensor:
        return (self.run() * 1.0).mul(1.0)

    def method(self, times: float = 1.0) -> torch.Tensor:
        return (self.run() * times).mul(1.0)


def as_partial(closure: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return functools.partial(Closure(closure).method, times=1.0)


CLOSURES: dict[str, Callable[[Any], Any]] = {
    "a lambda": lambda run: lambda: (run() * 1.0).mul(1.0),
    "an object": Closure,
    "a method": lambda run: Closure(run).method,
    "a partial": as_partial,
    "decorated": lambda run: torch.enable_grad()(lambda: (run() * 1.0).mul(1.0)),
}
OF_CLOSURES: dict[str, Callable[[Any], Any]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "Adam": functools.partial(torch.optim.Adam, fused=True),
    "LBFGS": functools.partial(torch.optim.LBFGS, max_iter=1),
    "a program's": Plain,
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("closure", CLOSURES)
@pytest.mark.parametrize("kind", OF_CLOSURES)
def test_a_closure_keeps_its_phases(kind: str, closure: str, named: bool) -> None:
    model, expected = model_and_expected()
    optimizer = OF_CLOSURES[kind](list(model.parameters()))

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    made = CLOSURES[closure](run)
    with tp.trace() as report:
        optimizer.step(closure=made) if named else optimizer.step(made)
    found = phases_of(report)
    assert found.pop("optimizer")
    assert found.pop("backward") == expected["backward"]
    assert found.pop("forward") - expected["forward"] == Counter({"aten::mul.Tensor": 2})
    assert not found


def in_a_hook(model: nn.Module) -> None:
    for one in model.parameters():
        optimizer = torch.optim.Adam([one])

        def hook(_: torch.Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        one.register_post_accumulate_grad_hook(hook)
    loss_of(model).backward()


def scaled(model: nn.Module) -> None:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def clipped(clip: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        loss_of(model).backward()
        clip(model.parameters())

    return run


def scheduled(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), capturable=False, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(torch.tensor(0.9) ** step))
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()


def averaged(model: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    loss_of(model).backward()
    average.update_parameters(model)


def of_the_program(step: str, cls: Callable[[Any], Any] = Plain) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        loss_of(model).backward()
        getattr(cls(model.parameters()), step)()

    return run


#: Programs, and the ops of their own that they call in the forward.
PROGRAMS: dict[str, tuple[Callable[[nn.Module], None], set[str]]] = {
    "in a hook": (in_a_hook, set()),
    "GradScaler": (scaled, {"aten::mul.Tensor", "aten::to.dtype_layout"}),  # the scaling of the loss
    "clip_grad_norm_": (clipped(lambda weights: nn.utils.clip_grad_norm_(weights, 0.1)), set()),
    "clip_grad_value_": (clipped(lambda weights: nn.utils.clip_grad_value_(weights, 0.1)), set()),
    "a scheduler": (scheduled, {"aten::lift_fresh"}),
    "an average of weights": (averaged, set()),
    "the program's": (of_the_program("step"), set()),
    "another method": (of_the_program("first_step"), set()),
    "without a wrapper": (of_the_program("step", Unregistered), set()),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_belongs_to_optimizers(program: str) -> None:
    model, expected = model_and_expected()
    run, own = PROGRAMS[program]
    with tp.trace() as report:
        run(model)
    found = phases_of(report)
    assert found.pop("optimizer")
    assert set(found.pop("forward") - expected["forward"]) == own
    assert not expected["backward"] - found.pop("backward")  # the scaling of the loss has a backward, too
    assert not found


def test_a_step_that_raises() -> None:
    """Later calls have the phases of their own."""
    model, expected = model_and_expected()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_post_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with tp.trace() as report:
        loss_of(model)
        with pytest.raises(RuntimeError):  # without gradients, only the hook computes
            optimizer.step()
        loss_of(model).backward()
    found = phases_of(report)
    assert found["forward"] - expected["forward"] == expected["forward"] - Counter({"aten::ones_like": 1})
    assert found["backward"] == expected["backward"]
    assert [call.op for call in report.calls.where(phase="optimizer") if call.error]


def trained() -> TraceReport:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with tp.trace(model) as report:
        loss_of(model).backward()
        optimizer.step()
    return report


def test_what_the_program_and_the_optimizer_call_is_counted_once() -> None:
    """Adam reads its steps by item(), and the program its loss."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with tp.trace(model) as report:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        loss.item()
    of_optimizer = len(report.calls.where(phase="optimizer"))
    assert {"forward", "optimizer"} <= {call.phase for call in report.calls if call.op.startswith("aten::item")}
    content = report.content()
    facts = {name: (value, note) for name, value, *note in content.facts}
    assert facts["calls"][0] == f"{len(report.calls) - of_optimizer:,}"
    assert facts["calls"][1][0].endswith(f" backward, and {of_optimizer} more of optimizers")
    assert " optimizer," not in facts["calls"][1][0]
    assert f"of {len(report.calls) - of_optimizer} calls" in content.verdict


def test_reports_tell_optimizers_from_the_model(tmp_path: Any) -> None:
    report = trained()
    of_optimizer = len(report.calls.where(phase="optimizer"))
    content = report.content()
    facts = {name: (value, note) for name, value, *note in content.facts}
    assert facts["calls"][1][0].endswith(f" backward, and {of_optimizer} more of optimizers")
    assert f"of {len(report.calls) - of_optimizer} calls" in content.verdict
    (tree,) = (part for part in content.parts if isinstance(part, Tree))
    cells = {branch.path: branch.cells[0] for branch in tree.branches}
    assert list(cells) == ["0", "", "(optimizer)"]
    assert cells["(optimizer)"] == of_optimizer
    assert sum(cells.values()) == len(report.calls)  # type: ignore[arg-type]

    report.save(tmp_path / "run.jsonl.gz")
    again = tp.load(tmp_path / "run.jsonl.gz")
    assert [call.phase for call in again.calls] == [call.phase for call in report.calls]
    assert str(again) == str(report)
    report.save(tmp_path / "run.html")
    assert "<code>(optimizer)</code>" in (tmp_path / "run.html").read_text()
    assert not report.diff(trained())
    assert "optimizer" in dict(report.explain("(model)").facts)["calls"]


def test_a_block_with_nothing_but_an_optimizer() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with tp.trace() as report:
        torch.optim.SGD([weight], lr=0.1, foreach=False).step()
    assert report.content().verdict == "Only optimizers called ops."


def test_compare_has_sites_of_the_forward() -> None:
    model = nn.Linear(8, 8)
    optimizer = Plain(model.parameters())

    def step() -> torch.Tensor:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        return loss

    ops = {site.name for site in tp.compare(step, model=model).sites}
    assert "aten::linear" in ops
    assert not ops & {"aten::mul.Tensor", "aten::sub_.Tensor"}
