"""The warning for an override of an op that other ops hide: when it comes, its text and line, and who gets none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import torch_promote as tp
from helpers.probes import OpLog, leaves_no_trace
from torch_promote.regions import autocast


def told(make: Callable[[], object]) -> list[str]:
    """Returns the texts of the warnings of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(warning.message) for warning in caught if warning.category is tp.errors.UnusedOverrideWarning]


WARNS: dict[str, tuple[dict[Any, Any], str]] = {
    "another name": ({"aten::addmm": "fp32"}, "linear"),
    "an op object": ({torch.ops.aten.mm: "fp32"}, "linear, matmul"),
    "a function": ({torch.mm: "fp32"}, "linear, matmul"),
    "a dtype": ({"bmm": torch.float64}, "matmul"),
    "keep": ({"mv": "keep"}, "matmul"),
    "an op whose overloads have two policies": ({"convolution": "fp32"}, "conv1d, conv2d, conv3d, conv_transpose1d"),
    "beside others": ({"mm": "fp32", "softmax": "fp32"}, "linear, matmul"),
}


@pytest.mark.parametrize(("overrides", "ops"), WARNS.values(), ids=WARNS)
def test_an_op_that_runs_inside_another_one(overrides: dict[Any, Any], ops: str) -> None:
    (text,) = told(lambda: tp.my_autocast("cpu", overrides=overrides))
    assert f" Name in the overrides: {ops}" in text


def mm(**arguments: Any) -> Callable[[], object]:
    return lambda: tp.my_autocast(**{"device_type": "cpu", "overrides": {"mm": "fp32"}, **arguments})


SILENT: dict[str, Callable[[], object]] = {
    "an overload": mm(overrides={"mm.default": "fp32", torch.ops.aten.addmm.default: "fp32"}),
    "a pattern": mm(overrides={"m[m]": "fp32", "add*": "fp32"}),
    "both are named": mm(overrides={"mm": "fp32", "linear": "fp32"}),
    "the other one is named by a pattern": mm(overrides={"mm": "fp32", "linea[r]": "fp16"}),
    "the other one is left to the ops inside": mm(overrides={"mm": "fp32", "linear": "fallthrough"}),
    "it asks for what runs": mm(overrides={"mm": "lower"}),
    "it asks for the dtype that runs": mm(overrides={"mm": torch.bfloat16}),
    "the other ones have no policy on the CPU": mm(overrides={"_softmax": "fp32"}),
    "autocast is off": mm(enabled=False),
    "the policy casts nothing": mm(policy="off"),
    "the policy does the same": mm(policy="fp32", overrides={"mm": torch.float32}),
    "a policy": mm(policy=tp.Policy.stock().override({"mm": "fp32"}), overrides=None),
    "install": lambda: tp.install(overrides={"mm": "fp32"}).remove(),
    "a module": lambda: tp.set_module_policy(torch.nn.ReLU(), {"": {"mm": "fp32"}}),
}


@pytest.mark.parametrize("make", SILENT.values(), ids=SILENT)
def test_who_gets_none(make: Callable[[], object]) -> None:
    assert told(make) == []


def test_the_text_and_the_line() -> None:
    with pytest.warns(tp.errors.UnusedOverrideWarning) as caught:
        tp.my_autocast("cpu", overrides={"mm": "fp32"})
    text = (
        "the override of mm acts on direct calls of mm alone: linear, matmul may call it with autocast off. Name "
        "in the overrides: linear, matmul. For direct calls, name mm.default."
    )
    line = test_the_text_and_the_line.__code__.co_firstlineno + 2
    assert [(str(told.message), told.filename, told.lineno) for told in caught] == [(text, __file__, line)]


def test_a_copy_does_not_warn_again() -> None:
    with pytest.warns(tp.errors.UnusedOverrideWarning):
        region = tp.my_autocast("cpu", overrides={"mm": "fp32"})
    assert told(lambda: region.__reduce__()[0](*region.__reduce__()[1])) == []


def test_a_warning_as_an_error_leaves_nothing_open() -> None:
    with leaves_no_trace(), warnings.catch_warnings():
        warnings.simplefilter("error", tp.errors.UnusedOverrideWarning)
        with pytest.raises(tp.errors.UnusedOverrideWarning, match="overrides: linear"):
            tp.my_autocast("cpu", overrides={"mm": "fp32"})


CALLS: dict[str, Callable[[], object]] = {
    "linear": lambda: F.linear(torch.ones(2, 4), torch.ones(4, 4), torch.ones(4)),
    "matmul": lambda: (X @ X, torch.ones(2, 4, 4) @ torch.ones(2, 4, 4), X @ X[0], X[0] @ X[0]),
    "conv1d": lambda: F.conv1d(torch.ones(1, 1, 8), torch.ones(1, 1, 2)),
    "conv2d": lambda: F.conv2d(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 2, 2)),
    "conv_transpose2d": lambda: F.conv_transpose2d(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 2, 2)),
    "softmax": lambda: torch.softmax(X, -1),
    "log_softmax": lambda: torch.log_softmax(X, -1),
    "layer_norm": lambda: F.layer_norm(X, (4,)),
    "group_norm": lambda: F.group_norm(X, 2),
    "nll_loss": lambda: F.nll_loss(X, torch.zeros(4, dtype=torch.int64)),
}
X = torch.ones(4, 4)


@pytest.mark.parametrize("outer", CALLS)
def test_the_ops_call_what_the_table_says(outer: str) -> None:
    with OpLog() as log:
        CALLS[outer]()
    ran = {op._schema.name.removeprefix("aten::") for op in log.ops}
    assert ran & {op for op, hiding in autocast._HIDDEN_BY.items() if outer in hiding}
