"""The script `torch-promote` before its imports end: Ctrl-C, and errors of the import."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import _torch_promote_hooks
from helpers.command_line import Capture
from helpers.subprocesses import environment
from torch_promote.cli import program
from torch_promote.errors import ExtensionError

PYPROJECT = Path(_torch_promote_hooks.__file__).with_name("pyproject.toml")


class RaisingFinder:
    """Raises an error for the import of the command's modules."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name == program.__name__:
            raise self.error
        return None


def fail_import(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.delitem(sys.modules, program.__name__)
    monkeypatch.delattr("torch_promote.cli.program")
    monkeypatch.setattr(sys, "meta_path", [RaisingFinder(error), *sys.meta_path])


def test_it_is_the_entry_point() -> None:
    scripts = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]
    assert scripts == {"torch-promote": "_torch_promote_hooks:main"}


def test_the_status_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["torch-promote", "policies", "--op", "sofmax"])
    assert _torch_promote_hooks.main() == 2
    assert "sofmax" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fail_import(monkeypatch, ExtensionError("it was built with another PyTorch."))
    assert _torch_promote_hooks.main() == 2
    assert capsys.readouterr() == ("", "torch-promote: error: it was built with another PyTorch.\n")


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_import(monkeypatch, ValueError("a defect"))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="a defect"):
        _torch_promote_hooks.main()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_torch_is_imported() -> None:
    """A process of its own: Ctrl-C reaches it in the first second."""
    code = "import sys, _torch_promote_hooks as c; print('ready', flush=True); sys.exit(c.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "parity"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # `import torch` takes longer
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (130, "", "")
