"""Builds torch_promote._C against the installed PyTorch.

Everything else about the package is in pyproject.toml, and how the extension is compiled in torch_promote/building.py.
Run it through pip with --no-build-isolation, so that the extension is built against the PyTorch that it will run with.

TORCH_PROMOTE_EXTENSION=DIR takes the extension from a folder in which it was built before, instead of compiling it:
tests/test_sdist.py installs the source distribution with it. A folder with `_extensions/` has one for each PyTorch:
tools/wheel makes a wheel of it. TORCH_PROMOTE_CXXFLAGS and TORCH_PROMOTE_LDFLAGS are added to the options of the
compiler and the linker, last, so that they override the others: `make coverage` and `make sanitize` set them.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import setuptools
import torch
from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.config import pyprojecttoml
from torch.utils.cpp_extension import BuildExtension

ROOT = Path(__file__).resolve().parent
GENERATED = Path("build") / f"generated-{torch.__version__}"


#: Without the package, which needs the extension.
building = SimpleNamespace(**runpy.run_path(str(ROOT / "torch_promote" / "building.py")))


class BuildPython(build_py):  # type: ignore[misc]
    """Also puts the C++ sources into the package, for `torch-promote build`."""

    def run(self) -> None:
        """Runs the build; see the class."""
        super().run()
        if not getattr(self, "editable_mode", False):
            sources = Path(self.build_lib) / "torch_promote" / "_sources"
            shutil.copytree(ROOT / "csrc", sources, dirs_exist_ok=True)


class Build(BuildExtension):
    """Builds the extension, and records the PyTorch version in `_built_with.json` next to it."""

    def run(self) -> None:
        """Runs the build; see the class."""
        package = ROOT / "torch_promote" if self.inplace else Path(self.build_lib) / "torch_promote"
        if built := os.environ.get("TORCH_PROMOTE_EXTENSION"):
            copy_extension(Path(built), package)
            return
        # PyTorch compiles with c++, and setuptools links with what Python was built with: clang may be all there is.
        if not os.environ.get("CXX"):  # one that does not exist is an error
            os.environ["CXX"] = building.find_compiler() or "c++"
        building.write_sources(ROOT / GENERATED)
        # A folder for each version of PyTorch and Python, so that switching does not recompile everything.
        self.build_temp = str(ROOT / "build" / f"objects-{torch.__version__}-{sys.implementation.cache_tag}")
        super().run()
        package.mkdir(parents=True, exist_ok=True)
        (package / "_built_with.json").write_text(json.dumps({"torch": torch.__version__}) + "\n")


def copy_extension(built: Path, package: Path) -> None:
    """Copies an extension that was built for the running PyTorch, with its note; or those of a wheel."""
    package.mkdir(parents=True, exist_ok=True)
    if (built / "_extensions").is_dir():
        shutil.copytree(built / "_extensions", package / "_extensions", dirs_exist_ok=True)
        return
    name = f"_C{building.SUFFIX}"
    note = built / "_built_with.json"
    built_with = json.loads(note.read_text())["torch"] if note.exists() else "nothing"
    if not building.fits(built_with, torch.__version__) or not (built / name).exists():
        raise SystemExit(
            f"TORCH_PROMOTE_EXTENSION={built} has no {name} for torch {torch.__version__}, but one for {built_with}. "
            "Build it there first, or unset the variable to compile it here."
        )
    for file in (built / name, note):
        shutil.copyfile(file, package / file.name)


def readme() -> str:
    """Returns README.md with absolute links, for PyPI, which has none of the files that the links name."""
    url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!https?:|#)", f"]({url}/blob/HEAD/", text)
    return re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{url}/raw/HEAD/', text)


def read_licence_as_table() -> None:
    """Lets setuptools before 77 read pyproject.toml, in which the licence is the str that newer releases ask for.

    pip checks `requires` only in isolated builds, and the environment of a GPU machine may have an older setuptools.
    """
    load_file = pyprojecttoml.load_file

    def load(path: Any) -> dict[str, Any]:
        content: dict[str, Any] = load_file(path)
        project = content.get("project", {})
        if isinstance(project.get("license"), str):
            project["license"] = {"text": project["license"]}
            del project["license-files"]
        return content

    pyprojecttoml.load_file = load


if int(setuptools.__version__.partition(".")[0]) < 77:
    read_licence_as_table()

setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[building.extension(GENERATED, "-Wall", "-Wextra", "-Werror")],
    cmdclass={"build_ext": Build, "build_py": BuildPython},
)
