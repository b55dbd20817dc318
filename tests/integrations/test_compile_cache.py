"""Regions and caches under torch.compile: the argument `cache`, and AOTAutograd's cache on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache

import torch_promote as tp
from helpers.subprocesses import environment, run_python
from torch_promote.integrations import compile as integrations_compile

# --- AOTAutograd's cache on disk


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
