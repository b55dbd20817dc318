"""Advice about names that are close to those of ops, policies and dtypes, and spellings that can be used again."""

from __future__ import annotations

import pytest
import torch

import torch_promote as tp
from torch_promote.cli.policies import no_match


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("linalg.norm", "Write 'linalg_norm'."),
        ("special.erf", "Write 'special_erf'."),
        ("conv", "Closest: conv1d, conv2d, conv3d."),
        ("crossentropy", "Closest: cross_entropy_loss."),
        ("SDPA", "Closest: scaled_dot_product_attention."),
    ],
)
def test_an_op(name: str, advice: str) -> None:
    with pytest.raises(tp.PolicyError) as caught:
        tp.my_autocast("cpu", overrides={name: "fp32"})
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        ("none", "'fallthrough' leaves the op to the dtypes of its inputs; 'keep' runs it with autocast off."),
        ("f2", "Closest: float16."),
        ("f4", "Closest: float32."),
        ("i4", "int32 is not a floating dtype"),
        ("bfloat", "Closest: bfloat16."),
    ],
)
def test_a_policy(policy: str, advice: str) -> None:
    with pytest.raises(tp.PolicyError) as caught:
        tp.my_autocast("cpu", overrides={"mm": policy})
    assert advice in str(caught.value)
    assert "Closest: banned" not in str(caught.value)


@pytest.mark.parametrize(("name", "dtype"), [("f2", "float16"), ("i4", "int32"), ("bfloat", "bfloat16")])
def test_a_dtype(name: str, dtype: str) -> None:
    with pytest.raises(tp.DtypeError, match=f"Closest: {dtype}\\."):
        tp.my_autocast("cpu", dtype=name)


def test_a_module_in_place_of_an_op() -> None:
    assert "set_module_policy(model, {nn.LayerNorm" in str(no_match("LayerNorm"))
    assert "--import MODULE" in str(no_match("sofmax"))


@pytest.mark.parametrize("op", [torch.ops.aten.mm, torch.ops.aten.mm.default])
def test_a_repr_is_legal(op: object) -> None:
    region = tp.my_autocast("cpu", overrides={op: "fp32"})
    again = eval(repr(region), {"my_autocast": tp.my_autocast})
    assert repr(again) == repr(region)


def test_no_empty_table() -> None:
    assert "<table" not in tp.Policy.stock()._repr_html_()
