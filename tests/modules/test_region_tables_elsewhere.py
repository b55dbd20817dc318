"""Module tables of a policy: copies of the model, checkpointing, tracing, and other features."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.checkpointing import Block
from helpers.module_policies import dtype_of, model_of
from helpers.region_tables import FP16, FP32, HALF, LOW, SINGLE, X, policy_of, region, state_of
from torch_promote.integrations import ranks as compare_ranks
from torch_promote.integrations.compile import policy_digest
from torch_promote.native import module_tables
from torch_promote.native.policy_changes import policies_beyond_stock
from torch_promote.regions import module_policies as region_tables

# --- copies


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result

    def __deepcopy__(self, memo: Any) -> Copies:
        made = memo[id(self)] = Copies()
        made.__dict__.update(copy.deepcopy(dict(self.__dict__), memo))
        return made


class Reduces(Copies):
    __deepcopy__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Reduces, (), dict(self.__dict__)


class HasState(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mark": 1}


def _parametrized() -> nn.Module:
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", nn.Identity())
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(4, 4),
    "with a deepcopy of its own": Copies,
    "with a reduce of its own": Reduces,
    "with a state of its own": lambda: HasState(4, 4),
    "parametrized": _parametrized,
}


def _pickled(model: nn.Module) -> nn.Module:
    data = pickle.dumps(model)
    assert b"torch_promote" not in data
    made: nn.Module = pickle.loads(data)
    return made


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    made: nn.Module = torch.load(file, weights_only=False)
    return made


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, _pickled, _saved], ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_made_inside_is_another_model(kind: str, way: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), KINDS[kind]())
    if kind == "parametrized" and way is not copy.deepcopy:
        pytest.skip("PyTorch refuses to pickle parametrized modules, and to copy them by it")
    before = state_of(model)
    with region(policy_of({"1": "fp32"}), model):
        copied = nn.Sequential(way(model[0]), way(model[1]))
        assert (copied(X).dtype, model(X).dtype) == (LOW, SINGLE)
    assert state_of(model) == before
    left = vars(copied[1]).keys() - vars(model[1]).keys()
    assert left <= {"mark"}
    assert not copied[1]._forward_pre_hooks
    assert dtype_of(copied) is LOW


def test_a_copy_keeps_the_modules_own_policy() -> None:
    model = model_of({"linear": "float16"})
    with region(FP32, model):
        copied = copy.deepcopy(model)
        assert (copied(X).dtype, model(X).dtype) == (HALF, SINGLE)
        assert pickle.loads(pickle.dumps(model))(X).dtype is HALF
    assert tp.module_policies(copied) == {"2": {"linear": "float16"}}


def test_a_replica_runs_as_the_model() -> None:
    module = nn.Linear(4, 4)
    with region(policy_of({"": "fp32"}), module):
        replica = module._replicate_for_data_parallel()
        replica.weight, replica.bias = module.weight.detach(), module.bias.detach()
        assert replica(X).dtype is SINGLE


def test_a_copy_of_a_region() -> None:
    model = model_of()
    around = region(FP32, model)
    assert repr(around) == f"my_autocast('cpu', policy={FP32!r}, model=Sequential)"
    with copy.copy(around):
        assert model(X).dtype is SINGLE
    pair = copy.deepcopy([around, model])
    with pair[0]:
        assert (pair[1](X).dtype, model(X).dtype) == (SINGLE, LOW)


def test_a_copy_of_a_model_that_has_its_region() -> None:
    model = model_of()
    model.region = region(FP32, model)
    with pytest.raises(
        tp.errors.OptionError, match=r"a Sequential that has no modules yet.*make it where it is entered"
    ):
        copy.deepcopy(model)


# --- what runs later, elsewhere, or is traced


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_runs_again_under_the_tables(use_reentrant: bool) -> None:
    block = Block()
    model = nn.Sequential(nn.Linear(8, 8), block)
    before = state_of(model)
    policy = policy_of({"1": {"softmax": "fp16"}, "1.first": "fp32"})
    torch.manual_seed(0)
    with region(policy, model):  # which has ended, and is gone, when the backward begins
        loss = checkpoint(model, torch.ones(2, 8, requires_grad=True), use_reentrant=use_reentrant).float().sum()
    if use_reentrant:
        with tp.my_autocast("cpu"):
            loss.backward()
    else:
        loss.backward()
    assert block.seen == [(SINGLE, LOW)] * 2
    del loss
    gc.collect()
    assert state_of(model) == before


def test_traced_by_fx() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    around = region(policy_of({"": "fp32"}), model)
    torch.fx.symbolic_trace(model)
    with around, pytest.raises(tp.errors.RegionError, match=r"torch\.fx traces a Sequential with a policy"):
        torch.fx.symbolic_trace(model)


@pytest.mark.parametrize("strict", [False, True])
def test_exporting_raises(strict: bool, fresh_dynamo: None) -> None:
    model = model_of()
    with (
        region(FP32, model),
        pytest.raises(tp.errors.RegionError, match=r"overrides \(of ops or modules\).*cannot be exp"),
    ):
        torch.export.export(model, (X,), strict=strict)


def test_other_parts_see_the_tables_not_their_number() -> None:
    model, other = model_of(), model_of()

    def seen(model: nn.Module, policy: tp.Policy) -> Any:
        with region(policy, model):
            assert module_tables.number_in_force()
            return policies_beyond_stock(), compare_ranks._policy_in_force(), policy_digest()

    first = seen(model, FP32)
    assert first[:2] == ({}, {'the table [modules."2"]': "policy: fp32"})
    assert seen(other, FP32) == first
    assert seen(model, FP16)[2] != first[2]


def test_numbers_of_any_size_come_back() -> None:
    for number in (1, 63, 64, 12345, 4**12 - 1):
        change = tp.regions.arguments.register_policy_change(list(module_tables.changes_for(number)), True)
        spec = tp.native.region_spec.RegionSpec(policy_change=change)
        owner = object()
        tp._C.enter_region(owner, spec.pack())
        try:
            assert module_tables.number_in_force() == number
        finally:
            tp._C.exit_region(owner)
    assert module_tables.number_in_force() == 0


# --- bounds


def test_the_number_of_tables_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tables, "_MOST", len(module_tables._tables) + 1)
    with pytest.raises(tp.PolicyError, match=r"this process has used \d+ different policies with module tables"):
        region(policy_of({"2": {"bmm": "float16"}}), model_of())


def test_lookups_are_forgotten_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tables, "_KEPT_LOOKUPS", 0)
    model = model_of()
    for _ in range(3):
        with region(FP16, model):
            assert module_tables.number_in_force() > 0
        assert module_tables.number_in_force() == 0
    assert len(module_tables._numbers) == 1


def test_tables_that_die_during_a_change_are_detached_at_its_end() -> None:
    """The garbage collector may run in the middle of another change."""
    model = model_of()
    before = state_of(model)
    bound = region(FP16, model)
    assert state_of(model) != before
    with region_tables._changing():
        del bound
        gc.collect()
        assert state_of(model) != before
    assert state_of(model) == before
