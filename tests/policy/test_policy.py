"""`Policy` as a value: its entries, equality, copies, repr, differences, laws, errors; module tables."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from expecttest import assert_expected_inline
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torch_promote
from helpers.library_for_policies import NAMESPACE
from helpers.policies import LEGAL, POLICIES, STEPS, WAYS, made_of, path, selected
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.module_tables import entries_of
from torch_promote.policy.named_policies import RECOGNIZED, stock_policy
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES, op_table, registered, schema_of
from torch_promote.policy.overrides import check_legal
from torch_promote.policy.policy import Policy, PolicyDiff, PolicyDifference

__all__ = ["path"]  # a fixture

FP64 = torch.float64

# --- what a policy says


def test_stock_is_fallthrough_where_pytorch_does_not_register_a_row() -> None:
    assert stock_policy("aten::exp", "cpu") is CastPolicy.fallthrough
    assert Policy.stock().override({"exp.default": "fallthrough"}, "cpu") == Policy.stock()
    assert Policy.stock().override({"exp.default": "fallthrough"}, "cuda") != Policy.stock()


def test_a_policy_has_no_entry_for_an_op_outside_the_table_until_it_is_overridden() -> None:
    join = f"{NAMESPACE}::join"
    assert Policy.stock().lookup(join, "cpu") is None
    policy = Policy.stock().override({join: "fallthrough"}, "cpu")
    assert policy.lookup(join, "cpu") is CastPolicy.fallthrough
    assert policy.lookup(join, "cuda") is None
    assert policy.diff("stock") == (PolicyDifference(join, "cpu", CastPolicy.fallthrough, None),)


def test_lookup_of_an_op_is_of_its_rows() -> None:
    assert Policy.stock().lookup("softmax", "cuda") is CastPolicy.fp32_set_opt_dtype
    assert Policy.stock().lookup(torch.ops.aten.mm, "cpu") is CastPolicy.lower_precision_fp
    assert Policy.stock().lookup("mm.out", "cpu") is None
    assert Policy.stock().override({"pow": FP64}).lookup("pow", "cpu") is FP64


def test_of_takes_a_policy_a_name_and_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.stock().override({"mm.default": FP64})
    monkeypatch.chdir(tmp_path)
    policy.save("mine.toml")
    policy.save("cuda")
    assert Policy.of(policy) is policy
    assert Policy.of("cuda") == Policy.named("cuda"), "a name comes before a file that is called so"
    for name in ("mine.toml", "./cuda", tmp_path / "cuda", Path("cuda"), str(tmp_path / "cuda")):
        assert Policy.of(name) == policy


# --- a frozen value


@pytest.mark.parametrize("name", ["changes", "other"])
def test_nothing_can_be_set(name: str) -> None:
    policy = Policy.stock()
    with pytest.raises(AttributeError, match=r"a Policy is immutable, so '\w+' cannot be set\. Use policy\.override"):
        setattr(policy, name, ())
    with pytest.raises(AttributeError, match="a Policy is immutable"):
        delattr(policy, name)
    assert policy == Policy.stock()


# --- repr

REPRS: list[tuple[Policy, str]] = [
    (Policy.stock(), "Policy.stock()"),
    (Policy.named("cuda"), "Policy.named('cuda')"),
    (
        Policy.stock().override({"exp.default": "fp16"}, "cuda").override({"mm.default": "keep"}),
        "Policy.stock().override({'aten::mm.default': 'keep'})"
        ".override({'aten::exp.default': 'lower_precision_fp'}, device_type='cuda')",
    ),
    (
        Policy.stock().override({f"{NAMESPACE}::many.out": "match_self"}, "cpu").override({"mm.default": FP64}, "cuda"),
        "Policy.stock().override({'policy_tests::many.out': 'match_self'}, device_type='cpu')"
        ".override({'aten::mm.default': 'float64'}, device_type='cuda')",
    ),
]


@pytest.mark.parametrize(("policy", "text"), REPRS, ids=[text for _, text in REPRS])
def test_repr_evaluates_to_the_policy(policy: Policy, text: str) -> None:
    assert repr(policy) == text
    assert eval(text) == policy


# --- diff


def test_diff_lists_both_sides_in_order_and_prints_as_a_table() -> None:
    mine = Policy.stock().override({"mm.default": "fp32"}).override({"exp.default": FP64}, "cpu")
    theirs = Policy.stock().override({"mm.default": "keep"}, "cuda")
    found = mine.diff(theirs)
    assert found == (
        PolicyDifference("aten::exp", "cpu", FP64, CastPolicy.fallthrough),
        PolicyDifference("aten::mm", "cpu", CastPolicy.fp32, CastPolicy.lower_precision_fp),
        PolicyDifference("aten::mm", "cuda", CastPolicy.fp32, CastPolicy.keep),
        PolicyDifference("aten::mm", "mps", CastPolicy.fp32, CastPolicy.lower_precision_fp),
        PolicyDifference("aten::mm", "xpu", CastPolicy.fp32, CastPolicy.lower_precision_fp),
    )
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (again, again.names, type(again)) == (found, ("this policy", "the other"), PolicyDiff)
    data = json.loads(json.dumps(found.to_dict()))
    assert {"op": "aten::exp", "device": "cpu", "policies": ["float64", "fallthrough"]} in data["differences"]
    with_tables = (
        Policy.stock()
        .override({"exp": "fp32", "gelu": "float64"}, device_type="cpu")
        .override_modules({"<head>": "fp32"})
    )
    assert_expected_inline(
        str(with_tables.diff("stock")),
        """\
