"""Names of ops: what each selects, compared with what functions call, and the errors for names that no op has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.common_methods_invocations import op_db

import torch_promote as tp
from helpers.library_for_policies import NAMESPACE
from torch_promote.observe.observer import observe_dispatch
from torch_promote.policy.op_names import _path_of, closest_ops, find_overloads, matches, op_of_function, spell_key
from torch_promote.policy.op_table import schema_of

OPS = sorted(
    {name.partition(".")[0][6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
)

# --- what resolves

SAME: dict[str, list[Any]] = {
    "softmax": [
        "torch.softmax",
        "F.softmax",
        "Tensor.softmax",
        torch.softmax,
        F.softmax,
        torch.Tensor.softmax,
        torch.ops.aten.softmax,
    ],
    "mm": ["torch.mm", "torch.ops.aten.mm", torch.mm, torch.Tensor.mm],
    "mm.default": ["torch.ops.aten.mm.default", torch.ops.aten.mm.default],
    "softmax.int": ["torch.ops.aten.softmax.int"],
    "matmul": [torch.matmul, torch.Tensor.matmul, "torch.matmul"],
    "layer_norm": [F.layer_norm, "F.layer_norm", torch.layer_norm],
    "linear": [F.linear, "F.linear"],
    "cross_entropy_loss": [F.cross_entropy, "F.cross_entropy"],
    "scaled_dot_product_attention": [F.scaled_dot_product_attention],
    "flex_attention": [flex_attention, torch.ops.higher_order.flex_attention, "torch.ops.higher_order.flex_attention"],
    "linalg_norm": [torch.linalg.norm, "torch.linalg.norm"],
    "einsum": [torch.einsum, torch.functional.einsum],
    "linalg_v*": ["torch.ops.aten.linalg_v*"],
}


@pytest.mark.parametrize(("name", "keys"), SAME.items(), ids=SAME)
def test_a_name_in_python_means_the_op(name: str, keys: list[Any]) -> None:
    for key in keys:
        assert find_overloads(key) == find_overloads(name), key
        assert find_overloads(spell_key(key)) == find_overloads(name), key
        assert matches(find_overloads(name)[0], key) if isinstance(key, str) else True


MANY = tuple(f"{NAMESPACE}::{name}" for name in ("many", "many.dtype", "many.out"))
aten, ours = torch.ops.aten, getattr(torch.ops, NAMESPACE)


@torch.library.custom_op(f"{NAMESPACE}::made", mutates_args=())
def made(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


OVERLOADS: list[tuple[Any, tuple[str, ...]]] = [
    (aten.softmax.int, ("aten::softmax.int",)),
    (aten.mm.default, ("aten::mm",)),
    (aten.mm.out, ("aten::mm.out",)),
    (f"{NAMESPACE}::many", MANY),
    (ours.many, MANY),
    (f"{NAMESPACE}::many.default", MANY[:1]),
    (f"{NAMESPACE}::many.*", MANY),
    (f"{NAMESPACE}::*.o[tu]t", MANY[2:]),
    (f"{NAMESPACE}::write_[!.]*", (f"{NAMESPACE}::write_each_",)),
    ("*_tests::join", (f"{NAMESPACE}::join",)),
    (made, (f"{NAMESPACE}::made",)),
]


@pytest.mark.parametrize(("key", "expected"), OVERLOADS, ids=lambda value: str(value)[:40])
def test_the_overloads_that_a_key_selects(key: Any, expected: tuple[str, ...]) -> None:
    assert find_overloads(key) == expected
    assert find_overloads(spell_key(key)) == expected


def test_a_name_without_an_overload_selects_all_and_a_pattern_those_of_aten() -> None:
    every = [name for name in torch._C._dispatch_get_all_op_names() if schema_of(name) is not None]
    for op in ("softmax", "mm", "add_"):
        assert set(find_overloads(op)) == {name for name in every if name.partition(".")[0] == f"aten::{op}"}
    of_aten = {name for name in every if name.startswith("aten::")}
    assert set(find_overloads("*")) == set(find_overloads("aten::*")) == of_aten
    assert set(find_overloads("*.out")) == {name for name in of_aten if name.endswith(".out")}


def test_everywhere_that_ops_are_named(tmp_path: Path) -> None:
    x = torch.ones(2, 3)

    def dtypes(**options: Any) -> tuple[torch.dtype, torch.dtype]:
        with tp.my_autocast("cpu", **options):
            return F.softmax(x, -1).dtype, torch.mm(x.T, x).dtype

    expected = (torch.float64, torch.float32)
    overrides = {F.softmax: "float64", "torch.mm": "fp32"}
    assert dtypes(overrides=overrides) == expected
    policy = tp.Policy.stock().override(overrides)
    assert dtypes(policy=policy) == expected
    assert policy.lookup(torch.Tensor.mm, "cpu") is tp.CastPolicy.fp32
    file = tmp_path / "mine.toml"
    file.write_text('format = 1\n[all]\n"F.softmax" = "float64"\n"torch.ops.aten.mm" = "fp32"\n')
    assert tp.Policy.load(file) == policy
    with tp.register_policy(F.softmax, "float64"), tp.register_policy("torch.mm", "fp32"):
        assert dtypes() == expected
    model = nn.Softmax(-1)
    tp.set_module_policy(model, {"": {"F.softmax": "float64"}})
    assert tp.module_policies(model) == {"": {"aten::softmax": "float64"}}
    table = tp.Policy.stock().override_modules({"head": {"Tensor.softmax": "lower"}}).modules
    assert table == tp.Policy.stock().override_modules({"head": {"softmax": "lower"}}).modules


# --- what does not


class Mine(nn.LayerNorm): ...


#: What is not an op, and what the error says about it.
NOT_OPS: list[tuple[Any, str]] = [
    *(
        (key, 'set_module_policy(model, {nn.LayerNorm: "fp32"}).')
        for key in (nn.LayerNorm, nn.LayerNorm(3), "nn.LayerNorm", "torch.nn.LayerNorm")
    ),
    (Mine(3), 'set_module_policy(model, {Mine: "fp32"}).'),
    ("Linear", "no op is called 'Linear'. nn.Linear is a module"),
    ("cross_entropy", "F.cross_entropy calls the op 'cross_entropy_loss'. Use that name."),
    (F.normalize, "such as linalg_vector_norm, clamp_min, div. Name the ops that you mean."),
    ("torch.sofmax", "no op is called 'torch.sofmax'. Closest: softmax."),
    ("F.*_loss", "A pattern has to match names of ops: write '*_loss'."),
    ("torch.ops.nolib.op", "Import the library that defines 'nolib::op' first."),
    ("linalg.norm", "Write 'linalg_norm'."),
    ("aten.mm", "no op is called 'aten.mm'. Write 'aten::mm'."),
    (f"{NAMESPACE}::jion", "no op is called 'policy_tests::jion'. Closest: join."),
    ("policytests::join", "Import the library that defines 'policytests::join' first. Closest: policy_tests."),
    (f"{NAMESPACE}::many.int", "Legal: policy_tests::many.default, policy_tests::many.dtype, policy_tests::many.out."),
    ("add_.", "aten::add_ has no overload ''. Legal: aten::add_.Scalar, aten::add_.Tensor."),
    (3, "expected the name of an op, an op object or a function of PyTorch, got 3."),
]


@pytest.mark.parametrize(("key", "text"), NOT_OPS, ids=[str(getattr(key, "__name__", key))[:30] for key, _ in NOT_OPS])
def test_what_is_not_an_op(key: Any, text: str) -> None:
    with pytest.raises(tp.PolicyError) as error:
        tp.Policy.stock().override({key: "fp32"})
    assert text in str(error.value)


TYPOS = {
    "sofmax": "softmax",
    "Softmax": "softmax",
    "layernorm": "layer_norm",
    "matmull": "matmul",
    "liner": "linear",
    "conv_2d": "conv2d",
    "exo": None,
    "scaled_dot_product": "scaled_dot_product_attention",
    "attention": "scaled_dot_product_attention",
}


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_typo_gets_the_op_that_was_meant_first(typo: str, meant: str | None) -> None:
    found = closest_ops(typo, OPS)
    assert found[:1] == ([meant] if meant else [])


# --- the ops that functions of PyTorch stand for, compared with the ops that the functions call


class Outermost:
    """Records the ops that are called, and not those that they call in turn."""

    stock_too = see_through = False

    def __init__(self) -> None:
        self.ops: list[str] = []

    def begin(self, op: Any, args: list[Any]) -> Outermost:
        self.ops.append(op._schema.name.removeprefix("aten::"))
        return self

    def end(self, token: object, results: list[Any]) -> None: ...

    def failed(self, token: object) -> None: ...


def outermost(run: Callable[[], Any]) -> set[str]:
    with observe_dispatch(observer := Outermost()):
        run()
    return set(observer.ops)


def sampled() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of PyTorch's functions and methods, with where people find them."""
    for entry in op_db:
        dtype = next((one for one in (torch.float32, torch.int64, torch.complex64) if one in entry.dtypes), None)
        functions = {_path_of(one): one for one in (entry.op, entry.method_variant) if one is not None}
        if dtype is None or not functions.keys() - {None}:
            continue
        for _, sample in zip(range(4), entry.sample_inputs_func(entry, "cpu", dtype, False), strict=False):
            for path, function in functions.items():
                if path is not None and isinstance(sample.input, torch.Tensor | list | tuple):
                    yield path, lambda f=function, s=sample: f(s.input, *s.args, **s.kwargs)  # type: ignore[misc]


@cache
def observed() -> dict[str, list[set[str]]]:
    """The outermost ops of each sampled call, by function."""
    found = defaultdict(list)
    torch.manual_seed(0)
    for path, run in sampled():
        try:
            found[path].append(outermost(run))
        except (RuntimeError, TypeError, AttributeError):  # a sample for the function alone, or for another build
            continue
    return found


def function_at(path: str) -> Any:
    place, _, name = path.rpartition(".")
    found = {"F": F, "torch": torch, "Tensor": torch.Tensor}.get(place) or getattr(torch._C, place[9:])
    return getattr(found, name, None)  # None where an older PyTorch lacks it


@pytest.mark.filterwarnings("ignore")
def test_a_function_stands_for_an_op_that_it_calls() -> None:
    wrong = {}
    for path, calls in observed().items():
        try:
            op = op_of_function(function_at(path)).removeprefix("aten::")
        except tp.PolicyError:
            continue
        # A call may be of another op, as of one that returns indices, or of none, as contiguous() may be.
        called = [ops for ops in calls if ops]
        if sum(op in ops for ops in called) * 3 < len(called):
            wrong[path] = (op, called)
    assert not wrong, wrong
