"""Processes in which PyTorch finds this package's entry point, whatever is installed."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.command_line import Capture
from helpers.subprocesses import environment
from torch_promote.cli.program import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with the metadata of an installed package, as pyproject.toml declares it."""
    return write_metadata(tmp_path_factory.mktemp("installed"), entry_points())


def entry_points() -> dict[str, str]:
    """The entry points that PyTorch loads."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]


def write_metadata(folder: Path, points: Mapping[str, str]) -> Path:
    metadata = folder / "torch_promote-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-promote\nVersion: 0.1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    return folder


def variables(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process that finds the entry point in a folder, with only the given settings."""
    inherited = {name: value for name, value in environment().items() if not name.startswith("TORCH_PROMOTE_")}
    return {**inherited, "PYTHONPATH": f"{folder}:{inherited['PYTHONPATH']}", **more}


#: The command, in a separate process.
COMMAND = [sys.executable, "-m", "torch_promote", "run"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry_point: Path) -> Path:
    """The working directory, in which programs find this package and its entry point."""
    monkeypatch.syspath_prepend(entry_point)
    for name in [name for name in os.environ if name.startswith("TORCH_PROMOTE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)  # reports go into a pipe, where nothing is wrapped
    monkeypatch.setenv("PYTHONPATH", variables(entry_point)["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(capfd: Capture, *arguments: str) -> tuple[int, str, str]:
    """The status and the output of `torch-promote run`, in the test's process: the program has one of its own."""
    status = main(["run", *arguments])
    return (status, *capfd.readouterr())
