"""`linear` under the float8 policies on a GPU: torchao's bits, forward and backward, eager and compiled.

On a GPU without float8, the bits are those of lower precision.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from torch_promote.regions import float8

training = pytest.importorskip("torchao.float8", reason="torchao is not installed")
DEVICE = torch.device("cuda", 0)
HAS_FLOAT8 = float8.what_lacks(DEVICE) is None
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [(64, 256), (37, 128), (4, 16, 256), (2048, 1024)]
CASES = [*itertools.product((BF16, FP16), SHAPES, (True, False), (False,)), (BF16, (37, 128), True, True)]


@pytest.mark.parametrize(("dtype", "shape", "bias", "compiled"), CASES, ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_bits_are_those_of_torchao(
    recipe: str, dtype: torch.dtype, shape: tuple[int, ...], bias: bool, compiled: bool
) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(shape[-1], 512, bias=bias)).to(DEVICE, dtype)
    ours[0].weight.data *= torch.logspace(3, -9, shape[-1], device=DEVICE)  # other scales by column than by row
    theirs = copy.deepcopy(ours)
    if HAS_FLOAT8:
        training.convert_to_float8_training(theirs, config=training.Float8LinearConfig.from_recipe_name(recipe))
    x, gradient = torch.randn(shape, device=DEVICE, dtype=dtype), torch.randn(*shape[:-1], 512).to(DEVICE, dtype)

    def trained(net: nn.Module, policy: str) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        run = torch.compile(net, fullgraph=True) if compiled else net
        with tp.my_autocast(DEVICE.type, dtype, overrides={"linear": policy}):
            result = run(leaf)
        result.backward(gradient)
        return [result, *(tensor.grad for tensor in (leaf, *net.parameters()) if tensor.grad is not None)]

    found, expected = trained(ours, f"float8:{recipe}"), trained(theirs, "lower")
    assert len(found) == 3 + bias
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
