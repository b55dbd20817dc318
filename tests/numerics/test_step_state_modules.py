"""StepState restores modules and their tensors in place: values, memory, gradients, flags."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.process_groups import end_group
from helpers.state_bits import snapshot
from torch_promote.errors import StepError
from torch_promote.numerics.step_state import StepState


def test_an_average_of_weights_and_another_model() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    averages = torch.optim.swa_utils.AveragedModel(model)
    functions = {"loss": nn.Linear(2, 1)}

    def step() -> None:
        for one in (model, other, functions["loss"]):
            one.weight.data.add_(1)
        averages.update_parameters(model)

    before = snapshot(model, other, averages, functions["loss"])
    state = StepState(model, step=step)
    step()
    state.restore()
    assert snapshot(model, other, averages, functions["loss"]) == before


def test_weights_that_are_swapped_and_replaced() -> None:
    """As with averages that are swapped in for an evaluation, which replaces the memory or the parameter."""
    model = nn.Linear(2, 2)
    weight, bias, place = model.weight, model.bias, model.weight.data_ptr()
    shadow = torch.zeros(2, 2)
    before, state = snapshot(model), StepState(model)
    weight.data = shadow
    model.bias = nn.Parameter(torch.zeros(2))
    model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    model.register_buffer("made_in_the_step", torch.zeros(1))
    state.restore()
    assert snapshot(model) == before
    assert (model.weight is weight, model.bias is bias, weight.data_ptr()) == (True, True, place)
    assert shadow.tolist() == [[0, 0], [0, 0]]
    state.check()
    weight.data = weight.data.half()
    state.restore()
    assert snapshot(model) == before


def test_flags_of_modules_and_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    before, state = snapshot(model), StepState(model)
    model.train()
    model[0].eval()
    model[0].weight.requires_grad_(False)
    state.restore()
    assert snapshot(model) == before
    state.check()


def test_tensors_that_are_no_parameters() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2))
            self.weight = nn.Parameter(torch.ones(2))
            self.seen: Any = None

        def forward(self) -> torch.Tensor:
            self.state.add_(self.weight)  # it is part of the graph now
            self.seen = self.state.detach() + 1
            self.made = torch.ones(2)
            return self.state.sum()

    model = Recurrent()
    state = StepState(model)
    for _ in range(2):
        model().backward()
        state.restore()
        assert (model.state.tolist(), model.state.grad_fn, model.seen) == ([0, 0], None, None)
        assert not hasattr(model, "made")
    state.check()


def test_gradients_keep_their_identity() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = gradient = torch.ones(2, 2)
    state = StepState(model)
    for zero in (True, False):
        model.zero_grad(set_to_none=zero)
        model(torch.ones(1, 2)).sum().backward()
        state.restore()
        assert model.weight.grad is gradient
        assert gradient.tolist() == [[1, 1], [1, 1]]
        assert model.bias.grad is None


def test_a_sparse_gradient() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    before, state = model.weight.grad, StepState(model)
    model(torch.tensor([1, 2])).sum().backward()
    state.restore()
    state.check()
    assert model.weight.grad is before
    assert before is not None
    assert before.to_dense().tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # one is in beta state, the other is deprecated
    COMPRESSED, QUANTIZED = torch.eye(2).to_sparse_csr(), torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return torch.quantize_per_tensor(tensor.dequantize() + 1, 0.5, 0, torch.qint8)
    return tensor * 2 if tensor.layout is torch.sparse_csr else torch.ones_like(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(3),
        torch.zeros(2, 3).t(),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
        COMPRESSED,
        QUANTIZED,
        torch.zeros(2, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {tensor.device}",
)
def test_unusual_buffers(tensor: torch.Tensor) -> None:
    model = nn.Module()
    model.register_buffer("buffer", tensor)
    state = StepState(model)
    state.restore()
    state.check()
    if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_sparse:
        hashes = state.hashes()
        model.buffer = other_values(tensor)
        assert state.hashes() != hashes
        model.buffer = tensor
        assert state.hashes() == hashes


def test_inference_tensors() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    state = StepState(model)
    with torch.inference_mode():
        model.weight.zero_()
    state.restore()
    state.check()


def test_extra_state() -> None:
    class Scales(nn.Module):
        history = 0

        def get_extra_state(self) -> Any:
            return {"history": self.history}

        def set_extra_state(self, state: Any) -> None:
            self.history = state["history"]

    model = nn.Sequential(Scales())
    state = StepState(model)
    model[0].history = 3
    with pytest.raises(StepError, match="could not be restored: model differs"):
        state.check()
    state.restore()
    assert model[0].history == 0


def test_parameters_without_a_shape() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(StepError, match=r"model has lazy parameters.*: 1\.weight, 1\.bias. Call it once"):
        StepState(model)
    model(torch.ones(1, 2))
    StepState(model).check()


def test_a_script_module() -> None:
    model = torch.jit.script(nn.Linear(2, 2))
    before, state = copy.deepcopy(model.state_dict()), StepState(model)
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    assert torch.equal(model.weight, before["weight"])
    state.check()


def test_sharded_weights(tmp_path: Path) -> None:
    """Between a forward and its backward, modules hold whole weights in place of their shards."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(3, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = [weight.to_local().clone() for weight in model.parameters()]  # type: ignore[attr-defined]
        state = StepState(model, [optimizer])
        outputs = []
        for _ in range(2):
            outputs.append(model(x).detach())
            state.restore()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.restore()
            state.check()
            now = [weight.to_local() for weight in model.parameters()]  # type: ignore[attr-defined]
            assert all(map(torch.equal, now, before))
        assert torch.equal(*outputs)
    finally:
        end_group()
