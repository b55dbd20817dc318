"""Module tables of a policy in a region: where `my_autocast(policy=..., model=...)` applies them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.module_policies import dtype_of, model_of
from helpers.region_tables import FP16, FP32, HALF, LOW, SINGLE, X, policy_of, region, state_of

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


def test_the_results_are_those_of_set_module_policy() -> None:
    tables = {"0": {"linear": "float16"}, "2": "fp32"}
    model, expected = model_of(), model_of()
    tp.set_module_policy(expected, tables)
    for one, around in ((model, region(policy_of(tables), model)), (expected, tp.my_autocast("cpu"))):
        with around:
            one(X).float().square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def test_the_policy_of_ops_holds_too() -> None:
    model = model_of()
    with region(FP16.override({"linear": "fp32", "gelu": "fp32"}), model):
        assert model[:1](X).dtype is SINGLE
        assert model(X).dtype is HALF


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


def test_decorated() -> None:
    model = model_of()
    around = region(FP32, model)
    assert around(model)(X).dtype is SINGLE

    @around
    def steps() -> Iterator[torch.dtype]:
        yield model(X).dtype
        yield model(X).dtype

    @around
    async def waits() -> torch.dtype:
        await asyncio.sleep(0)
        result: torch.dtype = model(X).dtype
        return result

    found = []
    for dtype in steps():
        found += [dtype, dtype_of(model)]
    assert found == [SINGLE, LOW, SINGLE, LOW]

    async def both() -> list[torch.dtype]:
        return await asyncio.gather(waits(), region(FP16, model)(waits.__wrapped__)())

    assert asyncio.run(both()) == [SINGLE, HALF]


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


def test_set_and_removed_inside() -> None:
    model = model_of()
    before = state_of(model)
    with region(policy_of({"2": {"linear": "float64"}}), model):
        tp.set_module_policy(model, {"2": {"linear": "float16"}})
        assert model(X).dtype is HALF
        tp.remove_module_policy(model)
        assert model(X).dtype is torch.float64
    assert state_of(model) == before
