"""The constructor of regions: arguments, defaults, warnings and errors of torch.autocast, and copies."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.checkpointing import KINDS as CHECKPOINT_KINDS
from helpers.checkpointing import Block, plainly, train
from helpers.comparison import assert_same
from helpers.probes import KINDS, Region, autocast_dtype, in_thread, leaves_no_trace, mm_dtype, seen
from torch_promote import _C, errors
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.parity.model import pretend_cuda
from torch_promote.regions import autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ours = functools.partial(tp.my_autocast, "cpu")

ARGUMENTS: list[tuple[Any, ...]] = [
    ("cpu",),
    ("cpu", FP16),
    ("cpu", None, True),
    ("cpu", FP16, False),
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


#: PyTorch's own function, which asks `torch.cuda.is_available`.
NOT_AVAILABLE = torch.cuda.amp.common.amp_definitely_not_available


@contextmanager
def cuda_answers(is_bf16_supported: bool = True, is_available: bool = True) -> Iterator[None]:
    """Replaces the functions of torch.cuda that "cuda" regions of ours and of stock call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: is_available)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: not is_available)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: is_bf16_supported)
        yield


def test_the_parameters_are_stocks_and_only_the_device_type_has_a_default_besides() -> None:
    ours, stock = (list(inspect.signature(kind).parameters.values()) for kind in (tp.my_autocast, torch.autocast))
    assert [p.name for p in ours[4:] if p.kind is p.KEYWORD_ONLY and p.default is None] == [
        "cache", "policy", "overrides", "model",
    ]  # fmt: skip
    assert [(p.name, p.kind) for p in ours[:4]] == [(p.name, p.kind) for p in stock]
    assert [p.default for p in ours[:4]] == [None, *(p.default for p in stock[1:])]


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