op      devices             this policy  stock
exp     cpu                 fp32         fallthrough
gelu    cpu                 float64      -
policy  [modules."<head>"]  fp32         -""",
    )
    for text in (with_tables._repr_html_(), with_tables.diff("stock")._repr_html_()):
        assert "<td>gelu</td><td>cpu</td><td>float64</td>" in text
        assert "<head>" not in text
    assert str(Policy.stock().diff("stock")) == "stock and stock are equal."
    assert "<table" not in Policy.stock()._repr_html_()


# --- laws


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_a_policy_contains_its_overrides_and_the_later_wins(steps: list[Any]) -> None:
    model: dict[tuple[str, str], Any] = {}
    for (key, value), device in steps:
        on = DEVICE_TYPES if device is None else (device,)
        model.update({(op, name): value for op in selected(key, value) for name in on})
    policy = made_of(steps)
    for op, device in {*model, ("aten::mm", "cpu"), ("aten::exp", "cuda")}:
        assert policy.lookup(exact_key(op), device) == model.get((op, device), stock_policy(op, device))
    assert policy.changes == tuple(
        (*place, model[place]) for place in sorted(model) if model[place] != stock_policy(*place)
    )


@given(POLICIES, POLICIES)
@settings(max_examples=30, deadline=None)
def test_diff_and_equality_agree(first: Policy, second: Policy) -> None:
    there, back = first.diff(second), second.diff(first)
    assert (there == ()) == (first == second)
    assert back == tuple(PolicyDifference(op, device, theirs, mine) for op, device, mine, theirs in there)
    for op, device, mine, theirs in there:
        assert (mine, theirs) == (first.lookup(exact_key(op), device), second.lookup(exact_key(op), device))
    changed = second
    for device in DEVICE_TYPES:
        wanted = {exact_key(op): mine for op, on, mine, _ in there if on == device and mine is not None}
        changed = changed.override(wanted, device)
    assert all(each.mine is None for each in first.diff(changed)), "an entry without a row cannot be removed"


# --- the named policies

FP32_FORMS = {CastPolicy.fp32, CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype}


@pytest.mark.parametrize("name", RECOGNIZED)
def test_the_entries_of_a_named_policy(name: str) -> None:
    policy, on_stock = Policy.named(name), {device: registered(device) for device in DEVICE_TYPES}
    for row in (row for row in op_table() if schema_of(row) is not None):
        stock = {
            device: row.policy(device) if row.name in on_stock[device] else CastPolicy.fallthrough
            for device in DEVICE_TYPES
        }
        safe = FP32_FORMS & set(stock.values())
        for device in DEVICE_TYPES:
            got = policy.lookup(exact_key(row.name), device)
            if name == "fp32_safe" and safe and stock[device] not in FP32_FORMS:
                assert got in safe, (row.name, device)
            else:
                expected = {**dict.fromkeys(RECOGNIZED, stock[device]), **stock, "off": CastPolicy.fallthrough}
                expected["fp32"] = CastPolicy.fp32
                assert got is expected[name], (row.name, device)
    for overload, device, value in policy.changes:
        check_legal(overload, value)
        assert value != stock_policy(overload, device)
    assert repr(policy) in ("Policy.stock()", f"Policy.named({name!r})")
    assert len({Policy.named(other) for other in RECOGNIZED}) == len(RECOGNIZED)


# --- errors

ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Policy.named("cdua"), PolicyError, "no policy is called 'cdua'. Closest: cuda. Legal: stock, cpu, cuda,"),
    (
        lambda: Policy.of("fp32safe"),
        PolicyError,
        "Closest: fp32_safe, fp32. Legal: stock, cpu, cuda, xpu, mps, fp32_safe, fp32, off, torch-2.8 to",
    ),
    (lambda: Policy.of("float32"), PolicyError, "overrides={op: 'float32'}. For every op, write 'fp32'."),
    (lambda: Policy.of(torch.float32), PolicyError, "overrides={op: torch.float32}. For every op, write 'fp32'."),  # type: ignore[arg-type]
    (lambda: Policy.of({"mm": "fp32"}), PolicyError, "use Policy.stock().override({op: policy})."),  # type: ignore[arg-type]
    (lambda: Policy("cuda"), PolicyError, "To get a policy by name, use Policy.named(...)."),  # type: ignore[arg-type]
    (
        lambda: Policy.stock().override({}, "hpu"),
        torch_promote.errors.UnsupportedDeviceError,
        "a policy has no device type 'hpu'. Legal: 'cpu', 'cuda', 'xpu', 'mps'.",
    ),
    (
        lambda: Policy.stock().override({}, []),
        torch_promote.errors.DeviceTypeError,
        "device_type is a device type, a sequence of them or None, got []. Legal: 'cpu', 'cuda', 'xpu', 'mps'.",
    ),
    (
        lambda: Policy.stock().lookup("mm", None),  # type: ignore[arg-type]
        torch_promote.errors.DeviceTypeError,
        "lookup takes one device type, got None. Legal: 'cpu', 'cuda', 'xpu', 'mps'.",
    ),
    (
        lambda: Policy.stock().override({f"{NAMESPACE}::many": "fp32"}).lookup(f"{NAMESPACE}::many", "cpu"),
        PolicyError,
        "policy_tests::many.out no entry. Name one of them, such as 'policy_tests::many.default'.",
    ),
    *(
        (functools.partial(Policy.from_dict, data), PolicyError, text)
        for data, text in [
            (None, "a policy as data is a mapping, got NoneType. Policy.to_dict() makes one."),
            ({}, "the policy: the key 'format' is missing. Start with: format = 1"),
            ({"format": 3, "torch": "3.0"}, "format 3 is newer than 2, the newest that this torch_promote reads."),
            ({"format": True}, "format is an integer from 1 to 2, got True."),
            ({"format": 1, "cpu": {"mm": CastPolicy.fp32}}, "expected the name of a policy in quotes, got <CastPolicy"),
        ]
    ),
    *(
        (functools.partial(Policy.stock().override_modules, tables), PolicyError, text)
        for tables, text in [
            ("head", "tables of modules are a mapping of names to overrides, 'fp32' or 'off', got str."),
            ({torch.nn.Linear: "fp32"}, "The classes themselves are for set_module_policy."),
            ({"head": "fp23"}, "the policy of a whole module is 'fp32' or 'off', got 'fp23'. Closest: fp32."),
            ({"head": {}}, '[modules."head"]: the table is empty. Add an op and its policy, or leave it out.'),
        ]
    ),
]


@pytest.mark.parametrize(
    ("ask", "kind", "text"), ERRORS, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_wrong_input(ask: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        ask()
    assert text in str(error.value)
    assert type(error.value) is kind


# --- torch.compile


def test_a_compiled_function_is_given_a_policy() -> None:
    def scaled(x: torch.Tensor, policy: Policy) -> torch.Tensor:
        return x * 2 if policy == Policy.stock() else x * 3

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x, policy: scaled(x, policy), backend=counter, fullgraph=True)
    one, other = Policy.stock(), Policy.stock().override({"mm.default": "fp32"})
    results = [compiled(torch.ones(()), policy).item() for policy in (one, other, Policy((*one.changes,)), other)]
    assert results == [2, 3, 2, 3]
    assert counter.frame_count == 2, "an equal policy is served by what was compiled for the first"


# --- tables for modules

LOWER, FP32 = CastPolicy.lower_precision_fp, CastPolicy.fp32
MINE = Policy.stock().override_modules({"head": "fp32", "blocks.*.attn": {"softmax.int": "fp16", "mm.default": "fp32"}})


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
    assert MINE not in (Policy.stock(), MINE.override_modules({"head": "off"}))


def test_repr_of_tables_evaluates_to_the_policy() -> None:
    assert "Policy.named('cuda').override_modules(" in repr(Policy.named("cuda").override_modules({"head": "off"}))
    assert repr(MINE) == (
        "Policy.stock().override_modules({'blocks.*.attn': {'aten::mm.default': 'fp32', 'aten::softmax.int': "
        "'lower_precision_fp'}, 'head': 'fp32'})"
    )
    assert eval(repr(MINE)) == MINE
    many = Policy.stock().override_modules({f"layer{index}": "fp32" for index in range(6)})
    assert repr(many).endswith("'layer3': 'fp32', ...})")


NAMES = st.one_of(
    st.sampled_from(["", "head", "blocks.*.attn", "**", "layer[01].x"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
TABLES = st.one_of(st.sampled_from(["fp32", "off"]), st.builds(lambda entry: dict([entry]), st.sampled_from(LEGAL)))
WITH_MODULES = st.builds(
    lambda policy, tables: policy.override_modules(tables), POLICIES, st.dictionaries(NAMES, TABLES, max_size=4)
)


#: Written in full, it has 240 characters.
FULL = Policy.stock().override({f"{NAMESPACE}::join": "fp32"}, "cpu").override({"pow.*_out": "match_self"}, "xpu")


@given(WITH_MODULES)
@example(FULL)
@settings(max_examples=25, deadline=None)
def test_it_comes_back_from_everything_that_it_is_turned_into(policy: Policy) -> None:
    for way in WAYS.values():
        copied = way(policy)
        assert (copied, hash(copied), repr(copied)) == (policy, hash(policy), repr(policy))
    assert len(repr(policy)) < 240  # of three lines


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


def test_a_file_has_a_section_for_each_table(path: Any) -> None:
    MINE.override({"mm.default": "keep"}, "cpu").save(path)
    head, *sections = path.read_text(encoding="utf-8").split("\n\n")
    assert "\nformat = 2\n" in head
    assert sections == [
        '[cpu]\n"aten::mm.default" = "keep"',
        '[modules."blocks.*.attn"]\n"aten::mm.default" = "fp32"\n"aten::softmax.int" = "lower_precision_fp"',
        '[modules."head"]\npolicy = "fp32"\n',
    ]
