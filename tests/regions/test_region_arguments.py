"""The constructor of regions: positional arguments, defaults, warnings and errors of torch.autocast, and copies."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.checkpointing import KINDS as CHECKPOINT_KINDS
from helpers.checkpointing import Block, plainly, train
from helpers.comparison import assert_same
from helpers.probes import KINDS, Region, autocast_dtype, leaves_no_trace, mm_dtype, seen
from helpers.thread_state import thread_state
from torch_promote import _C
from torch_promote.integrations import checkpoint as _checkpoint

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

ARGUMENTS: list[tuple[Any, ...]] = [
    ("cpu",),
    ("cpu", FP16),
    ("cpu", None, True),
    ("cpu", FP16, False),
    ("cpu", None, False),
    ("cpu", BF16, True, False),
    ("cpu", BF16, True, True),
    ("cpu", FP16, True, None),
    ("cpu", FP32, False, False),
    ("cuda",),
    ("cuda", BF16),
    ("cuda", FP32),
    ("cuda", torch.float8_e4m3fn, False),
    ("cuda", None, False, False),
    ("cuda", FP16, True, False),
]

#: Regions around the place where a region is made, to whose state the defaults refer.
SURROUNDINGS: dict[str, tuple[Any, ...]] = {
    "outside": ("cpu", None, False),
    "fp16": ("cpu", FP16),
    "cache off": ("cpu", None, True, False),
    "cuda bf16": ("cuda", BF16),
}


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)


def parameters(kind: Callable[..., Region]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(kind.__init__).parameters.values()]


def test_the_parameters_are_stocks_and_only_the_device_type_has_a_default_besides() -> None:
    ours, stock = parameters(tp.my_autocast), parameters(torch.autocast)
    device_type, model, overrides, policy, cache = ours.pop(1), ours.pop(), ours.pop(), ours.pop(), ours.pop()
    assert stock.pop(1) == ("device_type", inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)
    assert device_type == ("device_type", inspect.Parameter.POSITIONAL_OR_KEYWORD, None)
    assert cache == ("cache", inspect.Parameter.KEYWORD_ONLY, None)
    assert policy == ("policy", inspect.Parameter.KEYWORD_ONLY, None)
    assert overrides == ("overrides", inspect.Parameter.KEYWORD_ONLY, None)
    assert model == ("model", inspect.Parameter.KEYWORD_ONLY, None)
    assert ours == stock


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_arguments_mean_what_they_mean_to_stock(arguments: tuple[Any, ...], around: str) -> None:
    views: dict[str, list[dict[str, Any]]] = {}
    for name, kind in KINDS.items():
        with torch.autocast(*SURROUNDINGS[around]):
            made_inside = kind(*arguments)
            with made_inside:
                views[name] = [seen()]
        with made_inside:  # defaults are read when a region is made
            views[name].append(seen())
    assert views["ours"] == views["stock"]


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize(("available", "device"), [(True, "cuda"), (False, "cpu")])
def test_without_a_device_type_it_is_cuda_if_available(
    available: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with tp.my_autocast(), tp.my_autocast(None):
        ours = seen()
    with tp.stock_autocast(device):
        assert ours == seen()


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("devices", [["cpu", "cuda"], ("cuda", "cpu"), ["cpu"], ("cuda",)], ids=str)
@pytest.mark.parametrize("dtype", [None, BF16, FP16], ids=str)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_sequence_of_device_types_is_a_region_of_each(devices: Any, dtype: torch.dtype | None, enabled: bool) -> None:
    with tp.stock_autocast(devices[0], dtype, enabled), tp.stock_autocast(devices[-1], dtype, enabled):
        stock = seen()
    with tp.my_autocast(devices, dtype, enabled):
        assert seen() == stock


# --- warnings


def caught(make: Callable[[], Region]) -> tuple[list[tuple[type[Warning], str]], dict[str, Any]]:
    """The warnings of constructing a region, as (category, file), and the state in it."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        region = make()
    with region:
        return [(record.category, record.filename) for record in records], seen()


