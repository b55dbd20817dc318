"""The constructor of regions: positional arguments, defaults, warnings and errors of torch.autocast, and copies."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import KINDS, Region, leaves_no_trace, mm_dtype, seen

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


def test_no_cache_flag_means_the_one_in_force_where_the_region_is_made() -> None:
    with torch.autocast("cpu", cache_enabled=False):
        region = tp.my_autocast("cpu")
        with region:
            assert not torch.is_autocast_cache_enabled()
            with tp.my_autocast("cpu", cache_enabled=True):
                assert torch.is_autocast_cache_enabled()
            assert not torch.is_autocast_cache_enabled()
    with region:
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


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
SILENT = [("cuda", None, False), ("cuda", BF16, False), ("cpu", FP32, False), ("cpu",), ("cpu", FP16)]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("arguments", DISABLING, ids=str)
def test_what_stock_disables_with_a_warning_so_do_we(arguments: tuple[Any, ...]) -> None:
    (told, ours), (told_by_stock, stock) = (caught(partial(kind, *arguments)) for kind in KINDS.values())
    assert told == told_by_stock == [(UserWarning, __file__)]
    assert ours == stock
    assert not ours[arguments[0]]["enabled"]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("arguments", SILENT, ids=str)
def test_where_stock_is_silent_so_are_we(arguments: tuple[Any, ...]) -> None:
    (told, ours), (told_by_stock, stock) = (caught(partial(kind, *arguments)) for kind in KINDS.values())
    assert told == told_by_stock == []
    assert ours == stock


@pytest.mark.usefixtures("no_cuda")
def test_in_a_sequence_only_the_unavailable_device_is_disabled() -> None:
    told, view = caught(lambda: tp.my_autocast(["cpu", "cuda"]))
    assert told == [(UserWarning, __file__)]
    assert (view["cpu"]["enabled"], view["cuda"]["enabled"]) == (True, False)


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


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (tp.my_autocast("cpu"), "my_autocast('cpu')"),
        (tp.my_autocast("cpu", FP16), "my_autocast('cpu', dtype=torch.float16)"),
        (tp.my_autocast("cpu", None, False), "my_autocast('cpu', enabled=False)"),
        (tp.my_autocast("cpu", cache_enabled=False), "my_autocast('cpu', cache_enabled=False)"),
        (tp.my_autocast("cpu", cache_enabled=True), "my_autocast('cpu', cache_enabled=True)"),
        (tp.my_autocast(["cpu", "cuda"], enabled=False), "my_autocast(['cpu', 'cuda'], enabled=False)"),
        (
            tp.my_autocast("cpu", BF16, overrides={"mm": "fp16", torch.ops.aten.exp: FP32}),
            "my_autocast('cpu', dtype=torch.bfloat16, overrides={'mm': 'fp16', 'aten::exp': 'torch.float32'})",
        ),
        (
            tp.my_autocast("cpu", overrides={torch.ops.aten.softmax.int: tp.CastPolicy.keep}),
            "my_autocast('cpu', overrides={'aten::softmax.int': 'keep'})",
        ),
    ],
)
def test_repr(region: tp.my_autocast, text: str) -> None:
    assert repr(region) == text


def test_overrides_are_taken_when_the_region_is_made() -> None:
    overrides = {"mm": "fp32"}
    region = tp.my_autocast("cpu", overrides=overrides)
    text = repr(region)
    overrides.clear()
    assert repr(region) == text
    with copy.copy(region):
        assert mm_dtype() == FP32
