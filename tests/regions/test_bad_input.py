"""Invalid arguments of a region: the error's type, its exact text, and unchanged state."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import autocast_dtype, leaves_no_trace
from helpers.thread_state import thread_state

NAMED = (
    "Ops are named as in torch.ops or in Python: 'softmax', 'aten::softmax.int', 'mylib::op', 'F.softmax', torch.mm."
)
NOT_AN_OP = "expected the name of an op, an op object or a function of PyTorch, got "

aten = torch.ops.aten

POLICIES = (
    "lower_precision_fp (or lower, or fp16: all three mean the region's dtype), fp32, fp32_set_opt_dtype, "
    "fp32_append_dtype, promote, match_self, fallthrough, keep, banned or a floating dtype, such as float16."
)
POLICIES_OF_MM = "lower_precision_fp, fp32, promote, fallthrough, keep, banned or a floating dtype."

DEVICE_TYPES: list[tuple[Any, str]] = [
    (
        torch.device("cpu"),
        "expected a device type of type str (or a sequence of them), got device(type='cpu') of type device. "
        "Legal: 'cpu', 'cuda'. For a torch.device, pass `.type`.",
    ),
    (0, "expected a device type of type str (or a sequence of them), got 0 of type int. Legal: 'cpu', 'cuda'."),
    (1.5, "expected a device type of type str (or a sequence of them), got 1.5 of type float. Legal: 'cpu', 'cuda'."),
    (
        {"cpu"},
        "expected a device type of type str (or a sequence of them), got {'cpu'} of type set. Legal: 'cpu', 'cuda'.",
    ),
    (["cpu", 0], "expected a device type of type str, got 0 of type int. Legal: 'cpu', 'cuda'."),
    ((None,), "expected a device type of type str, got None of type NoneType. Legal: 'cpu', 'cuda'."),
    ([], "no device type given: the sequence is empty. Name 'cpu', 'cuda' or both."),
    ((), "no device type given: the sequence is empty. Name 'cpu', 'cuda' or both."),
    (["cpu", "cpu"], "device type 'cpu' is named twice in ['cpu', 'cpu']. Name each once."),
    (("cuda", "cpu", "cuda"), "device type 'cuda' is named twice in ['cuda', 'cpu', 'cuda']. Name each once."),
]

UNSUPPORTED: list[tuple[Any, str]] = [
    (
        "mps",
        "my_autocast has no device type 'mps'. Legal: 'cpu', 'cuda'. torch.autocast('mps') serves that device type.",
    ),
    (
        "xpu",
        "my_autocast has no device type 'xpu'. Legal: 'cpu', 'cuda'. torch.autocast('xpu') serves that device type.",
    ),
    (
        ["cpu", "xpu"],
        "my_autocast has no device type 'xpu'. Legal: 'cpu', 'cuda'. torch.autocast('xpu') serves that device type.",
    ),
    ("cuda:0", "my_autocast has no device type 'cuda:0'. Legal: 'cpu', 'cuda'. Give the type without an index."),
    ("cpu:0", "my_autocast has no device type 'cpu:0'. Legal: 'cpu', 'cuda'. Give the type without an index."),
    ("vulkan", "my_autocast has no device type 'vulkan'. Legal: 'cpu', 'cuda'."),
    ("meta", "my_autocast has no device type 'meta'. Legal: 'cpu', 'cuda'."),
    ("cdua", "my_autocast has no device type 'cdua'. Legal: 'cpu', 'cuda'. Closest: cuda."),
    ("gpu", "my_autocast has no device type 'gpu'. Legal: 'cpu', 'cuda'. The device type of GPUs is 'cuda'."),
    ("", "my_autocast has no device type ''. Legal: 'cpu', 'cuda'."),
]

DTYPES: list[tuple[Any, str]] = [
    (
        torch.int8,
        "torch.int8 is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16.",
    ),
    (
        torch.bool,
        "torch.bool is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16.",
    ),
    (
        torch.complex64,
        "torch.complex64 is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16.",
    ),
    (
        "bfloat61",
        "dtype 'bfloat61' is not the name of a dtype. Closest: bfloat16. Names are those of PyTorch, such as "
        "'bfloat16' or 'torch.bfloat16', and 'bf16', 'fp16', 'fp32', 'fp64'.",
    ),
    ("int8", "torch.int8 is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16."),
    (float, "dtype is a torch.dtype, such as torch.bfloat16, its name, or None; got <class 'float'> of type type."),
    (16, "dtype is a torch.dtype, such as torch.bfloat16, its name, or None; got 16 of type int."),
    (True, "dtype is a torch.dtype, such as torch.bfloat16, its name, or None; got True of type bool."),
]

# What else can be wrong with an op or a policy: tests/policy/test_policy_overrides.py.
OVERRIDES: list[tuple[Any, str]] = [
    (
        {"sofmax": "fp16"},
        f"no op is called 'sofmax'. Closest: softmax. {NAMED}",
    ),
    (
        {"zzz::mm": "fp16"},
        "no op is registered in namespace 'zzz'. Import the library that defines 'zzz::mm' first.",
    ),
    ({3: "fp16"}, f"{NOT_AN_OP}3. {NAMED}"),
    ({("mm",): "fp16"}, f"{NOT_AN_OP}('mm',). {NAMED}"),
    ({"mm": "fp61"}, f"'mm': no cast policy is called 'fp61'. Closest: fp16 (the region's dtype). Legal: {POLICIES}"),
    ({"mm.default": None}, f"aten::mm: a policy is a str, a CastPolicy or a torch.dtype, got None. Legal: {POLICIES}"),
    (
        {"mm.default": torch.int32},
        f"aten::mm: torch.int32 is not a floating dtype. Legal: {POLICIES}",
    ),
    (
        {"exp": "fp16", "mm.default": "fp32_set_opt_dtype"},
        f"aten::mm cannot use 'fp32_set_opt_dtype': its schema has no optional dtype argument. Legal: {POLICIES_OF_MM}",
    ),
    (
        {"mm.out": "fp16"},
        "aten::mm.out cannot use 'lower_precision_fp': it writes to an argument, and autocast never casts that "
        "argument. Legal: match_self, fallthrough, keep, banned.",
    ),
    # conflicts
    (
        {"softmax": "fp16", "softmax.int": "fp32"},
        "aten::softmax.int gets two policies, 'lower_precision_fp' from 'softmax' and 'fp32' from 'softmax.int'. "
        "Name each overload once.",
    ),
    (
        {"mm": "fp32", aten.mm: torch.float32},
        "aten::mm gets two policies, 'fp32' from 'mm' and 'float32' from 'aten::mm'. Name each overload once.",
    ),
    # not a mapping
    (["mm"], "overrides must be a mapping of ops to policies, got list."),
    ("mm", "overrides must be a mapping of ops to policies, got str."),
    (5, "overrides must be a mapping of ops to policies, got int."),
    ([], "overrides must be a mapping of ops to policies, got list."),
    (0, "overrides must be a mapping of ops to policies, got int."),
]

NOT_CALLABLE: list[tuple[Any, str]] = [
    (3, "int"),
    (None, "NoneType"),
    ("f", "str"),
    ([], "list"),
    (classmethod(len), "classmethod"),
]
DECORATED: list[tuple[Any, str]] = [
    (
        given,
        f"my_autocast(...) decorates a callable, got {kind}. Decorate a function, or use it as a context manager: "
        "`with my_autocast(...):`.",
    )
    for given, kind in NOT_CALLABLE
]


def make_for(device_type: Any) -> object:
    return tp.my_autocast(device_type)


def make_with_dtype(dtype: Any) -> object:
    return tp.my_autocast("cpu", dtype)


def make_with_overrides(overrides: Any) -> object:
    return tp.my_autocast("cpu", overrides=overrides)


def decorate(function: Any) -> object:
    return tp.my_autocast("cpu")(function)


Case = tuple[Callable[[Any], object], Any, type[tp.TorchPromoteError], type[Exception], str]
TABLES: list[tuple[Callable[[Any], object], list[tuple[Any, str]], type[tp.TorchPromoteError], type[Exception]]] = [
    (make_for, DEVICE_TYPES, tp.errors.DeviceTypeError, ValueError),
    (make_for, UNSUPPORTED, tp.errors.UnsupportedDeviceError, RuntimeError),
    (make_with_dtype, DTYPES, tp.errors.DtypeError, TypeError),
    (make_with_overrides, OVERRIDES, tp.PolicyError, ValueError),
    (decorate, DECORATED, tp.errors.DecoratorError, TypeError),
]
CASES: dict[str, Case] = {
    f"{ask.__name__} {given!r}": (ask, given, kind, builtin, text)
    for ask, table, kind, builtin in TABLES
    for given, text in table
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input(case: Case) -> None:
    ask, given, kind, builtin, text = case
    with leaves_no_trace(), pytest.raises(kind) as error:
        ask(given)
    assert str(error.value) == text
    assert type(error.value) is kind
    assert isinstance(error.value, builtin), "so that code written for torch.autocast catches it"
    with tp.my_autocast("cpu", torch.float16), leaves_no_trace():
        with pytest.raises(kind):
            ask(given)
        assert autocast_dtype() == torch.float16


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((torch.device("cpu"),), ValueError),
        ((0,), ValueError),
        ((["cpu"],), None),
        (("vulkan",), RuntimeError),
        (("gpu",), RuntimeError),
    ],
    ids=str,
)
def test_where_stock_refuses_it_raises_the_same_builtin(
    arguments: tuple[Any, ...], kind: type[Exception] | None
) -> None:
    """A list of device types is the one that stock refuses and that we accept."""
    with pytest.raises(kind or ValueError):
        torch.autocast(*arguments)
    if kind is not None:
        with pytest.raises(kind):
            tp.my_autocast(*arguments)


def test_a_disabled_region_is_checked_too() -> None:
    for device_type, dtype in (("cuda:0", None), ("cpu", torch.int8), (["cpu", "cpu"], None)):
        with pytest.raises(tp.TorchPromoteError):
            tp.my_autocast(device_type, dtype, enabled=False)


def test_every_problem_of_overrides_is_found_before_anything_is_registered() -> None:
    """A good override before a bad one is not kept."""
    before = thread_state()
    with pytest.raises(tp.PolicyError):
        tp.my_autocast("cpu", overrides={"mm": "fp32", "nonsense": "fp32"})
    with tp.my_autocast("cpu"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    assert thread_state() == before


def test_leaving_a_region_that_is_not_open() -> None:
    region = tp.my_autocast("cpu", torch.float16)
    with leaves_no_trace(), pytest.raises(tp.errors.RegionError) as error:
        region.__exit__(None, None, None)
    assert isinstance(error.value, RuntimeError)
    assert str(error.value) == (
        "my_autocast('cpu', dtype=torch.float16) is not open in this thread, so it cannot be ended here. A region "
        "belongs to the thread that entered it; enter one in each thread."
    )


@pytest.mark.parametrize(
    "arguments", [{"device": "cpu"}, {"device_type": "cpu", "policy_overrides": {}}, {"weights_only": True}], ids=str
)
def test_an_argument_that_does_not_exist(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=re.escape(list(arguments)[-1])):
        tp.my_autocast(**arguments)
    with pytest.raises(TypeError):
        tp.my_autocast("cpu", None, True, None, {})  # type: ignore[call-arg]  # overrides are named
