"""Loading the extension, and the errors if it cannot be loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from helpers.subprocesses import environment, run_python
from torch_promote import _C
from torch_promote import loader as _extension
from torch_promote.errors import ExtensionError


def test_built_with_the_running_torch() -> None:
    assert torch.__version__.startswith(_C.TORCH_VERSION)
    assert json.loads(_extension._NOTE.read_text())["torch"] == torch.__version__


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_extension, "_NOTE", tmp_path / "absent.json")
    with pytest.raises(ExtensionError, match=r"has not been built; running torch .*pip install --no-build") as error:
        _extension.check_extension()
    assert isinstance(error.value, ImportError)


#: Code after which the package cannot be imported, and what its error says.
BROKEN = {
    "an extension that does not load": (
        "sys.modules['torch_promote._C'] = None",
        f"built with torch {torch.__version__}",
    ),
    "a kernel on our key": (
        "library = torch.library.Library('aten', 'IMPL'); library.impl('mm', lambda a, b: a, 'AutocastPrivateUse1')",
        "the dispatch key AutocastPrivateUse1 already has kernels",
    ),
    "a fallback on our key": (
        "library = torch.library.Library('_', 'IMPL')\n"
        "library.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')",
        "the dispatch key AutocastPrivateUse1 already has kernels",
    ),
    "deleted from the modules": (
        "import torch_promote\n"
        "for name in [name for name in sys.modules if name.startswith('torch_promote')]: del sys.modules[name]",
        "importlib.reload(torch_promote) works",
    ),
    "all but the extension deleted from the modules": (
        "import torch_promote; kept = sys.modules['torch_promote._C']\n"
        "for name in [name for name in sys.modules if name.startswith('torch_promote')]: del sys.modules[name]\n"
        "sys.modules['torch_promote._C'] = kept",
        "importlib.reload(torch_promote) works",
    ),
}


@pytest.mark.parametrize(("before", "text"), BROKEN.values(), ids=BROKEN)
def test_an_import_that_fails_says_why(before: str, text: str) -> None:
    done = run_python(f"import sys, torch\n{before}\nimport torch_promote", finalize=True)
    assert done.returncode == 1
    assert text in done.stderr
    assert ".ExtensionError: " in done.stderr


def run(code: str, **variables: str) -> str:
    before = "import importlib, sys, warnings, torch\nwarnings.simplefilter('error', RuntimeWarning)\n"
    done = run_python(before + code, env=environment(**variables), finalize=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


REGISTERED = """
def registered():
    return (
        len(sys.meta_path),
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
        len(torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS),
        torch.fx.Tracer.trace,
        __import__("asyncio").Handle._run,
    )
"""


def test_reloaded() -> None:
    """Nothing is registered twice, and a default that was set since is kept."""
    code = f"""
import torch_promote as tp
{REGISTERED}
assert str(tp.default_policy()) == "Policy.named('cuda')"
tp.set_default_policy(None)
before = registered()
assert importlib.reload(tp) is tp
assert registered() == before
assert tp.default_policy() is None
with tp.my_autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
"""
    run(code, TORCH_PROMOTE_POLICY="cuda")


def test_imported_after_an_import_that_failed() -> None:
    code = f"""
import os
for _ in range(2):
    try:
        import torch_promote
    except ValueError as error:
        assert "TORCH_PROMOTE_POLICY" in str(error)
    else:
        raise AssertionError("it was imported")
{REGISTERED}
before = registered()
del os.environ["TORCH_PROMOTE_POLICY"]
import torch_promote as tp
assert registered() == before
with tp.my_autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
"""
    run(code, TORCH_PROMOTE_POLICY="no policy")


# The linker compares names and parameters, but not return types, so each declaration is compared with PyTorch's header.


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


def test_each_declaration_is_pytorchs() -> None:
    roots = [Path(path) for path in include_paths()]
    files = [next(root / header for root in roots if (root / header).exists()) for header in HEADERS]
    ours, pytorchs = (
        set().union(*(declarations(path.read_text(encoding="utf-8")) for path in paths))
        for paths in (CSRC.rglob("*.*"), files)
    )
    assert len(ours) >= 10
    assert ours <= pytorchs
