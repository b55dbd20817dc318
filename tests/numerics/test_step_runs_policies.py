"""Regions in the runs of a step follow the policy of the run, independent of earlier settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.nothing_left import nothing_left_behind
from helpers.step_products import BFLOAT16, FLOAT16, FLOAT32, OFF, STOCK, X, dtype_of, product, stock_product
from torch_promote.errors import OptionError
from torch_promote.numerics.step_runs import StepRuns, present_policy, put_policy_in_force

__all__ = ["nothing_left_behind"]  # a fixture


@pytest.mark.parametrize("step", [product, stock_product])
def test_regions_that_name_no_policy_follow_that_of_the_run(step: Any) -> None:
    with StepRuns(step, None) as runs:
        assert dtype_of(runs, OFF) is FLOAT32
        assert dtype_of(runs, STOCK) is BFLOAT16
        assert dtype_of(runs, STOCK.override({"matmul": torch.float16})) is FLOAT16
        assert runs.count == 3


def test_regions_with_a_policy_and_with_overrides() -> None:
    def step() -> dict[str, torch.Tensor]:
        with tp.my_autocast("cpu", policy="stock"):
            own = X @ X
        with tp.my_autocast("cpu", overrides={"matmul": torch.float64}):
            overridden = X @ X, nn.functional.conv1d(X[None], X[:, :, None])
        return {"own": own, "overridden": overridden[0], "rest": overridden[1]}

    with StepRuns(step, None) as runs:
        for policy, rest in ((OFF, FLOAT32), (STOCK, BFLOAT16)):
            [result] = runs.run(policy)
            assert [tensor.dtype for tensor in result.values()] == [BFLOAT16, torch.float64, rest]


@pytest.mark.parametrize(
    ("installation", "expected"),
    [
        ({"policy": "off"}, FLOAT32),
        ({"overrides": {"matmul": torch.float64}}, torch.float64),
        ({"cache": "persistent"}, BFLOAT16),
        ({"policy": "off", "overrides": {"matmul": torch.float16}, "cache": "none"}, FLOAT16),
    ],
)
def test_with_install_in_force(installation: Any, expected: torch.dtype) -> None:
    seen = []

    def step() -> torch.Tensor:
        seen.append(tp.installed().cache)  # type: ignore[union-attr]
        return stock_product()

    with tp.installed_as(**installation) as before:
        with StepRuns(step, None) as runs:
            assert dtype_of(runs, present_policy()) is expected
            assert dtype_of(runs, OFF) is FLOAT32
            assert dtype_of(runs, STOCK) is BFLOAT16
        assert tp.installed() is before
        assert stock_product().dtype is expected
    assert seen == [installation.get("cache")] * 3


def test_a_step_that_installs() -> None:
    def step() -> torch.Tensor:
        tp.install()
        return stock_product()

    with StepRuns(step, None) as runs:
        assert dtype_of(runs, OFF) is FLOAT32


def test_a_default_policy_with_tables_for_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    policy = STOCK.override_modules({"1": "fp32"})

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with tp.my_autocast("cpu"):
            return model[0](X), model[1](X)

    def dtypes() -> list[torch.dtype]:
        return [tensor.dtype for tensor in step()]

    with policy.apply_to(model):
        before = tp.set_default_policy(policy)
        try:
            assert dtypes() == [BFLOAT16, FLOAT32]
            with StepRuns(step, model) as runs:
                for one, expected in ((present_policy(), FLOAT32), (STOCK, BFLOAT16), (policy, FLOAT32)):
                    [result] = runs.run(one)
                    assert [tensor.dtype for tensor in result.values()] == [BFLOAT16, expected]
            assert dtypes() == [BFLOAT16, FLOAT32]
        finally:
            tp.set_default_policy(before)
    assert dtypes() == [BFLOAT16, BFLOAT16]


def test_tables_for_modules_need_a_model() -> None:
    policy = STOCK.override_modules({"1": "fp32"})
    text = r"has module tables\. Pass the model to which they apply: model="
    with pytest.raises(OptionError, match=text), StepRuns(product, None) as runs:
        runs.run(policy)
    with pytest.raises(tp.PolicyError), StepRuns(product, nn.Linear(2, 2)) as runs:
        runs.run(policy)
    assert tp.default_policy() is None


def test_the_dtype_of_regions_that_name_none() -> None:
    def step() -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            named = X @ X
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        return [product(), stock_product(), named]

    with StepRuns(step, None, dtype=FLOAT16) as runs:
        for _ in range(2):
            [result] = runs.run(STOCK)
            assert [tensor.dtype for tensor in result.values()] == [FLOAT16, FLOAT16, BFLOAT16]


def test_put_policy_in_force_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), put_policy_in_force(OFF, None, FLOAT16):
        raise KeyboardInterrupt
