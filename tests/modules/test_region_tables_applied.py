"""Module tables of a policy: `Policy.apply_to`, and the errors if no model is given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.installed import nothing_installed
from helpers.module_policies import dtype_of, model_of
from helpers.region_tables import FP16, FP32, HALF, LOW, SINGLE, X, policy_of, region, state_of

__all__ = ["nothing_installed"]  # a fixture

# --- apply_to


def test_applied_to_a_model() -> None:
    model = model_of()
    before = state_of(model)
    handle = FP32.apply_to(model)
    assert dict(handle.modules) == {"2": "fp32"}
    assert repr(handle) == f"<{FP32!r} applied to 1 modules>"
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


def test_applied_to_several_models_twice() -> None:
    model, other = model_of(), model_of()
    with FP32.apply_to(model), FP32.apply_to(other), FP16.apply_to(model):
        with FP32.apply_to(model):
            pass
        with tp.my_autocast("cpu", policy=FP32):
            assert (model(X).dtype, other(X).dtype) == (SINGLE, SINGLE)
        with tp.my_autocast("cpu", policy=FP16):
            assert (model(X).dtype, other(X).dtype) == (HALF, LOW)
        with region(FP16, other):
            assert (model(X).dtype, other(X).dtype) == (LOW, HALF)


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


def test_a_default_whose_tables_are_no_longer_applied() -> None:
    model = model_of()
    with FP32.apply_to(model):
        before = tp.set_default_policy(FP32)
    try:
        assert dtype_of(model) is LOW
        tp.register_policy("relu", "fp32", device_type="cpu").remove()
    finally:
        tp.set_default_policy(before)


# --- errors

NO_MODEL = (
    "the policy has tables for modules ('2'), and no model to find them in. Legal: my_autocast(..., policy=policy, "
    "model=model); or call policy.apply_to(model) before, as for install, set_default_policy and policies of modules. "
    "To leave the tables out, use policy.without_modules()."
)
MANY = policy_of(dict.fromkeys("abcde", "fp32"))

ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no model": (lambda: tp.my_autocast("cpu", policy=FP32), tp.PolicyError, NO_MODEL),
    "no model, and overrides": (
        lambda: tp.my_autocast("cpu", policy=FP32, overrides={"mm": "fp32"}), tp.PolicyError, NO_MODEL,
    ),
    "many tables": (
        lambda: tp.my_autocast("cpu", policy=MANY),
        tp.PolicyError,
        NO_MODEL.replace("('2')", "('a', 'b', 'c' and 2 more)"),
    ),
    "install": (lambda: tp.install(policy=FP32), tp.PolicyError, NO_MODEL),
    "a default": (lambda: tp.set_default_policy(FP32), tp.PolicyError, NO_MODEL),
    "a module's policy": (
        lambda: tp.set_module_policy(model_of(), {"2": FP32}), tp.PolicyError, f"'2': {NO_MODEL}",
    ),
    "a model alone": (
        lambda: tp.my_autocast("cpu", model=model_of()),
        tp.errors.OptionError,
        "model names the modules that the tables of policy are for; got a model and no policy. Give both, or leave "
        "model out.",
    ),
    "no module": (
        lambda: region(FP32, model_of),  # type: ignore[arg-type]
        tp.errors.OptionError,
        f"model is an nn.Module, or None; got {model_of!r} of type function.",
    ),
    "a name that no module has": (
        lambda: region(policy_of({"haed": "fp32"}), nn.ModuleDict({"head": nn.Linear(2, 2)})),
        tp.PolicyError,
        "no module of the model is named 'haed'. Closest: head.",
    ),
    "apply_to: a pattern that matches nothing": (
        lambda: policy_of({"0": "fp32", "blocks.*": "fp32"}).apply_to(model_of()),
        tp.PolicyError,
        "no module of the model is named 'blocks.*'. In a pattern, * matches within one part of a name; ** matches any "
        "number of parts.",
    ),
    "apply_to: two patterns": (
        lambda: policy_of({"[02]": "fp32", "2*": "off"}).apply_to(model_of()),
        tp.PolicyError,
        "'2' gets two policies, off from '2*' and fp32 from '[02]'. Name the module itself, or change one of the two.",
    ),
    "apply_to: no tables": (
        lambda: tp.Policy.named("cuda").apply_to(model_of()),
        tp.PolicyError,
        "apply_to applies the tables of a policy to modules, and Policy.named('cuda') has none. Add some: "
        "policy.override_modules({name: overrides}).",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(("ask", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_bad_use(ask: Callable[[], Any], kind: type[Exception], text: str) -> None:
    before = tp.default_policy()
    with pytest.raises(kind) as error:
        ask()
    assert str(error.value) == text
    assert tp.installed() is None
    assert tp.default_policy() is before
