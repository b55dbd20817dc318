"""The virtual environment of a framework: the suite's PyTorch, the framework as pinned, and this checkout.

pip resolves the framework together with the pin of PyTorch, so that the framework cannot bring another one. A framework
that has to be installed without its dependencies stands in `requirements-without-dependencies.txt`.

This checkout is not installed but put on the path: its extension is already built for this PyTorch. Its metadata is
written beside, because PyTorch finds the entry point of torch_promote by it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from shutil import rmtree

import torch

__all__ = ["BrokenEnvironmentError", "Environment", "environment_of"]

_TORCH = f"torch=={torch.__version__.partition('+')[0]}"
_WITH = "requirements.txt"
_WITHOUT = "requirements-without-dependencies.txt"


class BrokenEnvironmentError(Exception):
    """An environment could not be made."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        folder: Where it is.
        version: The version of the framework in it.
    """

    folder: Path
    version: str

    @property
    def commands(self) -> Path:
        """The folder of its commands."""
        return self.folder / "bin"


def environment_of(framework: Path, root: Path) -> Environment:
    """Returns the environment of a framework. Makes it if it is missing or its requirements have changed.

    Args:
        framework: The folder of the framework.
        root: The folder of this checkout.

    Raises:
        BrokenEnvironmentError: pip failed.
    """
    folder = root / ".venv-ecosystem" / framework.name
    wanted = "\n".join([_TORCH, *(f"{name}\n{_text(framework / name)}" for name in (_WITH, _WITHOUT))])
    note = folder / "requirements"
    if not note.exists() or note.read_text(encoding="utf-8") != wanted:
        print(f"{framework.name}: making {folder} ...", file=sys.stderr, flush=True)
        rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        _install(folder, _TORCH)  # first: with an open range, pip would bring another build
        _install(folder, _TORCH, "--requirement", str(framework / _WITH))
        if (framework / _WITHOUT).exists():
            _install(folder, "--no-deps", "--requirement", str(framework / _WITHOUT))
        note.write_text(wanted, encoding="utf-8")
    packages = next(folder.glob("lib/python*/site-packages"))
    _add_checkout(packages, root)
    versions = {_normal(found.name): found.version for found in distributions(path=[str(packages)])}
    named = _first_name(framework)
    if (torch_there := f"torch=={versions['torch'].partition('+')[0]}") != _TORCH:
        raise BrokenEnvironmentError(f"{folder} has {torch_there}, but this checkout is built for {_TORCH}")
    return Environment(folder, versions[named])


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _install(folder: Path, *what: str) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    if (done := subprocess.run(pip, capture_output=True, text=True)).returncode != 0:
        raise BrokenEnvironmentError(f"{' '.join(pip)} failed:\n{done.stdout}{done.stderr}")


def _add_checkout(packages: Path, root: Path) -> None:
    for old in packages.glob("torch_promote-*.dist-info"):
        rmtree(old)
    command = [sys.executable, "setup.py", "--quiet", "dist_info", "--output-dir", str(packages)]
    if (done := subprocess.run(command, cwd=root, capture_output=True, text=True)).returncode != 0:
        raise BrokenEnvironmentError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    (packages / "torch_promote.pth").write_text(f"{root}\n", encoding="utf-8")


def _first_name(framework: Path) -> str:
    """The package that the framework is named by: the first of its requirements."""
    text = _text(framework / _WITHOUT) + _text(framework / _WITH)
    found = re.search(r"^([\w.-]+)", text, re.MULTILINE)
    if found is None:
        raise BrokenEnvironmentError(f"{framework / _WITH} names no package")
    return _normal(found[1])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
