"""The state of `find_nonfinite` across steps and after errors."""

from __future__ import annotations

import pytest
import torch

from torch_promote.numerics.nonfinite import finder
from torch_promote.numerics.nonfinite.find_nonfinite import find_nonfinite

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
