"""Overrides: the policies that are legal for an op, which overload gets which, and the errors for wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.library_for_policies import NAMESPACE
from helpers.subprocesses import plain_environment, run_python
from torch_promote import CastPolicy
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.policy.op_table import rows_by_name, schema_of
from torch_promote.policy.overrides import check_legal, legal_policies, parse_overrides, parse_policy, select

FP32, LOWER = CastPolicy.fp32, CastPolicy.lower_precision_fp
NOTHING_CAST = ["fallthrough", "keep", "banned"]
PLAIN = ["lower_precision_fp", "fp32", "promote", *NOTHING_CAST]
WRITING = ["match_self", *NOTHING_CAST]
MANY, OUT = f"{NAMESPACE}::many", f"{NAMESPACE}::many.out"

# --- what is legal

LEGAL = {
    "join": PLAIN,
    "many": PLAIN,
    "many.dtype": ["lower_precision_fp", "fp32", "fp32_set_opt_dtype", "promote", *NOTHING_CAST],
    "many.out": WRITING,
    "write_": WRITING,
    "write_each_": WRITING,
    "count": [],
    "packed": PLAIN,
    "optional": PLAIN,
    "several": PLAIN,
}


@pytest.mark.parametrize(("op", "expected"), LEGAL.items())
def test_the_schema_decides_what_is_legal(op: str, expected: list[str]) -> None:
    name = f"{NAMESPACE}::{op}"
    assert [policy.value for policy in legal_policies(name)] == expected
    values = {policy.value: policy for policy in CastPolicy} | (
        {"float64": torch.float64} if "fp32" in expected else {}
    )
    for text, policy in values.items():
        if text in [*expected, "float64"]:
            check_legal(name, policy)
        else:
            with pytest.raises(tp.PolicyError):
                check_legal(name, policy)


def test_a_conversion_is_to_be_changed_in_the_code() -> None:
    for name in ("to.dtype", "_to_copy", "type_as"):
        with pytest.raises(tp.PolicyError, match="it converts to the dtype that the program names: change"):
            check_legal(f"aten::{name}", FP32)


def test_the_policies_of_every_op_of_the_dispatcher() -> None:
    """An op that writes may match its argument; one that computes may cast; one that moves data may do neither."""
    moving = {
        f"aten::{op}"
        for op in ("clone", "view", "to_dense", "_to_copy", "zeros_like", "new_ones", "resize", "unsafe_split", "lift")
    }
    seen = {True: 0, False: 0}
    for name in torch._C._dispatch_get_all_op_names():
        schema, legal = schema_of(name), legal_policies(name)
        if schema is None:  # a kernel of an op that nobody has defined
            assert legal == ()
            continue
        takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        assert (CastPolicy.banned in legal) == takes_tensors, name
        steps = name.startswith(("aten::_fused_ada", "aten::_fused_sgd", "aten::_amp_"))  # in float32
        assert (CastPolicy.match_self in legal) == (takes_tensors and schema.is_mutable and not steps), name
        shares = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
        if schema.is_mutable or not takes_tensors or name in moving or (shares and name not in rows_by_name()):
            assert FP32 not in legal, name
        elif name in rows_by_name() or name.partition("::")[0] not in ("aten", "prims"):
            assert FP32 in legal, name
        assert (CastPolicy.fp32_append_dtype in legal) == bool(
            name in rows_by_name() and rows_by_name()[name].redispatch_overload
        )
        seen[schema.is_mutable] += 1
    assert min(seen.values()) > 500


# --- which overload gets which policy


@pytest.mark.parametrize(
    ("key", "policy", "expected"),
    [
        (MANY, "fp32", (MANY, f"{MANY}.dtype")),
        (MANY, torch.float64, (MANY, f"{MANY}.dtype")),
        (MANY, "fp32_set_opt_dtype", (f"{MANY}.dtype",)),
        (MANY, "match_self", (OUT,)),
        (MANY, "banned", (MANY, f"{MANY}.dtype", OUT)),
        (f"{NAMESPACE}::*_", "match_self", (f"{NAMESPACE}::write_", f"{NAMESPACE}::write_each_")),
        ("norm", "fp32_append_dtype", ("aten::norm.Scalar", "aten::norm.ScalarOpt_dim")),
    ],
    ids=str,
)
def test_of_several_overloads_those_get_the_policy_that_may(key: str, policy: Any, expected: tuple[str, ...]) -> None:
    assert select(key, policy)[1] == expected
    assert tuple(name for name, _ in parse_overrides({key: policy})) == expected


FAMILY = {"linalg_*": "fp32", "linalg_norm": "lower"}


def test_a_name_takes_precedence_over_a_pattern(tmp_path: Path) -> None:
    for overrides in (FAMILY, dict(reversed(FAMILY.items()))):
        found = dict(parse_overrides(overrides))
        assert found["aten::linalg_norm"] is found["aten::linalg_norm.ord_str"] is LOWER
        assert found["aten::linalg_vector_norm"] is FP32
    overload = dict(parse_overrides({"linalg_norm.ord_str": "lower", "linalg_*": "fp32"}))
    assert (overload["aten::linalg_norm"], overload["aten::linalg_norm.ord_str"]) == (FP32, LOWER)
    patterns = {"linalg_v*": "fp32", "*_vector_norm": "lower"}
    with pytest.raises(tp.PolicyError, match="Name the op itself as well, which takes precedence over patterns"):
        parse_overrides(patterns)
    found = dict(parse_overrides(patterns | {"linalg_vector_norm": "float64"}))
    assert found["aten::linalg_vector_norm"] is torch.float64
    with tp.my_autocast("cpu", overrides=FAMILY):
        assert torch.linalg.vector_norm(torch.ones(3, dtype=torch.float16)).dtype is torch.float32
        assert torch.linalg.norm(torch.ones(3)).dtype is torch.bfloat16


# --- names of policies and dtypes

NAMES = {
    **dict.fromkeys(("lower", "fp16", "lower_precision_fp"), LOWER),
    **dict.fromkeys(("float16", "torch.float16", "half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp64", "double"), torch.float64),
    "fp32": FP32,
    "float": torch.float32,
    "float32": torch.float32,
}


@pytest.mark.parametrize(("name", "policy"), NAMES.items())
def test_a_policy_by_name(name: str, policy: Any) -> None:
    assert parse_policy(name) is policy


@pytest.mark.parametrize("name", ["fp16", "half", "torch.float16", "bf16", "bfloat16"])
def test_the_dtype_of_a_region_by_name(name: str) -> None:
    """Here, "fp16" is a dtype."""
    dtype = torch.float16 if name == "fp16" else NAMES[name]
    for region in (tp.my_autocast("cpu", dtype=name), tp.my_autocast("cpu", name, policy="cuda")):
        with region:
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype


# --- errors

ERRORS: list[tuple[Any, str]] = [
    ({"mm.default": "fp61"}, "aten::mm: no cast policy is called 'fp61'. Closest: fp16 (the region's dtype)."),
    ({"mm": "none"}, "'fallthrough' leaves the op to the dtypes of its inputs; 'keep' runs it with autocast off."),
    ({"mm.default": 32}, "aten::mm: a policy is a str, a CastPolicy or a torch.dtype, got 32."),
    ({"mm.default": "complex64"}, "torch.complex64 is not a floating dtype."),
    ({"mm.default": "fp32_set_opt_dtype"}, "its schema has no optional dtype argument. Legal: lower_precision_fp,"),
    ({"mm.default": CastPolicy.fp32_append_dtype}, "the op table names no overload of it that takes an output dtype."),
    ({"_fused_adam_": "match_self"}, "it counts steps or scales in float32 beside tensors of any dtype"),
    ({"mm.default": "match_self"}, "it does not write to an argument, so there is no dtype to match."),
    ({"mm.out": "fp32"}, "aten::mm.out cannot use 'fp32': it writes to an argument,"),
    ({"aten::view": "fp32"}, "Override the op that computes with the result"),
    ({f"{NAMESPACE}::count.float": "keep"}, "it takes no tensor, so autocast does not apply to it."),
    ({MANY: "fp16", f"{MANY}.dtype": "fp32"}, "'policy_tests::many.dtype'. Name each overload once."),
    ({f"{NAMESPACE}::j*": "fp16", f"{NAMESPACE}::*in": "half"}, "Name the op itself as well,"),
    ({"mm.default": "fp32", torch.ops.aten.mm.default: torch.float32}, "aten::mm gets two policies, 'fp32' from"),
]


@pytest.mark.parametrize(("overrides", "text"), ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_overrides(overrides: Any, text: str) -> None:
    with pytest.raises(tp.PolicyError) as error:
        parse_overrides(overrides)
    assert text in str(error.value)
    assert type(error.value) is tp.PolicyError


def write(folder: Path, text: str) -> Path:
    (file := folder / "mine.toml").write_text(text)
    return file


def in_environment(**variables: str) -> Any:
    """Imports the package with variables set, as a program does; raises the first line of the error."""
    process = run_python("import torch_promote", env={**plain_environment(), **variables})
    raise tp.PolicyError(process.stderr.rstrip().rpartition("PolicyError: ")[2])


#: Every place in which a policy of an op can be a dtype, given a dtype and a folder.
PLACES: dict[str, Callable[[Any, Path], object]] = {
    "overrides": lambda dtype, _: tp.my_autocast("cpu", overrides={"linear": dtype}),
    "a pattern": lambda dtype, _: tp.my_autocast("cpu", overrides={"linear*": dtype}),
    "an op outside the table": lambda dtype, _: tp.my_autocast("cpu", overrides={"gelu": dtype}),
    "Policy.override": lambda dtype, _: tp.Policy.stock().override({"linear": dtype}, device_type="cuda"),
    "Policy.override_modules": lambda dtype, _: tp.Policy.stock().override_modules({"head": {"linear": dtype}}),
    "Policy.from_dict": lambda dtype, _: tp.Policy.from_dict({"format": 1, "all": {"linear": spelled(dtype)}}),
    "set_module_policy": lambda dtype, _: tp.set_module_policy(torch.nn.Linear(1, 1), {"": {"linear": dtype}}),
    "register_policy": lambda dtype, _: tp.register_policy("relu", dtype),
    "a policy made without checks": lambda dtype, _: tp.my_autocast(
        "cpu", policy=tp.Policy((("aten::linear", "cpu", parse_dtype(dtype)),))
    ),
    "install": lambda dtype, _: tp.install(overrides={"linear": dtype}),
    "a file": lambda dtype, folder: tp.my_autocast(
        "cpu", policy=write(folder, f'format = 1\n[cpu]\n"linear" = "{spelled(dtype)}"')
    ),
    "a file's table": lambda dtype, folder: tp.Policy.load(
        write(folder, f'format = 2\n[modules."head"]\n"linear" = "{spelled(dtype)}"')
    ),
    "the default": lambda dtype, folder: tp.set_default_policy(
        write(folder, f'format = 1\n[all]\n"linear*" = "{spelled(dtype)}"')
    ),
}
ENVIRONMENT: dict[str, Callable[[Any, Path], object]] = {
    "TORCH_PROMOTE_OVERRIDES": lambda dtype, _: in_environment(
        TORCH_PROMOTE_AUTOCAST="1", TORCH_PROMOTE_OVERRIDES=f"linear={spelled(dtype)}"
    ),
    "TORCH_PROMOTE_POLICY": lambda dtype, folder: in_environment(
        TORCH_PROMOTE_POLICY=str(write(folder, f'format = 1\n[all]\n"linear" = "{spelled(dtype)}"'))
    ),
}


def spelled(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES_WITH_SCALES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
]
CASES = [(place, dtype) for place in PLACES for dtype in DTYPES_WITH_SCALES]
CASES += [(place, DTYPES_WITH_SCALES[0]) for place in ENVIRONMENT]


NEEDS_A_SCALE = (
    "needs a scale for each tensor, and autocast casts without one, so values out of its range would be lost. Legal: "
    "lower_precision_fp (or lower, or fp16: all three mean the region's dtype), fp32, fp32_set_opt_dtype, "
    "fp32_append_dtype, promote, match_self, fallthrough, keep, banned or a floating dtype of 16 bits or more, such as "
    "float16; for linear also float8, which computes scales. For other ops, scale the tensors and call an op that "
    "takes scales, such as F.scaled_mm."
)


@pytest.mark.parametrize(("place", "dtype"), CASES, ids=str)
def test_no_policy_casts_to_a_dtype_that_needs_a_scale(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for given in (dtype, str(dtype), spelled(dtype)):
        with pytest.raises(tp.PolicyError) as error:
            {**PLACES, **ENVIRONMENT}[place](given, tmp_path)
        assert type(error.value) is tp.PolicyError
        assert str(error.value).removesuffix(" Correct it, or unset it.").endswith(f"{dtype} {NEEDS_A_SCALE}")
    assert tp.installed() is None
    assert tp.default_policy() is None
    assert not tp.registered_policies()
