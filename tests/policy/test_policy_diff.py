"""What `Policy.diff` returns: a tuple that prints as a table, and what policies show in a notebook."""

from __future__ import annotations

import copy
import json
import pickle

from expecttest import assert_expected_inline

from torch_promote import CastPolicy, Policy
from torch_promote.policy.policy import Difference, PolicyDiff

MINE = (
    Policy.stock().override({"exp": "fp32", "gelu": "float64"}, device_type="cpu").override_modules({"<head>": "fp32"})
)


def test_it_is_a_tuple_of_differences() -> None:
    found = Policy.stock().override({"exp": "fp32"}, device_type="cpu").diff("stock")
    assert found == (Difference("aten::exp", "cpu", CastPolicy.fp32, CastPolicy.fallthrough), *found[1:])
    assert isinstance(found, tuple)
    assert {each.overload for each in found} >= {"aten::exp"}
    assert Policy.stock().diff("stock") == ()
    assert not Policy.stock().diff("stock")


def test_it_prints_as_a_table() -> None:
    assert_expected_inline(
        str(MINE.diff("stock")),
        """\
op      device              this policy  stock
exp     cpu                 fp32         fallthrough
gelu    cpu                 float64      -
policy  [modules."<head>"]  fp32         -""",
    )
    assert str(Policy.stock().diff("stock")) == "stock and stock are equal."


def test_its_repr_is_one_line() -> None:
    text = repr(Policy.named("cuda").diff("cpu"))
    assert text.startswith("<PolicyDiff between cuda and cpu: ")
    assert "\n" not in text


def test_copies_and_json() -> None:
    found = MINE.diff("stock")
    for again in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (again, again.names, type(again)) == (found, ("this policy", "stock"), PolicyDiff)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["policies"] == ["this policy", "stock"]
    assert {"op": "aten::gelu", "device": "cpu", "policies": ["float64", None]} in data["differences"]


def test_notebooks_get_escaped_tables() -> None:
    for text in (MINE._repr_html_(), MINE.diff("stock")._repr_html_()):
        assert "<td>gelu</td><td>cpu</td><td>float64</td>" in text
        assert "&lt;head&gt;" in text
        assert "<head>" not in text
    assert Policy.stock().diff("stock")._repr_html_() == "<p>stock and stock are equal.</p>"
    assert "Policy fp32_safe:" in Policy.named("fp32_safe")._repr_html_()
