"""Processes that share Inductor's cache directory do not get code that was compiled for another policy."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torch_promote as tp
from torch_promote.integrations import compile as integrations_compile

#: PyTorch caches graphs with regions only if they are marked as safe.
SAFE = {f"torch.amp.autocast_mode.{name}": "1" for name in ("_enter_autocast", "_exit_autocast")}


def compiled(directory: Path, arguments: dict[str, Any] | None) -> tuple[int, torch.dtype]:
    """Compiles a function again. Returns the number of cache hits, and the dtype in which its region computes."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return x @ x

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["aot_autograd"]
    before = counters["autograd_cache_hit"]
    with (
        tp.installed_as(**arguments) if arguments is not None else contextlib.nullcontext(),
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(directory)),
        torch._inductor.config.patch(unsafe_marked_cacheable_functions=SAFE),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        dtype = torch.compile(function, fullgraph=True)(torch.ones(4, 4)).dtype
    return counters["autograd_cache_hit"] - before, dtype


@pytest.mark.usefixtures("nothing_installed", "fresh_dynamo", "vector_instructions_are_known")
@pytest.mark.parametrize("has_digest", [True, False])
def test_entries_of_their_own(has_digest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_digest:
        monkeypatch.setattr(integrations_compile, "digests", [])
    assert compiled(tmp_path, None) == (0, torch.bfloat16)
    # Without the digest, what PyTorch compiled is served.
    assert compiled(tmp_path, {"policy": "off"}) == ((0, torch.float32) if has_digest else (1, torch.bfloat16))
    if has_digest:
        assert compiled(tmp_path, {"overrides": {"matmul": "fp16"}}) == (0, torch.bfloat16)
        assert compiled(tmp_path, {"overrides": {"matmul": torch.float16}}) == (0, torch.float16)
        assert compiled(tmp_path, {"policy": "off"}) == (1, torch.float32)
        assert compiled(tmp_path, None) == (1, torch.bfloat16)
