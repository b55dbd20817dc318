"""AOTAutograd's cache on disk does not serve code that was compiled for another policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache

import torch_promote as tp
from helpers.subprocesses import environment, run_python
from torch_promote.integrations import compile as integrations_compile

#: Where a region writes the fingerprint of its policy; csrc/policy/policy_registry.h, NOTE [ Policy fingerprint ].
SLOTS = ("privateuseone", "ipu", "maia", "hpu", "mtia")
#: PyTorch caches graphs with regions only if they are marked as safe.
SAFE = {f"torch.amp.autocast_mode.{name}": "1" for name in ("_enter_autocast", "_exit_autocast")}


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x  # Inductor calls ATen for it, and nothing has to be built by a C++ compiler


def product_in_a_region(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return x @ x


def compiled_under(overrides: dict[str, Any]) -> torch.dtype:
    """In a region whose fingerprint is planted: it equals that of others."""
    with tp.my_autocast("cpu", overrides=overrides):
        for slot in SLOTS:
            torch.set_autocast_dtype(slot, torch.int8)
        return torch.compile(product, fullgraph=True)(torch.ones(4, 4)).dtype


def compiled_installed(overrides: dict[str, Any]) -> torch.dtype:
    """The region is in the graph."""
    with tp.installed_as(overrides=overrides):
        return torch.compile(product_in_a_region, fullgraph=True)(torch.ones(4, 4)).dtype


@pytest.mark.usefixtures("nothing_installed", "fresh_dynamo", "vector_instructions_are_known")
@pytest.mark.parametrize("has_digest", [True, False])
@pytest.mark.parametrize("compiled", [compiled_under, compiled_installed])
def test_each_policy_has_entries_of_its_own(
    compiled: Callable[[dict[str, Any]], torch.dtype], has_digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may share the cache, and two policies in 33 million share a fingerprint."""
    if not has_digest:
        monkeypatch.setattr(integrations_compile, "digests", [])
    counters = torch._dynamo.utils.counters["aot_autograd"]

    def found(override: object) -> tuple[torch.dtype, int]:
        """The result's dtype, and hits in the cache on disk."""
        torch._dynamo.reset()
        before = counters["autograd_cache_hit"]
        return compiled({"matmul": override}), counters["autograd_cache_hit"] - before

    with (
        fresh_cache(),
        torch._inductor.config.patch(unsafe_marked_cacheable_functions=SAFE),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        assert found("fp32") == (torch.float32, 0)
        # Without the digest, what was compiled for the other policy is served.
        assert found(torch.float16) == ((torch.float16, 0) if has_digest else (torch.float32, 1))
        assert found("fp32") == (torch.float32, 1)


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
