"""Module tables of a policy in a region: where `my_autocast(policy=..., model=...)` applies them."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.checkpointing import Block
from helpers.module_policies import FP16, FP32, HALF, LOW, SINGLE, X, dtype_of, model_of, policy_of, region, state_of
from torch_promote.errors import OptionError, RegionError

# --- where tables hold


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"2": "fp32"}, SINGLE),
        ({"2": {"linear": "float16"}}, HALF),
        ({"*": {"linear": "float16"}, "2": "fp32"}, SINGLE),
        ({"": "fp32"}, SINGLE),
        ({"": {"linear": "float16"}, "2": {"linear": "float64"}}, torch.float64),
        ({"1": "fp32"}, LOW),
    ],
    ids=str,
)
def test_tables_hold_in_the_region_alone(tables: Any, expected: torch.dtype) -> None:
    model = model_of()
    before = state_of(model)
    with region(policy_of(tables), model):
        assert model(X).dtype is expected
    assert state_of(model) == before
    assert dtype_of(model) is LOW


def test_nested_regions() -> None:
    model, other = model_of(), model_of()
    with region(FP32, model):
        with tp.my_autocast("cpu", overrides={"gelu": "fp32"}):
            assert model(X).dtype is SINGLE, "overrides add to the policy around"
        with tp.my_autocast("cpu", policy="stock"):
            assert model(X).dtype is LOW, "a policy replaces the policy around, with its tables"
        with region(FP16, other):
            assert (model(X).dtype, other(X).dtype) == (LOW, HALF)
        with region(FP16, model):
            assert model(X).dtype is HALF
            with region(FP32, model):
                assert model(X).dtype is SINGLE
            assert model(X).dtype is HALF
        with tp.stock_autocast("cpu", torch.float16):
            assert (model[:1](X).dtype, model(X).dtype) == (HALF, SINGLE)
        with tp.my_autocast("cpu", enabled=False):
            assert model(X).dtype is SINGLE
        assert model(X).dtype is SINGLE
    assert dtype_of(model) is LOW


def test_objects_of_one_policy_do_not_end_each_other() -> None:
    model = model_of()
    before = state_of(model)
    first, second = region(FP32, model), region(FP32, model)
    with second:
        del first
        assert model(X).dtype is SINGLE
    del second
    assert state_of(model) == before


def test_two_threads_with_one_model() -> None:
    model = model_of()
    before = state_of(model)
    barrier = threading.Barrier(3)
    found: dict[Any, set[torch.dtype]] = {}

    def run(policy: tp.Policy | None) -> None:
        for _ in range(20):
            with tp.my_autocast("cpu") if policy is None else region(policy, model):
                barrier.wait()
                found.setdefault(policy, set()).add(model(X).dtype)
                barrier.wait()

    threads = [threading.Thread(target=run, args=(policy,)) for policy in (FP32, FP16, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {FP32: {SINGLE}, FP16: {HALF}, None: {LOW}}
    assert state_of(model) == before


# --- together with set_module_policy


@pytest.mark.parametrize(
    ("own", "table", "expected"),
    [
        ({"linear": "float16"}, {"linear": "float64"}, HALF),
        ({"gelu": "fp32"}, {"linear": "float64"}, torch.float64),
        ("fp32", {"linear": "float16"}, SINGLE),
        ({"linear": "float16"}, "fp32", SINGLE),
        ("off", "fp32", SINGLE),
    ],
    ids=str,
)
def test_the_modules_own_policy_is_nested_in_that_of_the_region(own: Any, table: Any, expected: torch.dtype) -> None:
    model = model_of(own)
    before = state_of(model)
    with region(policy_of({"2": table}), model):
        assert model(X).dtype is expected
    assert state_of(model) == before
    assert tp.module_policies(model) == {"2": own}


# --- apply_to


def test_applied_to_a_model() -> None:
    model = model_of()
    before = state_of(model)
    handle = FP32.apply_to(model)
    assert dict(handle.modules) == {"2": "fp32"}
    assert dtype_of(model) is LOW, "a region of another policy"
    with tp.my_autocast("cpu", policy=FP32):
        assert model(X).dtype is SINGLE
    with tp.my_autocast("cpu", policy=FP32.override({"gelu": "fp32"})):
        assert model(X).dtype is SINGLE, "the tables are the same"
    handle.remove()
    handle.remove()
    assert state_of(model) == before
    with pytest.raises(tp.PolicyError, match="no model to find them in"):
        tp.my_autocast("cpu", policy=FP32)


def test_applied_without_keeping_the_model_alive() -> None:
    model = model_of()
    FP32.apply_to(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(tp.PolicyError, match="no model to find them in"):
        tp.my_autocast("cpu", policy=FP32)


@pytest.mark.usefixtures("nothing_installed")
def test_applied_under_install_and_as_the_default() -> None:
    model = model_of()
    with FP32.apply_to(model):
        with tp.installed_as(policy=FP32), torch.autocast("cpu"):
            assert model(X).dtype is SINGLE
        before = tp.set_default_policy(FP32)
        try:
            assert dtype_of(model) is SINGLE
            tp.set_module_policy(model, {"0": FP32})
        finally:
            tp.set_default_policy(before)
        assert dtype_of(model) is LOW


# --- errors

NO_MODEL = (
    "the policy has tables for modules ('2'), and no model to find them in. Legal: my_autocast(..., policy=policy,"
)

ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: tp.my_autocast("cpu", policy=FP32), tp.PolicyError, NO_MODEL),
    (lambda: tp.install(policy=FP32), tp.PolicyError, NO_MODEL),
    (lambda: tp.my_autocast("cpu", model=model_of()), OptionError, "got a model and no policy. Give both,"),
    (lambda: region(FP32, model_of), OptionError, "model is an nn.Module, or None; got "),  # type: ignore[arg-type]
    (
        lambda: region(policy_of({"haed": "fp32"}), nn.ModuleDict({"head": nn.Linear(2, 2)})),
        tp.PolicyError,
        "no module of the model is named 'haed'. Closest: head.",
    ),
    (lambda: tp.Policy.named("cuda").apply_to(model_of()), tp.PolicyError, "Policy.named('cuda') has none. Add some:"),
]


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(("ask", "kind", "text"), ERRORS)
def test_wrong_use(ask: Callable[[], Any], kind: type[Exception], text: str) -> None:
    before = tp.default_policy()
    with pytest.raises(kind) as error:
        ask()
    assert text in str(error.value)
    assert tp.installed() is None
    assert tp.default_policy() is before


# --- copies


def _pickled(model: nn.Module) -> nn.Module:
    data = pickle.dumps(model)
    assert b"torch_promote" not in data
    made: nn.Module = pickle.loads(data)
    return made


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, _pickled], ids=lambda way: way.__name__)
def test_a_copy_made_inside_is_another_model(way: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    before = state_of(model)
    with region(policy_of({"1": "fp32"}), model):
        copied = nn.Sequential(way(model[0]), way(model[1]))
        assert (copied(X).dtype, model(X).dtype) == (LOW, SINGLE)
    assert state_of(model) == before
    assert vars(copied[1]).keys() == vars(model[1]).keys()
    assert not copied[1]._forward_pre_hooks
    assert dtype_of(copied) is LOW


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


def test_exporting_raises(fresh_dynamo: None) -> None:
    model = model_of()
    with (
        region(FP32, model),
        pytest.raises(RegionError, match=r"overrides .* cannot be exported"),
    ):
        torch.export.export(model, (X,))
