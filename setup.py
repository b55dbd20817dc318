"""Builds torch_promote._C against the installed PyTorch.

Everything else about the package is in pyproject.toml. Run it through pip with --no-build-isolation, so that the
extension is built against the PyTorch that it will run with.

TORCH_PROMOTE_EXTENSION=DIR takes the extension from a folder in which it was built before, instead of compiling it:
tests/test_sdist.py installs the source distribution with it. TORCH_PROMOTE_CXXFLAGS and TORCH_PROMOTE_LDFLAGS are added
to the options of the compiler and the linker, last, so that they override those here: `make coverage` and
`make sanitize` set them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import setuptools
import torch
from setuptools import setup
from setuptools.config import pyprojecttoml
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
GENERATED = Path("build") / f"generated-{torch.__version__}"
POLICIES = ROOT / "torch_promote" / "policy" / "op_policies.def"
ROW = re.compile(r"^ROW\(\s*(\w+)\s*,", re.MULTILINE)

# NOTE [ Units ]
# Parsing PyTorch's headers takes most of the compile time of a small file. So the files of a unit are compiled together
# and share the parse. Names in unnamed namespaces must therefore be unique within a unit. Ninja starts the units in
# this order.
WRAPPERS = CSRC / "dispatch" / "typed_wrapper.cpp"
PYTHON = sorted((CSRC / "python").glob("*.cpp"))
UNITS = {
    "wrappers": [WRAPPERS],
    "python": PYTHON,
    "engine": sorted({*CSRC.rglob("*.cpp")} - {WRAPPERS, *PYTHON}),
}


def write_sources(folder: Path) -> None:
    """Writes a source file for each unit, and `aten_headers.h` with the headers of the table's ops.

    A macro cannot include files, and ATen/Operators.h takes minutes to compile. Ops that this PyTorch lacks are
    omitted, and typed_wrapper.cpp skips them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ops = sorted(set(ROW.findall(POLICIES.read_text())))
    aten = next(Path(p) / "ATen" / "ops" for p in include_paths() if (Path(p) / "ATen" / "ops").is_dir())
    headers = [f"<ATen/ops/{op}_ops.h>" for op in ops if (aten / f"{op}_ops.h").exists()]
    write_includes(folder / "aten_headers.h", headers)
    for name, files in UNITS.items():
        write_includes(folder / f"{name}.cpp", [f'"{file.relative_to(CSRC).as_posix()}"' for file in files])


def write_includes(target: Path, headers: list[str]) -> None:
    """Writes a file of includes. An unchanged file keeps its timestamp, so that it is not recompiled."""
    text = "// file: written by setup.py\n" + "".join(f"#include {header}\n" for header in headers)
    if not target.exists() or target.read_text() != text:
        target.write_text(text)


class Build(BuildExtension):
    """Builds the extension, and records the PyTorch version in `_built_with.json` next to it."""

    def run(self) -> None:
        """Runs the build; see the class."""
        write_sources(ROOT / GENERATED)
        # A separate folder per PyTorch version, so that switching between versions does not recompile everything.
        self.build_temp = str(ROOT / "build" / f"objects-{torch.__version__}")
        package = ROOT / "torch_promote" if self.inplace else Path(self.build_lib) / "torch_promote"
        if built := os.environ.get("TORCH_PROMOTE_EXTENSION"):
            copy_extension(Path(built), package)
            return
        super().run()
        package.mkdir(parents=True, exist_ok=True)
        (package / "_built_with.json").write_text(json.dumps({"torch": torch.__version__}) + "\n")


def copy_extension(built: Path, package: Path) -> None:
    """Copies an extension that was built for the running PyTorch, with its note."""
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    note = built / "_built_with.json"
    built_with = json.loads(note.read_text())["torch"] if note.exists() else "nothing"
    if built_with != torch.__version__ or not (built / name).exists():
        raise SystemExit(
            f"TORCH_PROMOTE_EXTENSION={built} has no {name} for torch {torch.__version__}, but one for {built_with}. "
            "Build it there first, or unset the variable to compile it here."
        )
    package.mkdir(parents=True, exist_ok=True)
    for file in (built / name, note):
        shutil.copyfile(file, package / file.name)


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
    ext_modules=[
        CppExtension(
            "torch_promote._C",
            sources=[str(GENERATED / f"{name}.cpp") for name in UNITS],
            depends=[str(path.relative_to(ROOT)) for path in (*CSRC.rglob("*.*"), POLICIES)],
            include_dirs=[str(ROOT / GENERATED), str(CSRC), str(POLICIES.parent)],
            extra_compile_args=[
                "-std=c++20",
                "-O2",
                "-g0",
                "-fvisibility=hidden",
                # ATen's headers of all ops dominate the compile time. The second macro makes including them an error.
                "-DAT_PER_OPERATOR_HEADERS",
                "-DTORCH_ASSERT_ONLY_METHOD_OPERATORS",
                "-Wall",
                "-Wextra",
                "-Werror",
                # No warnings from PyTorch's own headers.
                *(flag for path in include_paths() for flag in ("-isystem", path)),
                *shlex.split(os.environ.get("TORCH_PROMOTE_CXXFLAGS", "")),
            ],
            extra_link_args=shlex.split(os.environ.get("TORCH_PROMOTE_LDFLAGS", "")),
        )
    ],
    cmdclass={"build_ext": Build},
)