DISABLING = [("cuda",), ("cuda", BF16), ("cuda", FP16, True, False), ("cpu", FP32), ("cpu", torch.float64)]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("arguments", DISABLING, ids=str)
def test_what_stock_disables_with_a_warning_so_do_we(arguments: tuple[Any, ...]) -> None:
    (told, ours), (told_by_stock, stock) = (caught(partial(kind, *arguments)) for kind in KINDS.values())
    assert told == told_by_stock == [(UserWarning, __file__)]
    assert ours == stock
    assert not ours[arguments[0]]["enabled"]


@pytest.mark.usefixtures("pretend_cuda")
def test_a_cuda_device_without_bfloat16_is_refused_where_stock_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: False)
    for kind in KINDS.values():
        with pytest.raises(RuntimeError, match="does not support bfloat16"), leaves_no_trace():
            kind("cuda", BF16)
        with kind("cuda"), kind("cuda", BF16, False):
            pass
    with pytest.raises(tp.errors.UnsupportedDeviceError), leaves_no_trace():
        tp.my_autocast(["cpu", "cuda"], BF16)


# --- copies


COPIES: dict[str, Callable[[Region], Region]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda region: pickle.loads(pickle.dumps(region)),
}
OVERRIDES: dict[str, dict[Any, Any]] = {
    "none": {},
    "name": {"mm": "fp32"},
    "overload": {torch.ops.aten.mm.default: FP32},
    "packet": {torch.ops.aten.mm: tp.CastPolicy.fp32},
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_a_copy_is_the_same_region(copied: Callable[[Any], Any], overrides: dict[Any, Any]) -> None:
    region = tp.my_autocast("cpu", FP16, True, False, overrides=overrides)
    other = copied(region)
    assert other is not region
    assert repr(other) == repr(region)
    with region:
        view = seen()
    with other:
        assert seen() == view
        assert mm_dtype() == (FP32 if overrides else FP16)
        with region:
            assert seen() == view
    assert mm_dtype() == FP32


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
BAD_OVERRIDES: list[tuple[Any, str]] = [
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
    (make_with_overrides, BAD_OVERRIDES, tp.PolicyError, ValueError),
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


def test_every_problem_of_overrides_is_found_before_anything_is_registered() -> None:
    """A good override before a bad one is not kept."""
    before = thread_state()
    with pytest.raises(tp.PolicyError):
        tp.my_autocast("cpu", overrides={"mm": "fp32", "nonsense": "fp32"})
    with tp.my_autocast("cpu"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    assert thread_state() == before


MODES = ("weights", "persistent", "all")
CACHES = (*MODES, "none")
LEGAL = "Legal: 'weights', 'persistent', 'all', 'none'."

ours = functools.partial(tp.my_autocast, "cpu")


def cache_seen() -> tuple[str, bool]:
    """The cache mode, and whether casts are reused at all."""
    return _C.cache_mode(), torch.is_autocast_cache_enabled()


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("device_type", ["cpu", "cuda", ["cpu", "cuda"]], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_what_is_given_is_in_force_inside(cache: str, device_type: Any) -> None:
    region = tp.my_autocast(device_type, cache=cache)
    assert cache_seen() == ("weights", True)
    with region:
        assert cache_seen() == (("weights", False) if cache == "none" else (cache, True))
    assert cache_seen() == ("weights", True)


# --- regions in regions


INNER: dict[str, tuple[Callable[[], Region], tuple[str, bool]]] = {
    "nothing said": (ours, ("all", True)),
    "weights": (functools.partial(ours, cache="weights"), ("weights", True)),
    "persistent": (functools.partial(ours, cache="persistent"), ("persistent", True)),
    "none": (functools.partial(ours, cache="none"), ("all", False)),
    "cache_enabled=False": (functools.partial(ours, cache_enabled=False), ("all", False)),
    "overrides": (functools.partial(ours, overrides={"mm": "fp32"}), ("all", True)),
    "disabled": (functools.partial(ours, enabled=False), ("all", True)),
    "stock": (functools.partial(torch.autocast, "cpu"), ("all", True)),
}


@pytest.mark.parametrize(("inner", "expected"), INNER.values(), ids=INNER)
def test_the_default_is_the_mode_of_the_surrounding_region(
    inner: Callable[[], Region], expected: tuple[str, bool]
) -> None:
    made_outside = inner()
    with ours(cache="all"):
        for region in (inner(), made_outside):
            with region:
                assert cache_seen() == expected
                with ours(cache_enabled=True):
                    assert cache_seen() == (expected[0], True)
            assert cache_seen() == ("all", True)
    with made_outside, leaves_no_trace():
        assert cache_seen()[0] == (expected[0] if expected[0] != "all" else "weights")


OVERLAPPING: dict[str, dict[str, Any]] = {"a": {"cache": "all"}, "b": {}, "c": {"cache": "persistent"}, "d": {}}


@pytest.mark.parametrize("left", list(itertools.permutations(OVERLAPPING)), ids="".join)
def test_regions_left_in_any_order(left: tuple[str, ...]) -> None:
    def view_in(names: list[str]) -> tuple[str, bool]:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(ours(**OVERLAPPING[name]))
            return cache_seen()

    for entered in itertools.permutations(OVERLAPPING):
        regions = {name: ours(**arguments) for name, arguments in OVERLAPPING.items()}
        with leaves_no_trace():
            expected = [view_in([name for name in entered if name not in left[:n]]) for n in range(5)]
            for name in entered:
                regions[name].__enter__()
            found = [cache_seen()]
            for name in left:
                regions[name].__exit__(None, None, None)
                found.append(cache_seen())
        assert found == expected, f"entered as {entered}"


# --- copies, text, refusals


UNKNOWN: list[tuple[Any, str]] = [
    ("al", f"'al'. {LEGAL} Closest: all."),
    ("weight", f"'weight'. {LEGAL} Closest: weights."),
    ("", f"''. {LEGAL}"),
    (True, f"True of type bool. {LEGAL}"),
    (0, f"0 of type int. {LEGAL}"),
    (["all"], f"['all'] of type list. {LEGAL}"),
]


@pytest.mark.parametrize(("cache", "told"), UNKNOWN, ids=repr)
def test_an_invalid_cache_mode_is_an_error(cache: Any, told: str) -> None:
    with leaves_no_trace(), pytest.raises(tp.errors.OptionError) as caught:
        ours(cache=cache)
    assert str(caught.value) == f"cache says which casts are reused: a str, or None; got {told}"
    assert isinstance(caught.value, ValueError)


# --- checkpointing


class Watched(Block):
    """A block that records the cache mode of each of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[str, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(cache_seen())
        return super().forward(x)


@CHECKPOINT_KINDS
@pytest.mark.parametrize("overrides", [None, {"linear": "fp32"}], ids=str)
@pytest.mark.parametrize("cache", MODES)
@pytest.mark.parametrize("around_backward", [None, *CACHES])
def test_a_recomputation_has_the_mode_of_its_forward(
    use_reentrant: bool, overrides: Any, cache: str, around_backward: str | None
) -> None:
    _checkpoint.install()
    model = Watched()
    same_model = copy.deepcopy(model)
    around = functools.partial(ours, overrides=overrides, cache=cache)
    backward = functools.partial(ours, cache=around_backward)
    call = functools.partial(checkpoint, use_reentrant=use_reentrant)
    with leaves_no_trace():
        found = train(call, around, backward, model)
    assert model.modes == [(cache, True)] * 2
    assert_same(found, train(plainly, around, backward, same_model))
