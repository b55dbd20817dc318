"""The state of `find_nonfinite` across steps and after errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from torch_promote.numerics import nonfinite_finder as finder
from torch_promote.numerics.find_nonfinite import find_nonfinite
from torch_promote.numerics.nonfinite_finder import NonfiniteOrigin
from torch_promote.observe.events import Call
from torch_promote.observe.places import RunningModules

HALF = torch.float16


def test_a_fault_after_a_step_that_the_scaler_skipped() -> None:
    """The infinite gradients of the skipped step excuse NaNs until the scaler updates its scale, and no longer."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    with find_nonfinite() as report:
        scaler.scale((weight * 2.0**30).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert [one.kind for one in report.benign] == ["GradScaler"]
        assert not report.found
        infinite = torch.full((2,), torch.inf)
        _ = infinite - infinite
    assert report.origin is not None
    assert report.origin.op == "aten::sub"


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("when", ["before it ends", "while it is judged"])
def test_the_first_of_two_threads_reports(when: str) -> None:
    """Backwards of several devices run in several threads."""
    origins: list[NonfiniteOrigin | None] = []
    zeros, log, sqrt = torch.zeros(2), torch.ops.aten.log.default, torch.ops.aten.rsqrt.default

    def other() -> None:
        nan = torch.full((2,), torch.nan)
        watching.end(watching.begin(sqrt, [zeros - 1]), [nan])

    def is_allowed(call: Call) -> bool:
        if when == "while it is judged" and call.op == "aten::log":
            in_a_thread(other)
        return False

    watching = finder.NonfiniteFinder(RunningModules(None), origins.append, is_allowed)
    token = watching.begin(log, [zeros])
    if when == "before it ends":
        in_a_thread(other)
    watching.end(token, [zeros.log()])
    assert watching.done
    assert [origin and origin.op for origin in origins] == ["aten::rsqrt"]
    assert watching.begin(log, [zeros]) is None


def test_a_call_of_a_transform_that_raises() -> None:
    with find_nonfinite() as report:
        with pytest.raises(RuntimeError, match="size"):
            torch.vmap(lambda x: torch.mm(x, x))(torch.ones(2, 3, 4))
        torch.vmap(torch.log)(torch.zeros(2, 3))
    assert report.origin is not None
    assert report.origin.op == "aten::log"


def test_a_call_that_cannot_be_watched_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls after the program has caught the error are not treated as parts of the failed call."""
    x = torch.ones(2, dtype=HALF)

    def no_memory(tensor: torch.Tensor) -> bool:
        raise torch.OutOfMemoryError("no memory")

    with find_nonfinite() as report:
        with monkeypatch.context() as patched:
            patched.setattr(finder, "can_be_read", no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                x.add_(1)
        _ = torch.log(torch.zeros(2))
    assert report.origin is not None
    assert report.origin.op == "aten::log"
    assert report.origin.line.startswith(__file__)
