"""The warning for an override that had no effect, in threads, tasks, generators, checkpoints and compiled functions."""

from __future__ import annotations

import _thread
import asyncio
import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.overrides_without_effect import BATCH, NET, Body, W, X, linear_12_times, program, region, told
from helpers.subprocesses import run_python
from torch_promote import _C
from torch_promote.regions import autocast, unused_overrides


@pytest.fixture(autouse=True)
def no_calls_of_other_tests() -> None:
    """An op that some test called while PyTorch traced counts as called in every region."""
    _C.forget_named_calls()


def test_threads_tell_of_their_own_regions() -> None:
    runs = [region({"mm": "fp32"}, linear_12_times), region({"mm": "float64"}, lambda: torch.mm(X, W))] * 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(lambda run: run(), runs))
    assert len(caught) >= 1
    assert {warning.filename for warning in caught} == {caught[0].filename}


_tasks = iter(range(10**6))


def region_in_steps(body: Body) -> Callable[[], Any]:
    """Returns a coroutine function with one region, which is open across an await."""
    scope: dict[str, Any] = {"tp": tp, "sleep": asyncio.sleep, "body": body}
    source = """
async def run():
    with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        await sleep(0)
        body()
"""
    exec(compile(source, f"<task {next(_tasks)}>", "exec"), scope)
    run: Callable[[], Any] = scope["run"]
    return run


def test_a_region_of_a_task() -> None:
    async def main() -> None:
        await asyncio.gather(region_in_steps(linear_12_times)(), region_in_steps(lambda: torch.mm(X, W))())

    assert len(told(lambda: asyncio.run(main()))) == 1


def test_steps_of_generators_and_coroutines_tell_nothing() -> None:
    run = program(
        "@tp.my_autocast('cpu', overrides={'mm': 'fp32'})\ndef steps():\n    yield body()\n    body()\nlist(steps())",
        body=linear_12_times,
    )
    assert told(run) == []


def test_exit_stacks_and_copies() -> None:
    def with_stack() -> None:
        with ExitStack() as stack:
            stack.enter_context(tp.my_autocast("cpu", overrides={"mm": "fp32"}))
            linear_12_times()

    assert len(told(with_stack)) == 1
    made = program("regions.append(tp.my_autocast('cpu', overrides={'mm': 'fp32'}))", regions=(regions := []))
    made()
    for region_of in (copy.deepcopy(regions[0]), pickle.loads(pickle.dumps(regions[0]))):
        with pytest.warns(tp.UnusedOverrideWarning, match="Name linear"), region_of:
            NET(X)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_in_the_region(use_reentrant: bool) -> None:
    x = X.detach().clone().requires_grad_()
    assert len(told(region({"mm": "fp32"}, lambda: checkpoint(NET, x, use_reentrant=use_reentrant)))) == 1
    once = lambda: checkpoint(lambda: torch.mm(x, W), use_reentrant=use_reentrant)  # noqa: E731
    assert told(region({"mm": "fp32"}, lambda: (NET(x), once()))) == []


def test_a_compiled_function_in_the_region() -> None:
    compiled = torch.compile(lambda x: torch.mm(x, W), backend="eager")
    assert told(region({"mm": torch.float64}, lambda: (compiled(X), NET(X)))) == []
    assert told(region({"mm": torch.float64}, lambda: (compiled(X), NET(X)))) == [], "traced for another region"


def test_a_region_in_a_compiled_function() -> None:
    @torch.compile(backend="aot_eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", overrides={"bmm": "fp32"}):
            return x @ x

    assert told(lambda: run(BATCH)) == []
    assert run(BATCH).dtype is torch.bfloat16


def test_lines_with_equal_overrides_have_one_packed_spec() -> None:
    """A compiled function that gets regions of several lines would be compiled again for each packed spec."""
    regions: list[Any] = []
    for _ in range(5):
        program('regions.append(tp.my_autocast("cpu", overrides={"softmax": "fp32"}))', regions=regions)()
    assert len({one._packed for one in regions}) == 1


def test_tracing_is_not_counted() -> None:
    compiled = torch.compile(lambda: torch.nn.functional.linear(X, W), backend="eager")
    (text,) = told(region({"mm": "fp32"}, compiled))
    assert "aten::linear ran once " in text


def test_a_region_made_without_a_python_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    done = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda error: (errors.append(error.exc_value), done.set()))
    _thread.start_new_thread(tp.my_autocast, ("cpu",), {"overrides": {"mm": "no policy"}})
    assert done.wait(10)
    assert [type(error) for error in errors] == [tp.PolicyError]  # and not the ValueError of a missing frame


def test_function_transforms() -> None:
    assert told(region({"mm": "fp32"}, lambda: torch.func.grad(lambda x: torch.mm(x, W).sum())(X.detach()))) == []
    _C.forget_named_calls()
    (text,) = told(region({"mm": "fp32"}, lambda: torch.vmap(lambda x: torch.mm(x, W))(torch.randn(2, 4, 8))))
    assert text.endswith("Name matmul."), "vmap makes a matmul of it, which the override does not reach"


def test_what_a_table_shows_is_what_it_was() -> None:
    with tp.my_autocast("cpu", overrides={"m[m]": "fp32"}):
        pattern, bytes_ = _C.current_policy(), _C.current_policy_bytes()
    with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        assert (_C.current_policy(), _C.current_policy_bytes()) == (pattern, bytes_)
        NET(X)
        assert (_C.current_policy(), _C.current_policy_bytes()) == (pattern, bytes_)


def test_from_the_command_line() -> None:
    program_text = """
import torch, torch_promote as tp
with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
    torch.nn.Linear(2, 2)(torch.ones(2, 2))
"""
    done = run_python(program_text)
    assert "<string>:3: UnusedOverrideWarning" in done.stderr or "UnusedOverrideWarning: the override of" in done.stderr


def test_a_region_that_no_line_makes_has_no_author(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread calls the class itself."""
    asked = threading.Event()
    lines, errors = [], []

    def line_of(frame: FrameType | None) -> Any:
        lines.append((frame, unused_overrides.line_of(frame)))
        asked.set()
        return lines[-1][1]

    monkeypatch.setattr(autocast, "line_of", line_of)
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    _thread.start_new_thread(tp.my_autocast, ("cpu",), {"overrides": {"mm": "fp32"}})
    assert asked.wait(60)
    assert (lines, errors) == ([(None, None)], [])


def test_lines_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_overrides, "_lines", {})
    monkeypatch.setattr(unused_overrides, "_MOST_LINES", 16)
    for number in range(40):
        code = compile("tp.my_autocast('cpu', overrides={'mm': 'fp32'})", f"<line {number}>", "eval")
        eval(code, {"tp": tp})
        assert 1 <= len(unused_overrides._lines) <= 16


def test_a_call_without_a_frame_of_python_has_no_line() -> None:
    assert unused_overrides.line_of(None) is None
