"""install() on a CUDA device: regions that PyTorch itself opens in its own threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.program_comparison import grads
from torch_promote import _C

pytestmark = pytest.mark.usefixtures("nothing_installed")


class Model(nn.Linear):
    depths: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.depths is not None:
            self.depths.append(_C.depth())
        return super().forward(x)


def test_parallel_apply_opens_regions_of_ours_in_its_threads() -> None:
    """As DataParallel does for its replicas."""
    x, results = torch.randn(2, 4, device="cuda"), []
    for policy in ("none installed", None, "off"):
        torch.manual_seed(0)
        models = [Model(4, 4).cuda() for _ in range(2)]
        if policy != "none installed":
            tp.install(policy=policy)
            for model in models:
                model.depths = []
        with torch.autocast("cuda"):
            outputs = nn.parallel.parallel_apply(models, [x, x], devices=[0, 0])
        sum(output.float().sum() for output in outputs).backward()
        results.append((outputs, [grads(model) for model in models]))
        if policy is None:
            assert [model.depths for model in models] == [[1], [1]]
    assert_same(results[1], results[0])
    assert results[0][0][0].dtype is torch.float16
    assert results[2][0][0].dtype is torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_in_regions_of_ours(use_reentrant: bool) -> None:
    """Its recomputation runs in the engine's thread of the device."""
    results = []
    for installs in (False, True):
        torch.manual_seed(0)
        model, x = Model(4, 4).cuda(), torch.randn(2, 4, device="cuda", requires_grad=True)
        model.depths = []
        if installs:
            tp.install()
        with torch.autocast("cuda", torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.float().square().sum().backward()
        results.append((y, grads(model, x)))
        assert [depth > 0 for depth in model.depths] == [installs] * 2
    assert_same(*results)
