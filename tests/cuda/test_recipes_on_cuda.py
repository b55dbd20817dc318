"""docs/recipes.md on a CUDA device, changed as the page says."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from helpers.doc_blocks import Block, blocks

RECIPES = [block for block in blocks() if block.page == "docs/recipes.md"]
PROGRAMS = [
    pytest.param(program, printed.text, id=str(program))
    for program, printed in zip(RECIPES[::2], RECIPES[1::2], strict=True)
    if ".to_sparse()" not in program.text  # the stand-in has dense tensors only
]


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_a_recipe(
    program: Block,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # The libraries of its custom ops exist already where the page's blocks ran.
    code = compile(program.text.replace('"cpu"', '"cuda"').replace("recipes::", "on_cuda::"), "recipe", "exec")
    with torch.device("cuda"):
        exec(code, vars(types.ModuleType("recipe")))
    # CUDA's default dtype is another one.
    expected = printed if "bfloat16" in program.text else printed.replace("bfloat16", "float16")
    assert capsys.readouterr().out == expected
