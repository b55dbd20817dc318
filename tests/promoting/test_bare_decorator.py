"""`@promotion` without parentheses, and rules that are none."""

from __future__ import annotations

from typing import Any

import pytest

import torch_promote as tp


def test_without_parentheses() -> None:
    promotion: Any = tp.promotion
    with pytest.raises(tp.errors.RuleDefinitionError) as error:

        @promotion
        def step() -> None: ...

    before, _, after = str(error.value).partition("got <function test_without_parentheses.<locals>.step at ")
    assert before == "promotion takes a rule, "
    assert after.partition(">. ")[2] == (
        "Legal: torch, jax, numpy, array_api, strict, or a rule of make_rule. As a decorator, write it with a rule: "
        '@promotion("torch").'
    )
