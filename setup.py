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
GENERATED = ROOT / "build" / f"generated-{torch.__version__}"
POLICIES = ROOT / "torch_promote" / "policy" / "op_policies.def"
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
# Ninja starts jobs in this order. The file that instantiates every wrapper takes longer than all others together.
SOURCES.sort(key=lambda path: not path.endswith("registration.cpp"))
ROW = re.compile(r"^ROW\(\s*(\w+)\s*,", re.MULTILINE)


def write_aten_headers(folder: Path) -> None:
    """Writes `aten_headers.h`: the headers of the ops in the table, as far as this PyTorch has them.

    A macro cannot include files, and ATen/Operators.h takes minutes; an op that this PyTorch lacks is left out here and
    noticed by registration.cpp.
    """
    ops = sorted(set(ROW.findall(POLICIES.read_text())))
    aten = next(Path(p) / "ATen" / "ops" for p in include_paths() if (Path(p) / "ATen" / "ops").is_dir())
    lines = [f"#include <ATen/ops/{op}_ops.h>" for op in ops if (aten / f"{op}_ops.h").exists()]
    text = "// file: written by setup.py\n" + "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "aten_headers.h"
    if not target.exists() or target.read_text() != text:  # an equal file keeps its date, and so the objects
        target.write_text(text)


class Build(BuildExtension):
    """Builds the extension, and leaves beside it a note of what it was built against."""

    def run(self) -> None:
        """Builds; see the class."""
        write_aten_headers(GENERATED)
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
            sources=SOURCES,
            depends=[str(path.relative_to(ROOT)) for path in (*(ROOT / "csrc").rglob("*.h"), POLICIES)],
            include_dirs=[str(GENERATED), str(ROOT / "csrc"), str(POLICIES.parent)],
            extra_compile_args=[
                "-std=c++20",
                "-O2",
                "-g0",
                "-fvisibility=hidden",
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
