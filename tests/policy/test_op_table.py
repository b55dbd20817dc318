"""The op table: consistent with its C++ form, with the schemas, and with the running PyTorch's autocast registrations.

A new PyTorch that registers other ops fails here with the rows to add or to remove.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.op_registrations import delta_of
from helpers.subprocesses import output_of
from torch_promote import _C
from torch_promote.policy import op_table as module
from torch_promote.policy.op_table import (
    DEVICE_TYPES,
    CastPolicy,
    Row,
    missing_rows,
    op_table,
    registered,
    schema_of,
    unlisted_ops,
)
from torch_promote.policy.overrides import legal_policies

ROWS_HERE = [row for row in op_table() if schema_of(row) is not None]


def spell(row: Row) -> str:
    """A row as it stands in the file."""
    *first, last = (row.policy(device).value for device in DEVICE_TYPES)
    policies = [*(f"{policy + ',':<19}" for policy in first), last]
    more = f", {row.redispatch_overload}" if row.redispatch_overload else ""
    return f"ROW({row.op + ',':<36} {row.overload + ',':<17} {' '.join(policies)}{more})"


def policies_of(row: Row) -> set[CastPolicy]:
    return {row.policy(device) for device in DEVICE_TYPES}


# --- the table and the live dispatcher


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_the_table_has_exactly_the_rows_that_pytorch_registers(device_type: str) -> None:
    """But for the known differences of this PyTorch's version from the table's."""
    aten = {name for name in registered(device_type) if name.startswith("aten::")}
    in_table = {row.name for row in op_table() if row.policy(device_type) is not CastPolicy.fallthrough}
    assert in_table == aten - delta_of(device_type).extra | delta_of(device_type).missing


def test_the_table_is_sorted_and_has_no_row_without_a_policy() -> None:
    names = [(row.op, row.overload) for row in op_table()]
    assert names == sorted(set(names))
    assert not [row.name for row in op_table() if policies_of(row) == {CastPolicy.fallthrough}]


def test_xpu_is_cuda_without_its_libraries_convolutions() -> None:
    differing = {row.op: row.xpu for row in op_table() if row.xpu is not row.cuda}
    assert differing == dict.fromkeys(
        ("cudnn_convolution", "cudnn_convolution_transpose", "flex_attention"), CastPolicy.fallthrough
    )


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_the_known_differences_of_this_version(device_type: str) -> None:
    assert {row.name for row in missing_rows(device_type)} == delta_of(device_type).missing
    assert {name for name in unlisted_ops(device_type) if name.startswith("aten::")} == delta_of(device_type).extra
    gone = {row.name for row in op_table() if schema_of(row) is None}
    assert gone <= frozenset().union(*(delta_of(device).missing for device in DEVICE_TYPES))


def test_the_key_has_kernels_for_the_table_and_the_closed_ops() -> None:
    rows = {row.name for row in ROWS_HERE}
    closed = {name for name in _C.CLOSED_OPS if name.startswith("aten::")}
    assert rows.isdisjoint(closed)
    program = (
        "import torch, torch_promote\n"
        "aten = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith('aten::'))\n"
        "has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print(*(name for name in aten if has_kernel(name, 'AutocastPrivateUse1')))"
    )
    # In a process of its own: overrides give other ops a kernel too.
    assert set(output_of(program).split()) == rows | closed


def test_a_custom_op_counts_from_its_registration_on() -> None:
    with torch.library._scoped_library("tp_registrations", "DEF") as library:
        library.define("scale(Tensor x) -> Tensor")
        assert "tp_registrations::scale" not in registered("cpu")
        library.impl("scale", lambda x: x * 2, "AutocastCPU")
        assert "tp_registrations::scale" in unlisted_ops("cpu")
        assert "tp_registrations::scale" not in unlisted_ops("cuda")
    assert "tp_registrations::scale" not in registered("cpu")


# --- the table, its file, and C++


def test_each_line_of_the_file_is_a_row_that_can_be_pasted() -> None:
    text = Path(module.__file__).with_name("op_policies.def").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line and not line.startswith("//")] == list(map(spell, op_table()))
    assert [row.index for row in op_table()] == list(range(210))


def test_it_is_the_same_in_cpp() -> None:
    assert tuple(row.name for row in op_table()) == _C.OP_ENTRY_NAMES
    assert set(_C.POLICY_BYTES) == {*(policy.name for policy in CastPolicy), "unlisted", "run_in"}
    assert _C.POLICY_BYTES["run_in"] == max(_C.POLICY_BYTES.values())


# --- the table and the schemas


def test_its_policies_are_legal_by_the_schemas() -> None:
    for row in ROWS_HERE:
        assert policies_of(row) <= set(legal_policies(row)), row.name


def test_legality_is_found_in_the_schema() -> None:
    """An op with an optional dtype can have it set, and only norm has an overload to append one."""
    with_dtype = {row.name for row in ROWS_HERE if "ScalarType? dtype" in str(schema_of(row))}
    legal = {row.name: legal_policies(row) for row in ROWS_HERE}
    assert {name for name in legal if CastPolicy.fp32_set_opt_dtype in legal[name]} == with_dtype
    assert {row.op for row in ROWS_HERE if CastPolicy.fp32_append_dtype in legal[row.name]} == {"norm"}
    for row in (row for row in ROWS_HERE if row.redispatch_overload):
        schemas = schema_of(row), schema_of(dataclasses.replace(row, overload=row.redispatch_overload))
        shorter, longer = (
            [(a.name, str(a.type).removeprefix("Optional[").removesuffix("]")) for a in schema.arguments]
            for schema in schemas
            if schema is not None
        )
        assert longer == [*shorter, ("dtype", "int")]
