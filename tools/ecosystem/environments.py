"""The virtual environment of a framework: the suite's PyTorch, the framework as pinned, and this checkout.

pip resolves the framework together with the pin of PyTorch, so that the framework cannot install another version. A
framework that has to be installed without its dependencies is listed in `requirements-without-dependencies.txt`.

This checkout is not installed but put on the path: its extension is already built for this PyTorch. Its metadata is
written beside, because PyTorch finds the entry point of torch_promote by it.

A framework whose requirements name a build of PyTorch gets that one: torchvision's wheels load only with the build they
were compiled for. If it differs from the suite's, the extension is built for it, into build/lib-VERSION.
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
    """Raised if an environment cannot be created."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        folder: Its folder.
        version: The version of the framework in it.
    """

    folder: Path
    version: str

    @property
    def commands(self) -> Path:
        """The folder of its commands."""
        return self.folder / "bin"


def environment_of(framework: Path, root: Path) -> Environment:
    """Returns the environment of a framework. Creates it if it is missing or its requirements have changed.

    Args:
        framework: The folder of the framework.
        root: The folder of this checkout.

    Raises:
        BrokenEnvironmentError: pip failed.
    """
    folder = root / ".venv-ecosystem" / framework.name
    pin = _torch_of(framework)
    wanted = "\n".join([pin, *(f"{name}\n{_text(framework / name)}" for name in (_WITH, _WITHOUT))])
    note = folder / "requirements"
    if not note.exists() or note.read_text(encoding="utf-8") != wanted:
        print(f"{framework.name}: making {folder} ...", file=sys.stderr, flush=True)
        rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        _install(folder, pin)  # first: with an open range, pip would bring another build
        _install(folder, pin, "--requirement", str(framework / _WITH))
        if (framework / _WITHOUT).exists():
            _install(folder, "--no-deps", "--requirement", str(framework / _WITHOUT))
        note.write_text(wanted, encoding="utf-8")
    packages = next(folder.glob("lib/python*/site-packages"))
    versions = {_normal(found.name): found.version for found in distributions(path=[str(packages)])}
    named = _first_name(framework)
    if versions["torch"].partition("+")[0] != pin.rpartition("=")[2]:
        raise BrokenEnvironmentError(f"{folder} has torch {versions['torch']}, but should have {pin}")
    _add_checkout(folder, packages, root)
    return Environment(folder, versions[named])


def _torch_of(framework: Path) -> str:
    """The build of PyTorch that a framework needs: the one that its requirements name, or else the suite's."""
    found = re.search(r"^torch===?\S+", _text(framework / _WITH), re.MULTILINE)
    return _TORCH if found is None else found[0]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _install(folder: Path, *what: str) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    if (done := subprocess.run(pip, capture_output=True, text=True)).returncode != 0:
        raise BrokenEnvironmentError(f"{' '.join(pip)} failed:\n{done.stdout}{done.stderr}")


def _add_checkout(folder: Path, packages: Path, root: Path) -> None:
    for old in packages.glob("torch_promote-*.dist-info"):
        rmtree(old)
    _setup(Path(sys.executable), root, "dist_info", "--output-dir", str(packages))
    python = folder / "bin" / "python"
    version = subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], text=True).strip()
    if version != torch.__version__:
        lib = root / "build" / f"lib-{version}"
        print(f"{folder.name}: building the extension for torch {version} ...", file=sys.stderr, flush=True)
        _install(folder, "setuptools>=77", "ninja")
        _setup(python, root, "build", "--build-lib", str(lib))
        root = lib
    (packages / "torch_promote.pth").write_text(f"{root}\n", encoding="utf-8")


def _setup(python: Path, root: Path, *what: str) -> None:
    command = [str(python), "setup.py", "--quiet", *what]
    if (done := subprocess.run(command, cwd=root, capture_output=True, text=True)).returncode != 0:
        raise BrokenEnvironmentError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _first_name(framework: Path) -> str:
    """The package that the framework is named by: the first of its requirements."""
    text = _text(framework / _WITHOUT) + _text(framework / _WITH)
    found = re.search(r"^([\w.-]+)", text, re.MULTILINE)
    if found is None:
        raise BrokenEnvironmentError(f"{framework / _WITH} names no package")
    return _normal(found[1])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
