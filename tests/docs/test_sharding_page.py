"""docs/sharding.md: each row of its table, run with FSDP2's mixed precision and with a region."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.doc_blocks import ROOT, blocks
from helpers.gloo_ranks import in_ranks

PAGE = "docs/sharding.md"
#: The cells of each row: the code on the left and on the right, and whether the bits are the same.
ROWS = [
    ("\n".join(re.findall("`(.+?)`", left)), "\n".join(re.findall("`(.+?)`", right)), same)
    for left, right, same in re.findall(
        r"^\| (`mp = .*?) \|(.*?)\| ((?:yes|no).*) \|$", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE
    )
]
#: What rows say in which FSDP2 casts the weights of the head.
ROUNDED = "has rounded its weights"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(code: str, in_region: bool, rounded_head: bool, rank: int, world_size: int) -> dict[str, Any]:
    """Trains for two steps, as the code of a cell says."""
    (block,) = (b for b in blocks() if b.page == PAGE and "def shard" in b.text)
    names: dict[str, Any] = {"policies": {}}
    exec(block.text, names)
    names["mp"] = names["MP"]()
    setup, call = (
        "\n".join(line for line in code.splitlines() if line.startswith("y = ") == is_call) for is_call in (False, True)
    )
    exec(setup, names)
    torch.manual_seed(0)
    model = names["model"] = Net()
    if rounded_head:
        model.head.to(torch.bfloat16).to(torch.float32)
    names["shard"](model, **{k: names[k] for k in ("mp", "root", "head", "norms", "last") if k in names})
    tp.set_module_policy(model, names["policies"])
    of_last = []
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: of_last.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    results = []
    for _ in range(2):
        names["x"], target = torch.randn(6, 4), torch.randn(6, 4)
        region = tp.my_autocast("cpu", torch.bfloat16, policy=names["policy"])
        with region if in_region else contextlib.nullcontext():
            exec(call or "y = model(x)", names)
        (names["y"].float() - target).square().mean().backward()
        results += [names["y"].detach(), *(whole(weight.grad) for weight in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return {"results": [*results, *map(whole, model.parameters())], "of_last": of_last[0]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    functions = {
        f"{number} {side}": functools.partial(trained, code, side == "right", side == "rounded")
        for number, (left, right, same) in enumerate(ROWS)
        for side, code in (("left", left), ("right", right), ("rounded", left))
        if side != "rounded" or ROUNDED in same
    }
    return in_ranks(functions, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[f"{left} / {right}" for left, right, _ in ROWS])
def test_row(ranks: list[dict[str, Any]], number: int) -> None:
    *_, same = ROWS[number]
    for results in ranks:
        left, right = (results[f"{number} {side}"] for side in ("left", "right"))
        if "both raise" in same:
            assert left == right
            assert left.startswith("RuntimeError: mat1 and mat2 must have the same dtype")
        elif same.startswith("yes"):
            assert_same(left["results"], right["results"], what=same)
        elif "FSDP2 raises" in same:
            assert left.startswith("RuntimeError: mat1 and mat2 must have the same dtype")
            assert right["results"][0].dtype is torch.bfloat16
        else:
            y, ours = left["results"][0], right["results"][0]
            assert not torch.equal(y, ours.to(y.dtype))
            if "is float32" in same:
                assert (left["of_last"], right["of_last"]) == (torch.bfloat16, torch.float32)
            else:
                assert ROUNDED in same
                assert torch.equal(results[f"{number} rounded"]["results"][0], ours)


def test_the_table_has_all_fields_and_kinds_of_modules() -> None:
    code = "".join(left for left, *_ in ROWS)
    assert len(ROWS) == 12
    for name in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "head", "norms", "last"):
        assert name in code


@pytest.mark.parametrize(("policy", "is_updated"), [("fp32", True), ("lower", False)])
def test_running_statistics(policy: str, is_updated: bool) -> None:
    norm = nn.BatchNorm1d(3)
    with tp.my_autocast("cpu", torch.bfloat16, policy="off", overrides={"batch_norm": policy}):
        norm(torch.ones(8, 3, dtype=torch.bfloat16))
    assert norm.running_mean.any() == is_updated
