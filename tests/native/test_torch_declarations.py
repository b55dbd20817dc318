"""PyTorch functions that the extension declares itself, to avoid headers that include all of ATen.

The linker compares names and parameters, but not return types, so each declaration is compared with PyTorch's header.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch.utils.cpp_extension import include_paths

CSRC = Path(__file__).parents[2] / "csrc"
#: The headers of PyTorch that declare them.
HEADERS = ("ATen/autocast_mode.h", "ATen/CachedTensorUtils.h", "torch/csrc/jit/python/pybind_utils.h")
DECLARATION = re.compile(r"\bTORCH_(?:PYTHON_)?API\s+([\w:]+)\s+(\w+)\(([^()]*)\);")


def declarations(text: str) -> set[str]:
    """Returns the functions that a text declares, without namespaces, names of parameters and defaults."""
    return {f"{plain(result)} {name}({types(parameters)})" for result, name, parameters in DECLARATION.findall(text)}


def types(parameters: str) -> str:
    without_defaults = re.sub(r"=[^,]*", "", parameters)
    return ", ".join(plain(re.sub(r"(?<=[\w&>]) +\w+ *$", "", one.strip())) for one in without_defaults.split(","))


def plain(type_name: str) -> str:
    return re.sub(r"\b(?:at|c10|std|torch::jit)::", "", " ".join(type_name.split()))


def declared_here() -> set[str]:
    return set().union(*(declarations(path.read_text(encoding="utf-8")) for path in CSRC.rglob("*.*")))


def declared_by_pytorch() -> set[str]:
    roots = [Path(path) for path in include_paths()]
    files = [next(root / header for root in roots if (root / header).exists()) for header in HEADERS]
    return set().union(*(declarations(file.read_text(encoding="utf-8")) for file in files))


def test_each_declaration_is_pytorchs() -> None:
    assert len(declared_here()) >= 10
    assert declared_here() - declared_by_pytorch() == set()
