"""Functions that run after the import of a module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from helpers.subprocesses import run_python
from torch_promote.integrations.after_import import run_after_import

NAME = "torch_promote_test_after_import"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tmp_path.joinpath(f"{NAME}.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return NAME


def test_every_function_runs_once_and_in_order(module: str) -> None:
    finders, ran = list(sys.meta_path), []
    for number in range(3):
        run_after_import(module, lambda number=number: ran.append((number, sys.modules[module].value)))  # type: ignore[misc]
    assert ran == []
    importlib.import_module(module)
    assert ran == [(0, 1), (1, 1), (2, 1)]
    assert sys.meta_path == finders
    run_after_import(module, lambda: ran.append("now"))
    assert ran[3:] == ["now"]
    importlib.reload(sys.modules[module])
    assert len(ran) == 4


def test_regions_are_known_to_dynamo_after_the_first_use_of_a_cache_mode() -> None:
    """Both the regions and the cache mode wait for its import."""
    code = """
        import torch, torch_promote as tp
        with tp.my_autocast("cpu", cache="persistent"):
            pass
        assert "torch._dynamo" not in __import__("sys").modules
        def function(x):
            with tp.my_autocast("cpu", overrides={"matmul": "float64"}):
                return x @ x
        print(torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype)
    """
    done = run_python(code, timeout=240)
    assert done.stdout == "torch.float64\n", done.stderr
