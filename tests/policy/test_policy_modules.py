"""`Policy` with module tables: its entries, equality, repr, differences, and round trips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import LEGAL, POLICIES, TORCH, WAYS, path, selected
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.module_tables import entries_of
from torch_promote.policy.op_table import TABLE_VERSION
from torch_promote.policy.policy import Policy

__all__ = ["path"]  # a fixture

LOWER, FP32 = CastPolicy.lower_precision_fp, CastPolicy.fp32
MINE = Policy.stock().override_modules({"head": "fp32", "blocks.*.attn": {"softmax.int": "fp16", "mm.default": "fp32"}})

# --- what a policy says


def test_tables_are_sorted_and_name_overloads() -> None:
    assert MINE.modules == (("blocks.*.attn", (("aten::mm", FP32), ("aten::softmax.int", LOWER))), ("head", "fp32"))
    assert MINE.changes == ()
    assert Policy.stock().modules == ()


def test_equal_by_effect_whatever_they_were_made_of() -> None:
    tables: dict[str, Any] = {
        "blocks.*.attn": {torch.ops.aten.mm.default: CastPolicy.fp32, "softmax.int": "lower_precision_fp"},
        "head": "fp32",
    }
    other = Policy.stock().override_modules(tables)
    assert (other, hash(other), repr(other)) == (MINE, hash(MINE), repr(MINE))
    assert Policy.stock() != MINE
    assert MINE.override_modules({"head": "off"}) != MINE


def test_repr_evaluates_to_the_policy() -> None:
    policy = Policy.named("cuda").override_modules({"head": "off"})
    assert repr(policy) == "Policy.named('cuda').override_modules({'head': 'off'})"
    assert repr(MINE) == (
        "Policy.stock().override_modules({'blocks.*.attn': {'aten::mm.default': 'fp32', 'aten::softmax.int': "
        "'lower_precision_fp'}, 'head': 'fp32'})"
    )
    assert eval(repr(MINE)) == MINE
    many = Policy.stock().override_modules({f"layer{index}": "fp32" for index in range(6)})
    assert repr(many).endswith("'layer3': 'fp32', ...})")


# --- laws

NAMES = st.one_of(
    st.sampled_from(["", "head", "blocks.*.attn", "**", "layer[01].x"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
TABLES = st.one_of(st.sampled_from(["fp32", "off"]), st.builds(lambda entry: dict([entry]), st.sampled_from(LEGAL)))
WITH_MODULES = st.builds(
    lambda policy, tables: policy.override_modules(tables), POLICIES, st.dictionaries(NAMES, TABLES, max_size=4)
)


@given(WITH_MODULES)
@settings(max_examples=60, deadline=None)
def test_it_comes_back_from_everything_that_it_is_turned_into(policy: Policy) -> None:
    for way in WAYS.values():
        copied = way(policy)
        assert (copied, hash(copied), repr(copied)) == (policy, hash(policy), repr(policy))
    assert "..." in repr(policy) or eval(repr(policy)) == policy


@given(st.dictionaries(NAMES, TABLES, max_size=4), st.dictionaries(NAMES, TABLES, max_size=4))
@settings(max_examples=20, deadline=None)
def test_an_override_says_what_the_later_table_says(first: dict[str, Any], second: dict[str, Any]) -> None:
    expected: dict[str, Any] = {}
    for tables in (first, second):
        for name, table in tables.items():
            if isinstance(table, str):
                expected[name] = table
                continue
            ops = {op: value for key, value in table.items() for op in selected(key, value)}
            known = expected.get(name)
            expected[name] = {**known, **ops} if isinstance(known, dict) else ops
    policy = Policy.stock().override_modules(first).override_modules(second)
    assert {name: table if isinstance(table, str) else dict(table) for name, table in policy.modules} == expected
    assert len(entries_of(policy.modules)) == sum(1 if isinstance(t, str) else len(t) for t in expected.values())


# --- files


def test_a_file_has_a_section_for_each_table(path: Any) -> None:
    MINE.override({"mm.default": "keep"}, "cpu").save(path)
    assert (
        path.read_text(encoding="utf-8")
        == f"""\
# A policy of torch_promote: where it differs from PyTorch's autocast. Policy.load() reads it.
format = 2
torch = "{TORCH}"
table = "{TABLE_VERSION}"

[cpu]
"aten::mm.default" = "keep"

[modules."blocks.*.attn"]
"aten::mm.default" = "fp32"
"aten::softmax.int" = "lower_precision_fp"

[modules."head"]
policy = "fp32"
"""
    )


#: The text of a file, below "format = 2", and what the error says.
WRONG: list[tuple[str, str]] = [
    ("[module.head]\npolicy = 'fp32'\n", "'module' is not a key of a policy. Closest: modules."),
    ("[modules.head]\n", '[modules."head"]: the table is empty. Add an op and its policy, or leave it out.'),
    ("[modules.head]\n'mm.out' = 'promot'\n", "[modules.\"head\"]: aten::mm.out: no cast policy is called 'promot'."),
    ("[modules.head]\n'mm.default' = 'fp32'\n'aten::mm.default' = 'keep'\n", "aten::mm gets two policies, 'fp32' from"),
    ("[modules.head]\npolicy = 'cuda'\n", "the policy of a whole module is 'fp32' or 'off', got 'cuda'."),
    ("[modules.head]\npolicy = 'fp32'\nmm = 'keep'\n", "is for the whole module, so the table can have no other key."),
    ("[modules.blocks.0]\nmm = 'keep'\n", 'Quote names that contain dots: [modules."blocks.0"], "softmax.int".'),
    ("torch = '9.5'\n[modules.head]\n'policy_tests::new' = 'fp32'\n", "It was written with torch 9.5, and this is"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_a_wrong_file(path: Any, text: str, message: str) -> None:
    path.write_text(f"format = 2\n{text}", encoding="utf-8")
    with pytest.raises(PolicyError) as error:
        Policy.load(path)
    assert message in str(error.value)


def test_tables_need_format_2(path: Any) -> None:
    path.write_text("format = 1\n[modules.head]\npolicy = 'fp32'\n", encoding="utf-8")
    with pytest.raises(PolicyError, match=r"\[modules\] is a section of format 2, got format = 1\. Write: format = 2"):
        Policy.load(path)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ("head", "tables of modules are a mapping of names to overrides, 'fp32' or 'off', got str."),
        ({torch.nn.Linear: "fp32"}, "To select by class, use set_module_policy."),
        ({"head": "fp23"}, "the policy of a whole module is 'fp32' or 'off', got 'fp23'. Closest: fp32."),
        ({"head": {}}, '[modules."head"]: the table is empty. Add an op and its policy, or leave it out.'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_tables(tables: Any, text: str) -> None:
    with pytest.raises(PolicyError) as error:
        Policy.stock().override_modules(tables)
    assert text in str(error.value)
