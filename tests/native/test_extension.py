"""Loading the extension, and the errors if it cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.subprocesses import run_python
from torch_promote import _C
from torch_promote import loader as _extension
from torch_promote.errors import ExtensionError


def test_built_with_the_running_torch() -> None:
    assert torch.__version__.startswith(_C.TORCH_VERSION)
    assert json.loads(_extension._NOTE.read_text())["torch"] == torch.__version__


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_extension, "_NOTE", tmp_path / "absent.json")
    with pytest.raises(ExtensionError, match="has not been built; running torch") as error:
        _extension.check_extension()
    assert torch.__version__ in str(error.value)
    assert "pip install --no-build-isolation" in str(error.value)
    assert isinstance(error.value, ImportError)


def test_a_broken_extension_names_both_versions() -> None:
    result = run_python(
        "import sys\n"
        "sys.modules['torch_promote._C'] = None\n"  # makes the import of it fail
        "try:\n"
        "    import torch_promote\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert result.stdout.startswith("ExtensionError"), result.stdout + result.stderr
    assert result.stdout.count(torch.__version__) == 2


@pytest.mark.parametrize(
    ("namespace", "registration"),
    [
        ("aten", "impl('mm', lambda a, b: a, 'AutocastPrivateUse1')"),
        ("_", "fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')"),
    ],
)
def test_the_key_belongs_to_another_backend(namespace: str, registration: str) -> None:
    result = run_python(
        "import torch\n"
        f"library = torch.library.Library({namespace!r}, 'IMPL')\n"
        f"library.{registration}\n"
        "try:\n"
        "    import torch_promote\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert result.stdout.startswith("ExtensionError the dispatch key AutocastPrivateUse1 already has kernels"), (
        result.stdout + result.stderr
    )


def test_importing_changes_nothing() -> None:
    """No key is on, no op casts, and torch.compile is not imported."""
    result = run_python(
        "import sys, torch\n"
        "def state():\n"
        "    local = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()\n"
        "    return [str(keys) for keys in local], torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype\n"
        "before = state()\n"
        "import torch_promote\n"
        "assert state() == before, (state(), before)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "print('same')\n"
    )
    assert result.stdout == "same\n", result.stderr


def test_functions_in_c_check_their_arguments() -> None:
    with pytest.raises(TypeError, match=r"enter_region\(owner, packed\) takes two arguments"):
        _C.enter_region(object())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"pack_plain_region\(.*\) takes five arguments"):
        _C.pack_plain_region("cpu")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="function"):
        _C.CallOnStore()  # type: ignore[call-arg]
    stored: list[object] = []
    store = _C.CallOnStore(stored.append)
    with pytest.raises(AttributeError, match=r"CallOnStore\.stored cannot be deleted, only assigned"):
        del store.stored
    store.stored = 3
    assert stored == [3]
