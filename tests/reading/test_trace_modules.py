"""The module and the source line of a call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.traced_programs import Block
from torch_promote.reading.trace import trace
from torch_promote.reading.trace_report import TraceReport


def _modules(report: TraceReport, op: str, phase: Any = None) -> list[str]:
    return [call.module for call in report.calls.where(op=op, phase=phase)]


def test_model_given_or_not() -> None:
    model, other = nn.Sequential(Block(), nn.Linear(8, 4)), nn.Linear(4, 4)
    for given in (model, None):
        with trace(given) as report:
            other_first = model(torch.ones(1, 2, 8))
            other(other_first)
            torch.ones(4).exp()
        assert _modules(report, "linear") == ["0.mix", "0.up", "0.down", "1", "" if given is model else "Linear"]
        assert _modules(report, "softmax") == ["0"]
        assert _modules(report, "exp") == [""]


def test_a_module_that_two_have() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Sigmoid()))
    with trace(model) as report:
        model(torch.ones(1, 4)).sum().backward()
    assert _modules(report, "linear") == ["0.0", "1.0"]
    assert _modules(report, "sigmoid_backward") == ["1.1"]
    assert _modules(report, "mm", "backward") == ["1.0", "1.0", "0.0"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation(use_reentrant: bool) -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(1, 2, 8, requires_grad=True)
    with trace(model) as report:
        with tp.my_autocast("cpu"):
            y = model[1](checkpoint(model[0], x, use_reentrant=use_reentrant))
        y.sum().backward()
    assert _modules(report, "linear", "forward") == ["0.mix", "0.up", "0.down", "1.mix", "1.up", "1.down"]
    assert _modules(report, "linear", "recompute") == ["0.mix", "0.up", "0.down"]
    assert _modules(report, "native_layer_norm_backward") == ["1.norm", "0.norm"]
    assert _modules(report, "_softmax_backward_data") == ["1", "0"]


def test_backward_has_the_module_and_line_of_the_forward() -> None:
    model = nn.Sequential(Block(), nn.Linear(8, 4))
    with trace(model) as report, tp.my_autocast("cpu"):
        loss = model(torch.ones(1, 2, 8)).float().pow(2).mean()
        loss.backward()
    lines = {call.module: call.line for call in report.calls.where(op="linear")}
    for call in report.calls.where(op="aten::mm", phase="backward"):
        assert call.line == lines[call.module]
    (of_pow,) = report.calls.where(op="aten::pow.Tensor_Scalar", phase="forward")
    assert of_pow.line.startswith(f"{__file__}:")
    assert of_pow.module == ""
    backward = report.calls.where(phase="backward")
    assert {call.module for call in backward} == {"", "0", "0.mix", "0.up", "0.down", "0.norm", "1"}
    accumulated = [call.module for call in backward if call.op == "aten::detach"]
    assert set(accumulated) <= {"0.mix", "0.up", "0.down", "0.norm", "1"}


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.sinh()


class _Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Double.apply(x)


def test_autograd_functions() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Doubling(), nn.Tanh())
    with trace(model) as report:
        model(torch.ones(1, 4)).sum().backward()
    assert _modules(report, "mul") == ["1"]
    assert _modules(report, "sinh") == ["1"]


def test_what_runs_when_a_backward_has_ended_has_its_own_line() -> None:
    """As the callbacks of DistributedDataParallel, which autograd calls after the last node."""
    x = torch.ones(2, requires_grad=True)

    def callback() -> None:
        torch.ones(2).exp()

    def hook(gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    with trace() as report:
        y = x.sin()
        y.register_hook(hook)
        y.sum().backward()
    [call] = report.calls.where(op="exp")
    assert (call.phase, call.module) == ("backward", "")
    assert call.line == f"{__file__}:{callback.__code__.co_firstlineno + 1}"


def test_modules_in_threads() -> None:
    """Autograd's threads are traced; other threads of the program need their own traces."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def work(_: int) -> TraceReport:
        with trace(model) as report:
            model(torch.ones(1, 4)).sum().backward()
        return report

    with ThreadPoolExecutor(3) as threads:
        reports = list(threads.map(work, range(3)))
    for report in reports:
        assert _modules(report, "linear") == ["0"]
        assert _modules(report, "tanh_backward") == ["1"]
        assert len({call.thread for call in report.calls}) == 1


def test_lines() -> None:
    x = torch.ones(2)
    with trace() as report:
        (lambda: x.sin())()
        exec(compile("x.cos()", "<ipython-input-3-abc>", "exec"), {"x": x})
        exec(compile("\n\nx.tan()", "/tmp/ipykernel_12/345.py", "exec"), {"x": x})
        [y.exp() for y in (x,)]
    lines = {call.op: call.line for call in report.calls}
    number = int(lines["aten::sin"].rpartition(":")[2])
    assert lines == {
        "aten::sin": f"{__file__}:{number}",
        "aten::cos": "<ipython-input-3-abc>:1",
        "aten::tan": "/tmp/ipykernel_12/345.py:3",
        "aten::exp": f"{__file__}:{number + 3}",
    }


def test_a_parametrization_that_runs_before_its_model() -> None:
    """Registering it calls it."""
    with tp.trace() as report:
        net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
        net(torch.ones(2, 4))
    modules = dict.fromkeys(_modules(report, "mv"))
    assert list(modules) == ["", "ParametrizationList.0", "0.parametrizations.weight.0"]
    assert _modules(report, "linear") == ["0"]
