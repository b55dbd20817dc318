"""The op table: consistent with its C++ form, with the schemas, and with the running PyTorch's autocast registrations.

A new PyTorch that registers other ops fails here with the rows to add or to remove.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Set
from pathlib import Path

import pytest
import torch

import torch_promote
from helpers.op_registrations import delta_of
from helpers.subprocesses import output_of
from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, Row, op_table, parse_table, schema_of

STOCK_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
AUTOCAST_KEY = "AutocastPrivateUse1"
DEF_FILE = Path(torch_promote.__file__).parent / "policy" / "op_policies.def"


@functools.cache
def registered(device_type: str) -> frozenset[str]:
    return aten_ops_with(STOCK_KEYS[device_type])


def aten_ops_with(key: str) -> frozenset[str]:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def spell_row(op: str, overload: str, cpu: str, cuda: str, redispatch: str = "") -> str:
    """A row as it stands in the file, to be pasted there."""
    cuda += f", {redispatch}" if redispatch else ""
    return f"ROW({op + ',':<36} {overload + ',':<17} {cpu + ',':<19} {cuda})"


def spell(row: Row) -> str:
    return spell_row(row.op, row.overload, row.cpu.value, row.cuda.value, row.redispatch_overload)


def complaints(rows: tuple[Row, ...], wanted: Mapping[str, Set[str]]) -> list[str]:
    """The changes to the table that give exactly the wanted rows, in order.

    Args:
        rows: The table.
        wanted: For each device type, the ops that are to have a policy there.

    Returns:
        One line for each row to add, remove, change or move; none if the table is right.
    """
    found: list[str] = []
    for before, row in itertools.pairwise(rows):
        if row.name == before.name:
            found.append(f"remove the second of two rows: {spell(row)}")
        elif (row.op, row.overload) < (before.op, before.overload):
            found.append(f"move this row up, it sorts before {before.name}: {spell(row)}")
    by_name = {row.name: row for row in rows}
    for name in sorted(set(by_name).union(*wanted.values())):
        found += _complaint(name, by_name.get(name), {device: name in wanted[device] for device in DEVICE_TYPES})
    return found


def _complaint(name: str, row: Row | None, wanted: dict[str, bool]) -> list[str]:
    if row is None:
        op, _, overload = name.removeprefix("aten::").partition(".")
        cpu, cuda = (_column(CastPolicy.fallthrough, wanted[device]) for device in DEVICE_TYPES)
        return [f"add (for ? see autocast_mode.cpp and .h of PyTorch): {spell_row(op, overload, cpu, cuda)}"]
    if not any(wanted.values()):
        return [f"remove: {spell(row)}"]
    cpu, cuda = (_column(row.policy(device), wanted[device]) for device in DEVICE_TYPES)
    right = spell_row(row.op, row.overload, cpu, cuda, row.redispatch_overload)
    return [] if right == spell(row) else [f"change to: {right}"]


def _column(policy: CastPolicy, wanted: bool) -> str:
    if not wanted:
        return "fallthrough"
    return "?" if policy is CastPolicy.fallthrough else str(policy.value)


def wanted_here() -> dict[str, frozenset[str]]:
    """The running PyTorch's registrations, corrected by the known differences of its version from the table's."""
    return {device: registered(device) - delta_of(device).extra | delta_of(device).missing for device in DEVICE_TYPES}


# --- the table and the live dispatcher


def test_has_exactly_the_rows_that_pytorch_registers() -> None:
    assert complaints(op_table(), wanted_here()) == []


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_known_differences_of_this_version_are_real(device_type: str) -> None:
    assert delta_of(device_type).extra <= registered(device_type)
    assert not delta_of(device_type).missing & registered(device_type)
    assert delta_of(device_type).missing <= {row.name for row in op_table()}


def test_the_autocast_key_has_kernels_for_the_table_and_the_closed_ops() -> None:
    rows = {row.name for row in op_table() if schema_of(row) is not None}
    closed = {name for name in _C.CLOSED_OPS if name.startswith("aten::")}
    assert rows.isdisjoint(closed)
    program = (
        "import torch, torch_promote\n"
        "aten = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith('aten::'))\n"
        "has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        f"print(*(name for name in aten if has_kernel(name, '{AUTOCAST_KEY}')))"
    )
    # In a process of its own: overrides give other ops a kernel too.
    assert set(output_of(program).split()) == rows | closed


def test_ops_that_this_version_lacks_are_those_that_it_does_not_register() -> None:
    gone = {row.name for row in op_table() if schema_of(row) is None}
    assert gone <= frozenset().union(*(delta_of(device).missing for device in DEVICE_TYPES))


def test_a_row_counts_only_where_pytorch_registers_the_op() -> None:
    expected = [
        [_C.POLICY_BYTES[row.policy(device).value] if row.name in registered(device) else 0 for row in op_table()]
        for device in DEVICE_TYPES
    ]
    # Where 2.13 registers nothing, a row says fallthrough, and the table in force says nothing.
    assert _C.POLICY_BYTES["unlisted"] == 0
    assert _C.stock_policy_bytes() == expected


# --- the comparison itself

MM, BMM, CAT = (next(row for row in op_table() if row.name == f"aten::{op}") for op in ("mm", "bmm", "cat"))
WANTED = {"cpu": {"aten::bmm", "aten::cat", "aten::mm"}, "cuda": {"aten::bmm", "aten::mm"}}


def test_comparison_is_content_with_a_right_table() -> None:
    assert complaints((BMM, CAT, MM), WANTED) == []


def test_comparison_names_a_row_to_add() -> None:
    wanted = {**WANTED, "cpu": WANTED["cpu"] | {"aten::softmax.int"}}
    assert complaints((BMM, CAT, MM), wanted) == [
        "add (for ? see autocast_mode.cpp and .h of PyTorch): "
        "ROW(softmax,                             int,              ?,                  fallthrough)"
    ]


def test_comparison_names_a_row_to_remove() -> None:
    wanted = {"cpu": {"aten::mm"}, "cuda": {"aten::mm"}}
    assert complaints((CAT, MM), wanted) == [f"remove: {spell(CAT)}"]


def test_comparison_names_a_column_to_change() -> None:
    assert complaints((CAT, MM), {"cpu": {"aten::mm"}, "cuda": {"aten::cat", "aten::mm"}}) == [
        "change to: ROW(cat,                                 ,                 fallthrough,        ?)"
    ]


def test_comparison_names_a_misplaced_row() -> None:
    assert complaints((BMM, MM, CAT), WANTED) == [f"move this row up, it sorts before aten::mm: {spell(CAT)}"]


def test_comparison_names_a_duplicate() -> None:
    assert complaints((BMM, CAT, MM, MM), WANTED) == [f"remove the second of two rows: {spell(MM)}"]


@pytest.mark.parametrize("row", op_table(), ids=lambda row: row.name)
def test_taking_any_row_out_is_noticed(row: Row) -> None:
    rest = tuple(other for other in op_table() if other != row)
    (complaint,) = complaints(rest, wanted_here())
    start = spell(row).split(" ")[0]  # "ROW(mm,"
    assert complaint.startswith("add ")
    assert start in complaint


# --- the table and itself


def test_has_the_rows_of_both_device_types() -> None:
    assert len(op_table()) == 207
    counts = {d: sum(row.policy(d) is not CastPolicy.fallthrough for row in op_table()) for d in DEVICE_TYPES}
    assert counts == {"cpu": 127, "cuda": 119}


def test_is_sorted_without_duplicates_and_numbered() -> None:
    keys = [(row.op, row.overload) for row in op_table()]
    assert keys == sorted(set(keys))
    assert [row.index for row in op_table()] == list(range(len(keys)))


def test_is_the_same_in_cpp() -> None:
    assert tuple(row.name for row in op_table()) == _C.OP_ENTRY_NAMES


def test_cast_policies_are_the_same_in_cpp() -> None:
    assert set(_C.POLICY_BYTES) == {*(policy.value for policy in CastPolicy), "unlisted", "run_in"}
    assert _C.POLICY_BYTES["run_in"] == max(_C.POLICY_BYTES.values())


def test_file_is_laid_out_as_rows_are_spelled_here() -> None:
    """So that a row that a failure names can be pasted."""
    lines = [line for line in DEF_FILE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("//")]
    assert lines == [spell(row) for row in op_table()]


# --- the table and the schemas

ROWS_HERE = [row for row in op_table() if schema_of(row) is not None]


@pytest.mark.parametrize("row", ROWS_HERE, ids=lambda row: row.name)
def test_policies_are_legal_by_the_schema(row: Row) -> None:
    assert {row.cpu, row.cuda} <= set(legal_policies(row))


def test_legality_is_found_in_the_schema() -> None:
    """An op with an optional dtype can have it set, one without cannot, and only norm has a form to append it to."""

    def ops_where(policy: CastPolicy) -> set[str]:
        return {row.op for row in ROWS_HERE if policy in legal_policies(row)}

    with_dtype = {row.op for row in ROWS_HERE if "ScalarType? dtype" in str(schema_of(row))}
    assert "softmax" in with_dtype
    assert "mm" not in with_dtype
    assert ops_where(CastPolicy.fp32_set_opt_dtype) == with_dtype
    assert ops_where(CastPolicy.fp32_append_dtype) == {"norm"}


def test_an_op_whose_dtype_is_set_or_appended_starts_with_a_tensor() -> None:
    """These two policies check whether it is eligible."""
    asking = {CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype}
    rows = [row for row in ROWS_HERE if asking & {row.cpu, row.cuda}]
    assert rows
    assert {str(schema_of(row).arguments[0].type) for row in rows} == {"Tensor"}  # type: ignore[union-attr]


@pytest.mark.parametrize("row", [row for row in ROWS_HERE if row.redispatch_overload], ids=lambda row: row.name)
def test_redispatch_overload_takes_the_arguments_and_a_dtype(row: Row) -> None:
    def arguments(of: Row) -> list[tuple[str, str]]:
        schema = schema_of(of)
        assert schema is not None
        return [(a.name, str(a.type).removeprefix("Optional[").removesuffix("]")) for a in schema.arguments]

    longer = dataclasses.replace(row, overload=row.redispatch_overload)
    assert arguments(longer) == [*arguments(row), ("dtype", "int")]
    assert "ScalarType dtype" in str(schema_of(longer))


# --- reading the file


@pytest.mark.parametrize(
    "line",
    [
        "ROW(mm, , fp32)",
        "ROW(mm, , fp32, fp32",
        "ROW(mm, , fp32, fp32, , )",
        "ROW(a.b, , fp32, fp32)",
        "mm fp32 fp32",
        "  # a comment of another language",
    ],
)
def test_a_line_that_is_no_row_is_named_by_file_and_line(line: str) -> None:
    text = f"// a comment\n{spell(MM)}\n\n{line}\n"
    with pytest.raises(PolicyError) as error:
        parse_table(text, "a.def")
    assert str(error.value) == f"a.def:4: not a row: {line!r}. Expected ROW(op, overload, cpu, cuda[, overload])."


def test_an_unknown_policy_in_the_file_is_named_by_file_and_line() -> None:
    with pytest.raises(PolicyError, match=r"^a\.def:2: .*'fp23'"):
        parse_table(f"{spell(BMM)}\nROW(mm, , fp23, fp32)\n", "a.def")


def test_comments_and_blank_lines_are_passed_over() -> None:
    assert parse_table(f"// a\n\n   \n{spell(MM)}\n", "here") == (dataclasses.replace(MM, index=0),)
