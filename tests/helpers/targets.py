"""A file with functions that return a model and a step, for the commands that take one."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["GOOD", "MAKE", "target_file"]

#: In float16, the product overflows where the mean is taken in float32: it needs float32, and the layers do not.
MAKE = '''
import sys
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.log1p((self.first(x) * SCALE * SCALE).abs()))

SCALE = 1000.0

def make():
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, 4)

    def step():
        print("a step")
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().square().mean()

    return model, step

def checked():
    model, step = make()
    return {"model": model, "step": step, "check": lambda results: False}

calls = []

def counting(act):
    """A step that counts its calls, and does more at each."""
    model, step = make()
    def other():
        calls.append(1)
        return act(step(), len(calls))
    return model, other

def odd():
    return counting(lambda loss, number: loss * number)

def interrupted():
    def act(loss, number):
        if number == 7:
            raise KeyboardInterrupt
        return loss
    return counting(act)
'''


#: In float16, nothing overflows.
GOOD = MAKE.replace("SCALE = 1000.0", "SCALE = 1.0")


@pytest.fixture
def target_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory has train.py with `make`."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(MAKE)
    return file