def caught(make: Callable[[], Region]) -> tuple[list[tuple[type[Warning], str]], dict[str, Any]]:
    """The warnings of constructing a region, as (category, file), and the state in it."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        region = make()
    with region:
        return [(record.category, record.filename) for record in records], seen()


DISABLING = [("cuda",), ("cuda", BF16), ("cuda", FP16, True, False), ("cpu", FP32), ("cpu", torch.float64)]


@pytest.mark.parametrize("arguments", DISABLING, ids=str)
def test_what_stock_disables_with_a_warning_so_do_we(arguments: tuple[Any, ...]) -> None:
    with cuda_answers(is_available=False):
        (told, ours), (told_by_stock, stock) = (caught(partial(kind, *arguments)) for kind in KINDS.values())
    assert told == told_by_stock == [(UserWarning, __file__)]
    assert ours == stock
    assert not ours[arguments[0]]["enabled"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_region_asks_whether_cuda_is_there(kind: Any) -> None:
    """Also where a program replaces `torch.cuda.is_available` after its first region, as tests without a GPU do."""
    with cuda_answers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", NOT_AVAILABLE)
        kind("cuda", FP16)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        (told, _) = caught(partial(kind, "cuda", FP16))
    assert told == [(UserWarning, __file__)]


@pytest.mark.usefixtures("pretend_cuda")
def test_a_cuda_device_without_bfloat16_is_refused_where_stock_refuses() -> None:
    with cuda_answers(is_bf16_supported=False):
        for kind in KINDS.values():
            with pytest.raises(RuntimeError, match="does not support bfloat16"), leaves_no_trace():
                kind("cuda", BF16)
            with kind("cuda"), kind("cuda", BF16, False):
                pass
        with pytest.raises(errors.UnsupportedDeviceError), leaves_no_trace():
            tp.my_autocast(["cpu", "cuda"], BF16)


# --- the path in C for plain arguments, and the one in Python for all

POSITIONAL: list[tuple[Any, ...]] = [
    (),
    ("cpu",),
    (type("Text", (str,), {})("cpu"),),
    (["cpu"],),
    ("cpu", FP16, False),
    ("cpu", None, True, None),
    ("cpu", None, 0, 1),
    ("cpu", None, None),
    ("cpu", None, True, "yes"),
    ("cpu", torch.int8),
    ("cpu", "bfloat16"),
    ("cpu", None, True, None, None),
    ("cuda", BF16),
    ("cuda", FP16, False, False),
    ("cuda", FP32),
    ("xpu",),
    (torch.device("cpu"),),
]
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"device_type": "cpu"},
    {"cache_enabled": None, "enabled": True, "dtype": None},
    {"device_type": "cpu", "dtype": BF16, "enabled": True, "cache_enabled": True},
    {"".join(["dty", "pe"]): FP16},
    {"cache": "".join(["persist", "ent"])},
    {"cache": "weights", "dtype": FP16},
    {"cache": "none", "cache_enabled": True},
    {"cache": "most"},
    {"policy": "cuda"},
    {"overrides": {"mm": "fp32"}},
    {"dtypes": FP16},
]
AROUND: dict[str, Callable[[], Any]] = {
    "outside": ExitStack,
    "fp16": lambda: tp.my_autocast("cpu", FP16),
    "cache off": lambda: torch.autocast("cpu", cache_enabled=False),
    "cuda": pretend_cuda,
    "cuda without bfloat16": lambda: cuda_answers(is_bf16_supported=False),
}


def outcome(make: Callable[[], tp.my_autocast]) -> Any:
    """The settings of a region, or the error of constructing it."""
    try:
        region = make()
    except Exception as error:
        return type(error), str(error)
    return type(region), region._packed, autocast._Arguments(*region._arguments), repr(region)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_is_made_is_what_python_makes(around: Callable[[], Any]) -> None:
    in_python = partial(mock.patch.object, autocast, "pack_plain_region", return_value=None)
    with warnings.catch_warnings(), around(), leaves_no_trace():
        warnings.simplefilter("ignore")
        for args, kwargs in itertools.product(POSITIONAL, KEYWORDS):
            make, by_init = (partial(call, *args, **kwargs) for call in (tp.my_autocast, CALLED_AS_OTHER_CLASSES))
            with in_python():
                expected = outcome(by_init)
            assert outcome(by_init) == expected
            assert [outcome(make) for _ in range(2)] == [expected] * 2, f"my_autocast(*{args}, **{kwargs})"


#: Calls `__init__`, which a call of the class does for regions that are not plain.
CALLED_AS_OTHER_CLASSES = partial(type.__call__, tp.my_autocast)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: tp.my_autocast("cpu"), 0),
        (lambda: tp.my_autocast("cpu", dtype=BF16), 0),
        (lambda: tp.my_autocast(device_type="cpu", dtype=FP16, enabled=False, cache_enabled=True), 0),
        (lambda: CALLED_AS_OTHER_CLASSES("cpu", dtype=BF16), 1),
        (lambda: Derived("cpu", dtype=BF16), 2),
    ],
)
def test_a_plain_region_runs_no_python(make: Callable[[], tp.my_autocast], expected: int) -> None:
    called: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    make()
    sys.setprofile(profile)
    try:
        make()
    finally:
        sys.setprofile(None)
    assert len(called) - 1 == expected  # the lambda


class Derived(tp.my_autocast):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


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


# --- errors. What can be wrong with an op or a policy: tests/policy/test_policy_overrides.py.


#: Calls of my_autocast, to be made in the test.
ask = partial(partial, tp.my_autocast)
DEVICE, UNSUPPORTED, DTYPE = errors.DeviceTypeError, errors.UnsupportedDeviceError, errors.DtypeError
NOT_FLOATING = "torch.int8 is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16."
FLOAT8_REMEDY = "Float8 with scales is a policy of linear: overrides={'linear': 'float8'}."
LEGAL = "Legal: 'cpu', 'cuda', 'xpu', 'mps'."
#: What is called, the error, and a part of its text.
ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (ask(torch.device("cpu")), DEVICE, f"of type device. {LEGAL} For a torch.device, pass `.type`."),
    (ask(0), DEVICE, f"expected a device type of type str (or a sequence of them), got 0 of type int. {LEGAL}"),
    (ask(len), DEVICE, "As a decorator, write it with parentheses: @my_autocast()."),
    (ask(("cpu", 0)), DEVICE, f"expected a device type of type str, got 0 of type int. {LEGAL}"),
    (ask(()), DEVICE, f"no device type given: the sequence is empty. {LEGAL}"),
    (ask(("cuda", "cpu", "cuda")), DEVICE, "device type 'cuda' is named twice in ['cuda', 'cpu', 'cuda']. Name each"),
    (ask("hpu"), UNSUPPORTED, f"no device type 'hpu'. {LEGAL} torch.autocast('hpu') serves that device type."),
    (ask(("cpu", "mtia")), UNSUPPORTED, f"no device type 'mtia'. {LEGAL} torch.autocast('mtia') serves that device"),
    (ask("cuda:0"), UNSUPPORTED, f"no device type 'cuda:0'. {LEGAL} Give the type without an index."),
    (ask("meta"), UNSUPPORTED, f"no device type 'meta'. {LEGAL}"),
    (ask("cdua"), UNSUPPORTED, f"no device type 'cdua'. {LEGAL} Closest: cuda."),
    (ask("MPS"), UNSUPPORTED, f"no device type 'MPS'. {LEGAL} Closest: mps."),
    (ask("gpu"), UNSUPPORTED, f"no device type 'gpu'. {LEGAL} The device types of GPUs are 'cuda' (also"),
    (ask("cpu", torch.int8), DTYPE, NOT_FLOATING),
    (ask("cpu", "int8"), DTYPE, NOT_FLOATING),
    (ask("cpu", "bfloat"), DTYPE, "dtype 'bfloat' is not the name of a dtype. Closest: bfloat16. Names are"),
    (ask("cpu", float), DTYPE, "dtype is a torch.dtype, such as torch.bfloat16, its name, or None; got <class"),
    *(
        (ask("cpu", name), DTYPE, f"dtype {name!r} is not the name of a dtype that autocast casts to. {FLOAT8_REMEDY}")
        for name in ("float8", "fp8", "float8:rowwise", "mxfp8")
    ),
    (ask("cpu", overrides="mm"), tp.PolicyError, "overrides must be a mapping of ops to policies, got str."),
    (ask("cpu", overrides={"mm": "fp16", "nonsense": "fp32"}), tp.PolicyError, "'nonsense'"),
    *(
        (
            ask("cpu", cache=cache, cache_enabled="no"),
            errors.FlagError,
            "cache_enabled is a bool, got 'no' of type",
        )
        for cache in ("none", "weights", "persistent", "all")
    ),
    (
        ask("cpu", cache="al"),
        errors.OptionError,
        "got 'al'. Legal: 'weights', 'persistent', 'all', 'none'. Closest: all.",
    ),
    (ask("cpu", cache=True), errors.OptionError, "got True of type bool. Legal: 'weights',"),
    (
        lambda: ours()(3),
        errors.DecoratorError,
        "decorates a callable, got int. Decorate a function, or use it as a context",
    ),
    (lambda: ours()(classmethod(len)), errors.DecoratorError, "got classmethod. "),
    (
        lambda: ours()(torch.nn.Linear),
        errors.DecoratorError,
        "cannot decorate the class Linear: the region would be around its construction alone, and the class would "
        "become a function. Decorate its methods, such as forward.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS)
def test_bad_input(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    for around in (False, True):
        with tp.my_autocast("cpu", FP16, enabled=around), leaves_no_trace():
            with pytest.raises(kind) as error:
                call()
            assert text in str(error.value)
            assert "\n" not in str(error.value)
            assert type(error.value) is kind
            assert autocast_dtype() == (FP16 if around else None)


class Flag(int):
    """Looks like a bool, as numpy.bool does, and is none."""


NO_BOOLS: list[Any] = ["False", "no", "", 0, 1, 1.0, None, [], [0], Flag(1), torch.tensor(True), object()]
#: Other functions with an argument that is a bool.
FLAGS: dict[str, Callable[[Any], Any]] = {
    "check_casts(enabled)": lambda value: tp.check_casts(value),
    "compare(gradients)": lambda value: tp.compare(print, model=MODEL, gradients=value),
    "compare(progress)": lambda value: tp.compare(print, model=MODEL, progress=value),
    "crosscheck(raise_on_mismatch)": lambda value: tp.crosscheck(raise_on_mismatch=value),
    "find_nonfinite(raise_at_first)": lambda value: tp.find_nonfinite(raise_at_first=value).__enter__(),
    "promotion(matmul)": lambda value: tp.promotion("jax", matmul=value),
    "register_policy(replace)": lambda value: tp.register_policy("relu", "fp32", replace=value),
    "trace(values)": lambda value: tp.trace(values=value).__enter__(),
    "tune(progress)": lambda value: tp.tune(print, model=MODEL, tolerance=1e-3, progress=value),
}
MODEL = torch.nn.Linear(1, 1)


def no_bool(name: str, value: Any) -> str:
    """The end of the error for a value that is no bool."""
    remedy = "Compare the str with the words that mean True." if isinstance(value, str) else f"Pass bool({name})."
    return f"{name} is a bool, got {errors.shown(value)} of type {type(value).__name__}. Legal: True, False. {remedy}"


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("value", NO_BOOLS, ids=lambda value: type(value).__name__ + str(value)[:5])
@pytest.mark.parametrize("name", ["enabled", "cache_enabled"])
def test_flags_of_a_region_are_bools_as_stocks_are(name: str, value: Any) -> None:
    """Stock raises when the region is entered, with half of its state changed; ours when it is made."""

    def enter(kind: Any) -> str | None:
        with kind("cpu", **{name: value}):
            return None

    # In a thread of its own, because of the state that stock leaves.
    of_stock = in_thread(lambda: error_of(partial(enter, torch.autocast)))
    with leaves_no_trace():
        found = [error_of(partial(tp.my_autocast, devices, **{name: value})) for devices in ("cpu", ["cpu", "cuda"])]
    if name == "cache_enabled" and value is None:
        assert [of_stock, *found] == [None] * 3
        return
    assert type(of_stock) is TypeError
    for error in found:
        assert type(error) is errors.FlagError
        assert isinstance(error, TypeError)
        assert str(error) == no_bool(name, value)


def test_what_stock_disables_before_it_looks_at_the_flag() -> None:
    for arguments in (("cuda", FP16, 1), ("cpu", FP32, "yes")):
        with cuda_answers(is_available=False):
            for kind in KINDS.values():
                with pytest.warns(UserWarning, match="[Dd]isabl"), kind(*arguments):
                    assert not torch.is_autocast_enabled(arguments[0])


@pytest.mark.parametrize("value", ["False", 0, 1, None], ids=repr)
@pytest.mark.parametrize("called", FLAGS)
def test_other_flags_are_bools(called: str, value: Any) -> None:
    with pytest.raises(errors.FlagError) as error, leaves_no_trace():
        FLAGS[called](value)
    assert str(error.value) == no_bool(called.partition("(")[2][:-1], value)


EIGHT_BITS = [
    dtype
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
                 "float4_e2m1fn_x2")
    if (dtype := getattr(torch, name, None)) is not None
]  # fmt: skip


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda", ["cpu", "cuda"]], ids=str)
def test_a_region_does_not_cast_to_a_dtype_that_needs_a_scale(device: Any, dtype: torch.dtype) -> None:
    for given in (dtype, str(dtype), str(dtype).removeprefix("torch.")):
        with pytest.raises(errors.DtypeError) as error, leaves_no_trace():
            tp.my_autocast(device, given)
        assert str(error.value) == (
            f"{dtype} needs a scale for each tensor, and autocast casts without one, so values out of its range would "
            f"be lost. Use torch.bfloat16 or torch.float16. {FLOAT8_REMEDY}"
        )
    for ask in (
        partial(tp.tune, print, model=MODEL, tolerance=1e-3, dtype=dtype),
        partial(tp.why, "F.linear(f4[2, 3], f4[4, 3])", autocast="cuda", dtype=dtype),
    ):
        with pytest.raises(
            errors.DtypeError, match=f"{dtype} needs a scale for each tensor, and autocast casts without"
        ):
            ask()
    with tp.my_autocast(device, dtype, enabled=False):
        pass  # nothing is cast


@pytest.mark.parametrize("argument", [torch.device("cpu"), 0, "vulkan", "gpu"], ids=str)
def test_where_stock_refuses_it_raises_the_same_builtin(argument: Any) -> None:
    with pytest.raises((ValueError, RuntimeError)) as stock:
        torch.autocast(argument)
    with pytest.raises(stock.type):
        tp.my_autocast(argument)


# --- cache modes

MODES = ("weights", "persistent", "all")
CACHES = (*MODES, "none")


def cache_seen() -> tuple[str, bool]:
    """The cache mode, and whether casts are reused at all."""
    return _C.cache_mode(), torch.is_autocast_cache_enabled()


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
    around = partial(ours, overrides=overrides, cache=cache)
    backward = partial(ours, cache=around_backward)
    with leaves_no_trace():
        found = train(partial(checkpoint, use_reentrant=use_reentrant), around, backward, model)
    assert model.modes == [(cache, True)] * 2
    assert_same(found, train(plainly, around, backward, same_model))
