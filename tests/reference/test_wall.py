"""The reference is independent: checks its imports and calls in its source, so that it cannot use PyTorch's answers."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest
import torch

import torch_promote
from helpers.subprocesses import output_of, plain_environment

ROOT = Path(torch_promote.__file__).parent
FILES = sorted((ROOT / "reference").rglob("*.py"))

#: What the reference may import besides the standard library: torch for its dtypes, schemas and tensors, the package's
#: errors, the op table, the names of the cast policies and of dtypes as data, and itself.
MAY_IMPORT = (
    "torch_promote.errors",
    "torch_promote.policy.dtype_names",
    "torch_promote.policy.op_table",
    "torch_promote.reference",
)
#: Functions and methods that would return PyTorch's answers. The reference defines some of them itself.
GIVES_AWAY = {
    *("promote_types", "result_type", "can_cast", "elementwise_dtypes", "type_as", "get_overload"),
    *("_prims", "_refs", "FakeTensor", "FakeTensorMode"),
    *("broadcast_shapes", "broadcast_tensors", "is_contiguous", "contiguous", "is_non_overlapping_and_dense"),
    *("compute_elementwise_output_strides", "empty_like", "empty_strided", "as_strided", "to"),
}
#: The allowed names of torch: dtypes and tensors as types, flags of the thread, and the dispatcher's registrations.
MAY_NAME = {
    *("Tensor", "Size", "dtype", "strided", "finfo", "iinfo", "SymBool", "SymInt", "SymFloat", "get_default_dtype"),
    *("memory_format", "contiguous_format", "channels_last", "channels_last_3d", "preserve_format"),
    *("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cache_enabled", "is_inference_mode_enabled"),
    "is_grad_enabled",
    *("_ops", "_ops.OpOverload", "_C", "_C._dispatch_has_kernel_for_dispatch_key", "ops"),
    "_C._jit_get_schemas_for_operator",
}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named_of_torch(tree: ast.AST) -> Iterator[str]:
    """What follows `torch.` in the source: `_C._get_schema` of `torch._C._get_schema`."""
    for node in ast.walk(tree):
        names: list[str] = []
        part = node
        while isinstance(part, ast.Attribute):
            names.insert(0, part.attr)
            part = part.value
        if names and isinstance(part, ast.Name) and part.id == "torch":
            yield ".".join(names)


def called(tree: ast.AST) -> Iterator[str]:
    """The names of the functions and methods that are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.func.id


def breaches(source: str, own: Set[str] = frozenset()) -> list[str]:
    """The forbidden imports and calls of a source file. `own` are functions that the reference defines itself."""
    tree = ast.parse(source)
    found = []
    for name in imports(tree):
        top = name.partition(".")[0]
        if name != "torch" and not name.startswith(MAY_IMPORT) and top not in sys.stdlib_module_names:
            found.append(f"imports {name}")
    for name in named_of_torch(tree):
        if name not in MAY_NAME and not is_dtype(name):
            found.append(f"names torch.{name}")
    for name in called(tree):
        if name in GIVES_AWAY - own or name in ("eval", "exec", "__import__", "import_module"):
            found.append(f"calls {name}")
    return found


def is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


@functools.cache
def defined() -> set[str]:
    """The functions that the reference defines itself."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in FILES)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_reference_borrows_nothing(file: Path) -> None:
    assert breaches(file.read_text(encoding="utf-8"), defined()) == []


def test_the_fast_path_imports_no_reference() -> None:
    program = """
import sys, torch, torch_promote as tp
linear = torch.nn.Linear(2, 2)
with tp.my_autocast("cpu", overrides={"mm.default": "fp32"}):
    linear(torch.ones(1, 2)).sum().backward()
print([name for name in sys.modules if name.startswith(("torch_promote.reference", "torch_promote.checking"))])
print(tp.reference.promote_types(torch.int8, torch.int16))
"""
    assert output_of(program, env=plain_environment()) == "[]\ntorch.int16\n"


@pytest.mark.parametrize(
    ("source", "breach"),
    [
        ("import torch\ntorch.promote_types(a, b)", "names torch.promote_types"),
        ("import torch\ntorch.add(a, b)", "names torch.add"),
        ("from torch import add", "imports torch.add"),
        ("from torch._subclasses import FakeTensorMode", "imports torch._subclasses.FakeTensorMode"),
        ("from torch_promote import _C", "imports torch_promote._C"),
        ("tensor.is_contiguous()", "calls is_contiguous"),
        ("a.to(b)", "calls to"),
        ("__import__('torch').add(a, b)", "calls __import__"),
    ],
)
def test_a_breach_is_seen(source: str, breach: str) -> None:
    assert breach in breaches(source)
