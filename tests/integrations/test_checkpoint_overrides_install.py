"""The hooks of torch_promote in torch.utils.checkpoint, and a PyTorch that does not support them."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as stock_checkpoint
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.checkpointing import KINDS, OVERRIDES, Block, ours, plainly, train
from helpers.comparison import assert_same
from helpers.subprocesses import run_python
from torch_promote.integrations import checkpoint as _checkpoint


@pytest.fixture(autouse=True)
def installed() -> None:
    _checkpoint.install()


@KINDS
def test_made_before_install(use_reentrant: bool) -> None:
    """A function checkpointed before the first use of a policy is recomputed without one."""
    stock = functools.partial(tp.stock_autocast, "cpu")
    keepers = uninstall()
    try:
        torch.manual_seed(0)
        model = Block()
        x = torch.randn(4, 8, requires_grad=True)
        with stock():
            output = checkpoint(model, x, use_reentrant=use_reentrant)
    finally:
        for (kind, name), keeper in keepers.items():
            setattr(kind, name, keeper)
    with ours(OVERRIDES):
        output.float().square().sum().backward()
    assert model.seen == [(torch.bfloat16, torch.bfloat16)] * 2
    grads = [output, x.grad, *(parameter.grad for parameter in model.parameters())]
    assert_same(grads, train(plainly, stock, functools.partial(ours, OVERRIDES)))


def uninstall() -> dict[tuple[type, str], Any]:
    places = [
        (stock_checkpoint.CheckpointFunction._backward_cls, "run_function"),
        (stock_checkpoint._CheckpointFrame, "recompute_fn"),
    ]
    keepers = {place: vars(place[0])[place[1]] for place in places}
    for kind, name in places:
        delattr(kind, name)
    return keepers


def imitation(**changes: Any) -> types.ModuleType:
    """A module like torch.utils.checkpoint with some differences."""
    module = types.ModuleType("imitation")
    vars(module).update(vars(stock_checkpoint))
    for name, value in changes.items():
        setattr(module, name, value)
    return module


class FrameOfAnotherName:
    def __init__(self, again: Any) -> None:
        self.again = again


@pytest.mark.parametrize("changes", [{"_CheckpointFrame": FrameOfAnotherName}, {"CheckpointFunction": None}])
def test_unknown_checkpointing_is_refused_where_it_is_called(changes: dict[str, Any]) -> None:
    keepers = uninstall()
    module = imitation(**changes)
    try:
        with pytest.raises(LookupError) as found:
            _checkpoint._find_places(module)
    finally:
        for (kind, name), keeper in keepers.items():
            setattr(kind, name, keeper)
    _checkpoint._refuse(module, str(found.value))
    expected = stock_checkpoint._get_autocast_kwargs("cpu")
    assert module._get_autocast_kwargs("cpu") == expected
    with ours():
        module._get_autocast_kwargs("cpu")
    with (
        ours(OVERRIDES),
        pytest.raises(tp.errors.RegionError, match=r"does not support .* the current overrides"),
    ):
        module._get_autocast_kwargs("cpu")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("opening", ["tp.register_policy('sin', 'float64')", "tp.set_default_policy('fp32_safe')"])
def test_policies_of_the_whole_program_are_kept_too(opening: str, use_reentrant: bool) -> None:
    """In a process in which no other test has installed the hooks."""
    program = f"""
import torch, torch_promote as tp
from torch.utils.checkpoint import checkpoint
{opening}
seen = []
def step(x):
    y = torch.exp(torch.sin(x))
    seen.append((torch.sin(x).dtype, y.dtype))
    return torch.sin(y)
x = torch.ones(2, dtype=torch.float16, requires_grad=True)
with tp.my_autocast("cpu"):
    y = checkpoint(step, x, use_reentrant={use_reentrant})
y.sum().backward()
print(len(seen), len(set(seen)), seen[0][1] is torch.float16)
"""
    done = run_python(program, compiler=True)
    assert done.stdout.split() == ["2", "1", "False"], done.stderr
