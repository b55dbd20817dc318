"""Programs under the policy "fp32", and experts under a policy for `_grouped_mm`, for which stock has none."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import torch_promote as tp
from helpers.autoloading import entry_point, variables
from helpers.subprocesses import run_module

__all__ = ["entry_point"]  # a fixture

BF16 = torch.bfloat16

# --- experts, in the way of the grouped_mm experts of transformers


class Experts(nn.Module):
    """A router, and experts whose products are each one call of `grouped_mm`."""

    def __init__(self, experts: int = 3, width: int = 16, inner: int = 32, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, inner, width) / 4)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / 4)

    def forward(self, x: Tensor, multiply: Callable[..., Tensor] = F.grouped_mm) -> Tensor:
        shares, chosen = self.router(x).float().softmax(-1).topk(self.top)
        expert, order = chosen.flatten().sort(stable=True)
        counts = torch.histc(expert.float(), bins=len(self.up), min=0, max=len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(multiply(x[order // self.top], self.up.transpose(-2, -1), offs=ends))
        out = multiply(hidden, self.down.transpose(-2, -1), offs=ends) * shares.flatten()[order].unsqueeze(-1)
        return out[order.argsort()].unflatten(0, (-1, self.top)).sum(1)


def cast_by_hand(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(x.to(BF16), weight.to(BF16), offs=offs)


def stepped(model: nn.Module, region: Any, **forward: Any) -> list[Tensor]:
    """Trains a copy of a model for two steps; the outputs, gradients and weights."""
    model, seen = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with region():
            out = model(x, **forward)
        optimizer.zero_grad()
        out.float().square().mean().backward()
        optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters()]
        seen += [tensor.detach().clone() for tensor in (out, x.grad, *gradients, *model.parameters())]  # type: ignore
    return seen


@contextlib.contextmanager
def registered() -> Iterator[None]:
    handle = tp.register_policy("aten::_grouped_mm", "lower_precision_fp")
    try:
        with tp.my_autocast("cpu"):
            yield
    finally:
        handle.remove()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    with tp.install(overrides={"_grouped_mm": "lower"}), torch.autocast("cpu"):
        yield


WAYS = {
    "overrides": lambda: tp.my_autocast("cpu", overrides={"_grouped_mm": "lower"}),
    "a registered policy": registered,
    "install": installed,
}


@pytest.mark.parametrize("way", WAYS)
def test_experts_train_as_with_casts_by_hand(way: str) -> None:
    torch.manual_seed(0)
    model = Experts()
    expected = stepped(model, lambda: torch.autocast("cpu"), multiply=cast_by_hand)
    with tp.crosscheck() as report:
        got = stepped(model, WAYS[way])
    assert report.ok, str(report)
    for ours, by_hand in zip(got, expected, strict=True):
        assert ours.dtype == by_hand.dtype
        assert torch.equal(ours, by_hand)
    compiled = stepped(torch.compile(model, backend="aot_eager", fullgraph=True), WAYS[way])
    assert all(map(torch.equal, compiled, expected))


# --- the policy "fp32": inputs in bfloat16 meet float32 weights


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


class Bags(nn.EmbeddingBag):
    """Bags of two tokens with the shares of the input."""

    def __init__(self) -> None:
        super().__init__(4, 3, mode="sum")

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.tensor([[0, 1], [2, 3]]), per_sample_weights=x[:, 0, :2])


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, x[0])


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(16, 4),
    "Conv1d": lambda: nn.Conv1d(8, 4, 3),
    "RMSNorm": lambda: nn.RMSNorm(16),
    "LayerNorm": lambda: nn.LayerNorm(16),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "PReLU": nn.PReLU,
    "GRU": lambda: nn.GRU(16, 4),
    "TransformerEncoderLayer": encoder,
    "TransformerEncoderLayer, in its fast path": lambda: encoder().eval().requires_grad_(False),
    "EmbeddingBag": Bags,
    "a product of a sparse weight": Sparse,
    "Experts": lambda: nn.Sequential(nn.Flatten(0, 1), Experts()),
}


@pytest.mark.parametrize("name", MODULES)
def test_inputs_in_bfloat16_meet_float32_weights(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(2, 8, 16).to(BF16)
    results = []
    for region, given in ((contextlib.nullcontext(), x.float()), (tp.my_autocast("cpu", policy="fp32"), x)):
        with region:
            out = module(given)
        out = out[0] if isinstance(out, tuple) else out
        module.zero_grad()
        if out.requires_grad:
            out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in module.parameters() if parameter.requires_grad)])
    expected, got = results
    assert got[0].dtype is torch.float32
    assert all(torch.equal(*(each.to_dense() for each in pair)) for pair in zip(got, expected, strict=True))


@pytest.mark.usefixtures("pretend_cuda")
def test_an_op_that_stock_bans_runs_in_float32() -> None:
    with torch._subclasses.FakeTensorMode(), tp.my_autocast("cuda", policy="fp32"):
        half = torch.empty(3, device="cuda", dtype=torch.float16)
        assert F.binary_cross_entropy(half, half).dtype is torch.float32


PROGRAM = """
import torch
model = torch.nn.Linear(4, 4)
with torch.autocast("cpu"):
    print(model(torch.ones(2, 4).bfloat16()).dtype)
"""


def test_whatever_takes_a_named_policy_takes_fp32(tmp_path: Path, entry_point: Path) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4).to(BF16)
    tp.Policy.named("fp32").save(tmp_path / "all.toml")
    assert repr(tp.Policy.load(tmp_path / "all.toml")) == "Policy.named('fp32')"
    regions: list[Any] = [tp.my_autocast("cpu", policy=policy) for policy in ("fp32", tmp_path / "all.toml")]
    with tp.install(policy="fp32"):
        regions.append(torch.autocast("cpu"))
        for region in regions:
            with region:
                assert model(x).dtype is torch.float32
    run = run_module("torch_promote", "run", "--policy", "fp32", "-c", PROGRAM, env=variables(entry_point))
    assert run.stdout == "torch.float32\n", run.stderr


def test_a_region_in_float32() -> None:
    with pytest.warns(UserWarning, match="Disabling.*To run every op in float32, add policy='fp32'.$"):
        tp.my_autocast("cpu", torch.float32)
    x = torch.ones(2, 4).to(BF16)
    for policy in ("fp32", tp.Policy.named("fp32")):
        with tp.my_autocast("cpu", torch.float32, policy=policy, overrides={"relu": "lower"}):
            assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.float32)
            assert (x @ x.mT).dtype is x.relu().dtype is torch.float32
    assert torch.get_autocast_dtype("cpu") is BF16
