"""Builds torch_promote._C against the PyTorch that is installed.

Everything else about the package is in pyproject.toml. Run it through pip with --no-build-isolation, so that the
extension is built against the PyTorch that it will run with.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
GENERATED = Path("build") / f"generated-{torch.__version__}"
POLICIES = ROOT / "torch_promote" / "policy" / "op_policies.def"
ROW = re.compile(r"^ROW\(\s*(\w+)\s*,", re.MULTILINE)

# NOTE [ Units ]
# Parsing PyTorch's headers takes most of the compile time of a small file. The files of a unit are therefore compiled
# together, which shares the parse; names in unnamed namespaces must be unique within a unit. Ninja starts the units in
# this order.
WRAPPERS = CSRC / "dispatch" / "typed_wrapper.cpp"
PYTHON = sorted((CSRC / "python").glob("*.cpp"))
UNITS = {
    "wrappers": [WRAPPERS],
    "python": PYTHON,
    "engine": sorted({*CSRC.rglob("*.cpp")} - {WRAPPERS, *PYTHON}),
}


def write_sources(folder: Path) -> None:
    """Writes a source file for each unit, and `aten_headers.h`: the headers of the table's ops that this PyTorch has.

    A macro cannot include files, and ATen/Operators.h takes minutes to compile. typed_wrapper.cpp skips an op that
    this PyTorch lacks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ops = sorted(set(ROW.findall(POLICIES.read_text())))
    aten = next(Path(p) / "ATen" / "ops" for p in include_paths() if (Path(p) / "ATen" / "ops").is_dir())
    headers = [f"<ATen/ops/{op}_ops.h>" for op in ops if (aten / f"{op}_ops.h").exists()]
    write_includes(folder / "aten_headers.h", headers)
    for name, files in UNITS.items():
        write_includes(folder / f"{name}.cpp", [f'"{file.relative_to(CSRC).as_posix()}"' for file in files])


def write_includes(target: Path, headers: list[str]) -> None:
    """Writes a file of includes. An equal file keeps its date, so that nothing is compiled again."""
    text = "// file: written by setup.py\n" + "".join(f"#include {header}\n" for header in headers)
    if not target.exists() or target.read_text() != text:
        target.write_text(text)


class Build(BuildExtension):
    """Builds the extension, and leaves beside it a note of what it was built against."""

    def run(self) -> None:
        """Builds; see the class."""
        write_sources(ROOT / GENERATED)
        # Objects of each PyTorch are kept apart, so that switching between versions does not compile everything anew.
        self.build_temp = str(ROOT / "build" / f"objects-{torch.__version__}")
        super().run()
        package = ROOT / "torch_promote" if self.inplace else Path(self.build_lib) / "torch_promote"
        package.mkdir(parents=True, exist_ok=True)
        (package / "_built_with.json").write_text(json.dumps({"torch": torch.__version__}) + "\n")


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
                # ATen's headers for all ops are most of what a unit would parse. The second macro makes them an error.
                "-DAT_PER_OPERATOR_HEADERS",
                "-DTORCH_ASSERT_ONLY_METHOD_OPERATORS",
                "-Wall",
                "-Wextra",
                "-Werror",
                # PyTorch's headers are not ours to mend.
                *(flag for path in include_paths() for flag in ("-isystem", path)),
            ],
        )
    ],
    cmdclass={"build_ext": Build},
)
