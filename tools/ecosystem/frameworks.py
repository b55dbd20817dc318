"""The frameworks and programs of frameworks.toml, and the virtual environment of each framework.

pip resolves a framework together with the pin of PyTorch, so that the framework cannot install another version. This
checkout is not installed but put on the path: its extension is already built for this PyTorch. Its metadata is written
beside, because PyTorch finds the entry point of torch_promote by it. If a framework pins another build of PyTorch, the
extension is built for it, into build/lib-VERSION.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree

import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")


class EcosystemError(Exception):
    """A name is wrong, or an environment cannot be created."""


@dataclass(frozen=True)
class Program:
    """A program of a framework; frameworks.toml describes the fields."""

    framework: str
    name: str
    program: str
    launcher: str = "python"
    processes: int = 0
    results: str = "*.pt"
    override: str = "linear=fp32"
    autocast: bool = True
    off: bool = True
    checks: bool = False
    timeout: float = 900

    def command(self, *under: str) -> list[str]:
        """Returns its command line, with the arguments `under` between the launcher and the script."""
        script, *arguments = shlex.split(self.program)
        script = script if script == "-m" else str(PROGRAMS / script)
        torchrun = f"torchrun --standalone --nproc-per-node {self.processes}"
        launcher = shlex.split(torchrun if self.processes else self.launcher)
        return [*launcher, *under, script, *(part.replace("{programs}", str(PROGRAMS)) for part in arguments)]


@dataclass(frozen=True)
class Framework:
    """A framework, its requirements and its programs."""

    name: str
    requirements: tuple[str, ...]
    programs: tuple[Program, ...]

    @property
    def version(self) -> str:
        """The version that its first requirement pins."""
        return self.requirements[0].rpartition("=")[2]

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return ROOT / ".venv-ecosystem" / self.name

    @cache  # noqa: B019 (frameworks live as long as the program)
    def make_environment(self) -> None:
        """Creates its environment, if it is missing or the requirements have changed."""
        torch_pin = [one for one in self.requirements if one.startswith("torch=")]
        pin = torch_pin[0] if torch_pin else f"torch=={torch.__version__.partition('+')[0]}"
        wanted = "\n".join([pin, *self.requirements])
        note = self.folder / "requirements"
        python = str(self.folder / "bin" / "python")
        if not note.exists() or note.read_text(encoding="utf-8") != wanted:
            print(f"{self.name}: making {self.folder} ...", file=sys.stderr, flush=True)
            rmtree(self.folder, ignore_errors=True)
            venv.create(self.folder, with_pip=True)
            _pip(python, pin)  # first: with an open range, pip would bring another build
            _pip(python, pin, *self.requirements)
            note.write_text(wanted, encoding="utf-8")
        packages = next(self.folder.glob("lib/python*/site-packages"))
        for old in packages.glob("torch_promote-*.dist-info"):
            rmtree(old)
        _run(sys.executable, "setup.py", "--quiet", "dist_info", "--output-dir", str(packages))
        build = _run(python, "-c", "import torch; print(torch.__version__)").strip()
        path = ROOT
        if build != torch.__version__:
            path = ROOT / "build" / f"lib-{build}"
            print(f"{self.name}: building the extension for torch {build} ...", file=sys.stderr, flush=True)
            _pip(python, "setuptools>=77", "ninja")
            _run(python, "setup.py", "--quiet", "build", "--build-lib", str(path))
        (packages / "torch_promote.pth").write_text(f"{path}\n", encoding="utf-8")


def frameworks() -> list[Framework]:
    """Returns the frameworks of frameworks.toml."""
    found = []
    for name, table in tomllib.loads(Path(__file__).with_name("frameworks.toml").read_text(encoding="utf-8")).items():
        requirements = tuple(table.pop("requirements"))
        programs = tuple(Program(name, program, **entry) for program, entry in table.items())
        found.append(Framework(name, requirements, programs))
    return found


def _pip(python: str, *what: str) -> None:
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EcosystemError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
