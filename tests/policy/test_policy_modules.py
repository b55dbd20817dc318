"""`Policy` with module tables: its entries, equality, repr, differences, and round trips."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.library_for_policies import NAMESPACE
from helpers.policies import KEYS, LEGAL, POLICIES, TEXT, TORCH, VALUES, WAYS, path, selected
from helpers.policy_errors import LEGAL_WRITING, NAMED, WRITES
from helpers.policy_errors import POLICIES as POLICIES_TEXT
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.module_tables import entries_of
from torch_promote.policy.op_table import TABLE_VERSION
from torch_promote.policy.policy import Difference, Policy

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


def test_tables_add_up_op_by_op_and_the_later_wins() -> None:
    policy = MINE.override_modules({"blocks.*.attn": {"mm.default": "keep", "bmm.default": "fp32"}, "head": "off"})
    assert dict(policy.modules) == {
        "blocks.*.attn": (("aten::bmm", FP32), ("aten::mm", CastPolicy.keep), ("aten::softmax.int", LOWER)),
        "head": "off",
    }
    assert dict(policy.override_modules({"head": {"mm.default": "fp32"}}).modules)["head"] == (("aten::mm", FP32),)
    assert dict(policy.override_modules({"blocks.*.attn": "off"}).modules)["blocks.*.attn"] == "off"


def test_overrides_of_ops_keep_the_tables() -> None:
    policy = MINE.override({"exp.default": "fp32"}, "cpu")
    assert policy.modules == MINE.modules
    assert policy.lookup("exp", "cpu") is FP32
    assert policy.without_modules() == Policy.stock().override({"exp.default": "fp32"}, "cpu")


def test_a_policy_without_tables_is_pickled_as_before() -> None:
    policy = Policy.stock().override({"mm.default": "fp32"})
    assert policy.__reduce__() == (Policy, (policy.changes,))
    assert b"modules" not in pickle.dumps(policy)


def test_diff_names_the_section() -> None:
    tables = {"blocks.*.attn": {"mm.default": "keep"}}
    other = Policy.stock().override({"mm.default": "keep"}, "cpu").override_modules(tables)
    blocks, head = '[modules."blocks.*.attn"]', '[modules."head"]'
    assert MINE.diff(other) == (
        Difference("aten::mm", "cpu", LOWER, CastPolicy.keep),
        Difference("aten::mm", blocks, FP32, CastPolicy.keep),
        Difference("aten::softmax.int", blocks, LOWER, None),
        Difference("policy", head, "fp32", None),
    )
    assert MINE.diff(MINE) == ()


def test_repr_evaluates_to_the_policy() -> None:
    policy = Policy.named("cuda").override_modules({"head": "off"})
    assert repr(policy) == "Policy.named('cuda').override_modules({'head': 'off'})"
    assert repr(MINE) == (
        "Policy.stock().override_modules({'blocks.*.attn': {'aten::mm.default': 'fp32', 'aten::softmax.int': "
        "'lower_precision_fp'}, 'head': 'fp32'})"
    )
    assert eval(repr(MINE)) == MINE
    many = Policy.stock().override_modules({f"layer{index}": "fp32" for index in range(6)})
    assert repr(many).endswith("'layer3': 'fp32', ... 2 more})")


def test_no_attribute_can_be_set() -> None:
    with pytest.raises(AttributeError, match="a Policy is immutable"):
        MINE.modules = ()


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
@settings(max_examples=20, deadline=None)
def test_it_comes_back_from_everything_that_it_is_turned_into(policy: Policy) -> None:
    for way in WAYS.values():
        copied = way(policy)
        assert (copied, hash(copied), repr(copied)) == (policy, hash(policy), repr(policy))
    if "more" not in repr(policy):
        assert eval(repr(policy)) == policy


@given(WITH_MODULES)
@settings(max_examples=10, deadline=None)
def test_it_comes_back_from_a_file(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> None:
    path = tmp_path_factory.getbasetemp() / "modules.toml"
    policy.save(path)
    assert Policy.load(path) == policy
    assert f"format = {2 if policy.modules else 1}\n" in path.read_text(encoding="utf-8")


@given(WITH_MODULES, WITH_MODULES)
@settings(max_examples=20, deadline=None)
def test_diff_and_equality_agree(first: Policy, second: Policy) -> None:
    there, back = first.diff(second), second.diff(first)
    assert (there == ()) == (first == second)
    assert back == tuple(Difference(op, place, theirs, mine) for op, place, mine, theirs in there)


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


def test_the_laws_are_tried_on_every_kind_of_policy() -> None:
    assert {value for _, value in LEGAL} == set(VALUES)
    assert {key for key, _ in LEGAL} == set(KEYS)


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


def test_as_a_dict_it_has_the_same_structure() -> None:
    data = MINE.to_dict()
    assert data == {
        "format": 2,
        "torch": TORCH,
        "table": TABLE_VERSION,
        "modules": {
            "blocks.*.attn": {"aten::mm.default": "fp32", "aten::softmax.int": "lower_precision_fp"},
            "head": {"policy": "fp32"},
        },
    }
    assert Policy.from_dict(json.loads(json.dumps(data))) == MINE


def test_what_needs_no_newer_release_is_written_for_older_ones(path: Any) -> None:
    MINE.without_modules().save(path)
    assert "\nformat = 1\n" in path.read_text(encoding="utf-8")


def test_a_file_of_format_2_without_tables_is_read(path: Any) -> None:
    path.write_text(TEXT.replace("format = 1", "format = 2"), encoding="utf-8")
    assert Policy.load(path).modules == ()


HEAD = 'format = 2\n[modules."head"]\n'
LEGAL_KEYS = 'Legal: format, torch, table and the sections [all], [cpu], [cuda], [modules."NAME"].'

WRONG: dict[str, tuple[str, str]] = {
    "tables in format 1": (
        'format = 1\n[modules."head"]\npolicy = "fp32"\n',
        "p.toml: [modules] is a section of format 2, got format = 1. Write: format = 2",
    ),
    "a misspelt section": (
        'format = 2\n[module."head"]\npolicy = "fp32"\n',
        f"p.toml: 'module' is not a key of a policy. Closest: modules. {LEGAL_KEYS}",
    ),
    "no section": (
        'format = 2\nmodules = "head"\n',
        "p.toml: modules holds the tables for modules, got 'head'. Write [modules.\"NAME\"].",
    ),
    "a policy for a table": (
        'format = 2\n[modules]\nhead = "fp32"\n',
        'p.toml: [modules] "head": expected a table of ops, got \'fp32\'. Write [modules."head"].',
    ),
    "an empty table": (HEAD, 'p.toml: [modules."head"] is empty. Add an op and its policy, or remove the section.'),
    "an unknown op": (
        HEAD + '"policy_tests::jion" = "fp32"\n',
        'p.toml: [modules."head"] "policy_tests::jion": no op is called \'policy_tests::jion\'. Closest: join. '
        f"{NAMED}",
    ),
    "a misspelt policy": (
        HEAD + 'bmm = "promot"\n',
        f'p.toml: [modules."head"] "bmm": no cast policy is called \'promot\'. Closest: promote. {POLICIES_TEXT}',
    ),
    "an illegal policy": (
        HEAD + '"mm.out" = "fp32"\n',
        f'p.toml: [modules."head"] "mm.out": aten::mm.out cannot use \'fp32\': {WRITES}. {LEGAL_WRITING}',
    ),
    "a number": (HEAD + "mm = 32\n", 'p.toml: [modules."head"] "mm": expected the name of a policy in quotes, got 32.'),
    "an op by two names": (
        HEAD + '"mm.default" = "fp32"\n"aten::mm.default" = "fp32"\n',
        'p.toml: [modules."head"] "aten::mm.default": aten::mm already has a policy from [modules."head"] '
        '"mm.default". Name each overload once.',
    ),
    "another policy of the module": (
        HEAD + 'policy = "cuda"\n',
        "p.toml: [modules.\"head\"] \"policy\": the policy of a whole module is 'fp32' or 'off', got 'cuda'. For "
        "single ops, write overrides: the op and its policy.",
    ),
    "a list for the policy of the module": (
        HEAD + "policy = ['fp32']\n",
        "p.toml: [modules.\"head\"] \"policy\": the policy of a whole module is 'fp32' or 'off', got ['fp32']. For "
        "single ops, write overrides: the op and its policy.",
    ),
    "a policy of the module, and of an op": (
        HEAD + 'policy = "fp32"\nmm = "keep"\n',
        "p.toml: [modules.\"head\"]: 'policy' is for the whole module, so the table can have no other key, got 'mm' "
        "too. Remove one of the two.",
    ),
    "a device's table": (
        'format = 2\n[modules."head".cpu]\nmm = "keep"\n',
        'p.toml: [modules."head"] "cpu": a table for modules holds on every device type and contains no table. Quote '
        'names that contain dots: [modules."blocks.0"], "softmax.int".',
    ),
    "a name without quotes": (
        "format = 2\n[modules.blocks.0]\nmm = 'keep'\n",
        'p.toml: [modules."blocks"] "0": a table for modules holds on every device type and contains no table. Quote '
        'names that contain dots: [modules."blocks.0"], "softmax.int".',
    ),
    "a newer PyTorch's": (
        'format = 2\ntorch = "9.5"\n[modules."head"]\n"policy_tests::new" = "fp32"\n',
        f"p.toml was written with torch 9.5. This is torch {TORCH}, table {TABLE_VERSION}, which does not know "
        '[modules."head"] "policy_tests::new" = "fp32". Use the newer version, or remove these entries.',
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file(path: Any, text: str, message: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as error:
        Policy.load(path)
    assert str(error.value) == message


def test_a_table_twice_is_no_toml(path: Any) -> None:
    path.write_text(HEAD + 'policy = "fp32"\n[modules.head]\n', encoding="utf-8")
    with pytest.raises(PolicyError, match=r"not valid TOML: .*line 4"):
        Policy.load(path)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "no mapping": (
        lambda: Policy.stock().override_modules("head"),  # type: ignore[arg-type]
        "tables of modules are a mapping of names to overrides, 'fp32' or 'off', got str.",
    ),
    "a class": (
        lambda: Policy.stock().override_modules({torch.nn.Linear: "fp32"}),  # type: ignore[dict-item]
        "a policy names modules by a str, such as 'blocks.*.attn', got <class 'torch.nn.modules.linear.Linear'>. To "
        "select by class, use set_module_policy.",
    ),
    "a number in data": (
        lambda: Policy.from_dict({"format": 2, "modules": {3: {"mm": "fp32"}}}),
        "a policy names modules by a str, such as 'blocks.*.attn', got 3. To select by class, use set_module_policy.",
    ),
    "half of a character": (
        lambda: Policy.stock().override_modules({"\ud800": "fp32"}),
        "the name of a module is text in Unicode, got '\\ud800'.",
    ),
    "a dtype for a table": (
        lambda: Policy.stock().override_modules({"head": torch.float32}),
        "[modules.\"head\"]: a table is a mapping of overrides, 'fp32' or 'off', got torch.float32.",
    ),
    "a misspelt policy": (
        lambda: Policy.stock().override_modules({"head": "fp23"}),
        "[modules.\"head\"]: the policy of a whole module is 'fp32' or 'off', got 'fp23'. Closest: fp32. For single "
        "ops, write overrides: the op and its policy.",
    ),
    "an unknown op": (
        lambda: Policy.stock().override_modules({"head": {f"{NAMESPACE}::jion": "fp32"}}),
        f"[modules.\"head\"]: no op is called 'policy_tests::jion'. Closest: join. {NAMED}",
    ),
    "an empty table": (
        lambda: Policy.stock().override_modules({"head": {}}),
        '[modules."head"]: the table is empty. Add an op and its policy, or leave it out.',
    ),
    "tables without a check": (
        lambda: Policy((), {"head": "fp32"}),  # type: ignore[arg-type]
        "Policy(...) takes tables as a tuple, got {'head': 'fp32'}. Use policy.override_modules(...).",
    ),
}


@pytest.mark.parametrize(("ask", "text"), ERRORS.values(), ids=ERRORS)
def test_bad_input(ask: Callable[[], object], text: str) -> None:
    with pytest.raises(PolicyError) as error:
        ask()
    assert str(error.value) == text
