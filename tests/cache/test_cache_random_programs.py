"""Random programs that use one weight in many ways: after every step the gradients have stock's bits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helpers.casts import Region, ours, stock
from helpers.comparison import assert_same
from helpers.random_programs import (
    OF_VIEWS,
    STEPS,
    Step,
    add_cast,
    add_transposed,
    add_view,
    check_random_programs,
    gradients_after,
    use_frozen,
    use_in_inference_mode,
    use_under_no_grad,
)

pytestmark = pytest.mark.usefixtures("nothing_persists")


def ours_with(cache: str) -> Region:
    def region(**arguments: Any) -> Any:
        return ours(**arguments) if "cache_enabled" in arguments else ours(cache=cache, **arguments)

    return region


def test_random_programs_of_one_region() -> None:
    compared = 0
    for seed in range(300):
        draw = random.Random(seed)
        steps = draw.choices(STEPS, k=draw.randint(3, 12))
        expected = gradients_after([steps], stock)
        assert_same(gradients_after([steps], ours), expected, f"program {seed}: {[step.__name__ for step in steps]}")
        compared += len(expected)
    assert compared > 500


MODES = pytest.mark.parametrize("cache", ["weights", "persistent", "all"])


@MODES
def test_random_programs(cache: str) -> None:
    check_random_programs(stock, ours_with(cache), OF_VIEWS, 100)


@MODES
@pytest.mark.parametrize("step", [use_in_inference_mode, use_frozen], ids=lambda step: step.__name__)
def test_random_programs_with_uses_that_stock_has_no_cast_for(step: Step, cache: str) -> None:
    check_random_programs(stock, ours_with(cache), [*OF_VIEWS, step, step], 60)


@MODES
def test_a_weight_used_without_a_gradient_first_and_after_its_views_later(cache: str) -> None:
    """The position of its gradient in the sum is that of its first use in the region."""
    regions = [[add_cast], [use_under_no_grad, add_view, add_transposed, add_cast, add_view]]
    assert_same(gradients_after(regions, ours_with(cache)), gradients_after(regions, stock))
