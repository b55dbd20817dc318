"""AOTAutograd's cache on disk does not serve code that was compiled for another policy."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.utils import fresh_cache

import torch_promote as tp
from helpers.subprocesses import environment, run_python
from torch_promote.integrations import compile as integrations_compile

#: Where a region writes the fingerprint of its policy; csrc/policy/policy_registry.h, NOTE [ Policy fingerprint ].
SLOTS = ("privateuseone", "ipu", "maia", "hpu", "mtia")


def compiled_dtype(override: object) -> tuple[torch.dtype, int]:
    """Compiles anew, under a policy with a planted fingerprint: the result's dtype, and hits in the cache on disk."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ x  # Inductor calls ATen for it, and nothing has to be built by a C++ compiler

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["aot_autograd"]
    before = counters["autograd_cache_hit"]
    with tp.my_autocast("cpu", overrides={"matmul": override}):
        for slot in SLOTS:
            torch.set_autocast_dtype(slot, torch.int8)
        dtype = torch.compile(function, backend="inductor", fullgraph=True)(torch.ones(4, 4)).dtype
    return dtype, counters["autograd_cache_hit"] - before


@pytest.mark.usefixtures("fresh_dynamo", "vector_instructions_are_known")
@pytest.mark.parametrize("has_digest", [True, False])
def test_policies_with_equal_fingerprints_have_entries_of_their_own(
    has_digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may share the cache, and two policies in 33 million share a fingerprint."""
    if not has_digest:
        monkeypatch.setattr(integrations_compile, "policy_digest", lambda: "")
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        assert compiled_dtype("fp32") == (torch.float32, 0)
        assert compiled_dtype(torch.float16) == ((torch.float16, 0) if has_digest else (torch.float32, 1))
        assert compiled_dtype("fp32") == (torch.float32, 1)


PLAIN_PROGRAM = """
import sys, torch
if "import" in sys.argv:
    import torch_promote
@torch.compile
def function(x):
    return x @ x  # no C++ compiler is needed
function(torch.ones(8, 8))
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_an_import_alone_leaves_the_keys_of_the_disk_cache_as_they_are(tmp_path: Path) -> None:
    """A process that imports the package and opens no region finds entries of processes without the package."""
    hits = []
    for arguments in ([], ["import"]):
        variables = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        plain = not arguments  # the package is imported before the compiler
        done = run_python(PLAIN_PROGRAM, *arguments, env=variables, compiler=plain, quiet=True, timeout=250)
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout.split()[-1]))
    assert hits == [0, 1]


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
def test_installations_have_entries_of_their_own(
    has_digest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_digest:
        monkeypatch.setattr(integrations_compile, "digests", [])
    assert compiled(tmp_path, None) == (0, torch.bfloat16)
    # Without the digest, what PyTorch compiled is served.
    assert compiled(tmp_path, {"policy": "off"}) == ((0, torch.float32) if has_digest else (1, torch.bfloat16))
    if has_digest:
        assert compiled(tmp_path, {"overrides": {"matmul": torch.float16}}) == (0, torch.float16)
        assert compiled(tmp_path, {"policy": "off"}) == (1, torch.float32)
        assert compiled(tmp_path, None) == (1, torch.bfloat16)


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
