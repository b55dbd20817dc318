"""Runs commands in the test's process, and the program of `run`, `trace` or `find-nan` in a fork of one with torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

import pytest

from helpers.command_line import Capture
from helpers.subprocesses import Program
from torch_promote.cli import user_program
from torch_promote.cli.program import main

#: In the fork, torch is imported already, so its entry point does not load this package.
_AS_SCRIPT = """
import sys
import _torch_promote_hooks, runpy
_torch_promote_hooks.autoload()
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

#: A training loop: its arguments are the number of steps, and code that runs before each. The optimizer has the hooks
#: of PyTorch's, which import Dynamo when they are made.
TRAINING = """
import sys, torch
class SGD(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()
    def step(self):
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.sub_(weight.grad)
                weight.grad = None
steps, code = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1), torch.nn.Linear(4, 1))
optimizer = SGD(model.parameters())
for step in range(steps):
    exec(code)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(2, 4)).float().mean()
    loss.backward()
    optimizer.step()
    torch.full((), step).sign()  # between the steps: it belongs to the next one
print("ended")
"""


def line_of(text: str) -> int:
    """The number of the line of the training loop that has a text."""
    return next(number for number, line in enumerate(TRAINING.splitlines(), 1) if text in line)


class _Started:
    """A command's handle for a program that it has started."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], close_fds: bool, *, compiler: bool = False
    ) -> None:
        self._program = Program(_AS_SCRIPT, *command[1:], env=env, stdout=1, stderr=2, compiler=compiler)
        self.pid = self._program.pid
        self.returncode: int | None = None

    def wait(self) -> int:
        self.returncode = self._program.wait().returncode
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start in forks. Their process id is that of the fork."""
    monkeypatch.setattr(user_program, "Popen", _Started)


@pytest.fixture
def warm_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and Dynamo has been imported, as by PyTorch's optimizers."""
    monkeypatch.setattr(user_program, "Popen", functools.partial(_Started, compiler=True))


def command_run(capfd: Capture, *arguments: str) -> tuple[int, str, str]:
    """The status and the output of a command and its program."""
    status = main(arguments)
    return (status, *capfd.readouterr())
