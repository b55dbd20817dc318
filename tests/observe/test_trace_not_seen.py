"""The remarks of a trace about unobserved computations; there are none for fully observed programs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader

import torch_promote as tp
from helpers.traced_programs import PROGRAMS
from torch_promote.observe.trace import trace

_get_hook = torch._C._dynamo.eval_frame.set_guard_complete_hook


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_plain_programs(name: str) -> None:
    with trace() as report:
        PROGRAMS[name](lambda: tp.my_autocast("cpu"))
    assert report.not_seen == []


def test_threads() -> None:
    with trace() as report:
        for name in (None, None, "a name"):
            thread = threading.Thread(target=torch.ones, args=(2,), name=name)
            thread.start()
            thread.join()
    assert report.calls == []
    assert [sentence.partition(".")[0] for sentence in report.not_seen] == ["Threads started in the block: 2"]


def test_workers_of_a_data_loader() -> None:
    with trace() as report:
        for _ in DataLoader(range(4), num_workers=1, multiprocessing_context="fork"):
            pass
    assert any("workers of a DataLoader: 1." in sentence for sentence in report.not_seen)


def test_compiled_functions() -> None:
    function = torch.compile(lambda x: (x.sin() + 1).cos(), backend="eager")
    x = torch.ones(3)
    function(x)
    with trace() as report:
        function(x)
        with trace() as inner:
            function(x)
            function(x)
        x.exp()
    assert report.not_seen[0].startswith("Calls of compiled functions: 3.")
    assert inner.not_seen[0].startswith("Calls of compiled functions: 2.")
    assert _get_hook(None) is None


def test_a_hook_of_the_program_is_called_and_put_back() -> None:
    seen: list[bool] = []

    def hook(hit: bool) -> bool:
        seen.append(hit)
        return hit

    function = torch.compile(lambda x: x.tan() + 2, backend="eager")
    _get_hook(hook)
    try:
        with trace():
            function(torch.ones(2))
            function(torch.ones(2))
        assert _get_hook(None) is hook
    finally:
        _get_hook(None)
    assert seen[-1] is True


def test_a_model_that_was_not_called() -> None:
    model, other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    with trace(model) as report:
        other(torch.ones(1, 2))
    assert len(report.not_seen) == 1
    assert report.not_seen[0].startswith("The given model was not called in the block, so calls have no module")
    for called in (model, model[0]):
        with trace(model) as report:
            other(torch.ones(1, 2))
            called(torch.ones(1, 2))
        assert report.not_seen == []
    with trace() as report:
        other(torch.ones(1, 2))
    assert report.not_seen == []
