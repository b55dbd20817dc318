"""torch_promote/policy/op_table.py: which rows the running PyTorch lacks, and which of its ops the table lacks."""

from __future__ import annotations

import pytest
import torch

from helpers.op_registrations import STRANGE_ROWS, delta_of
from torch_promote import _C
from torch_promote.errors import UnsupportedDeviceError
from torch_promote.policy import op_table as registrations
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, missing_rows, op_table, registered, unlisted_ops


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_differences_are_those_known_of_this_version(device_type: str) -> None:
    assert {row.name for row in missing_rows(device_type)} == delta_of(device_type).missing
    aten_ops = {name for name in unlisted_ops(device_type) if name.startswith("aten::")}
    assert aten_ops == delta_of(device_type).extra


@pytest.mark.parametrize(("index", "device_type"), list(enumerate(DEVICE_TYPES)))
def test_missing_rows_are_those_that_the_extension_does_not_count(index: int, device_type: str) -> None:
    bytes_in_force = _C.stock_policy_bytes()[index]
    not_counted = {row for row in op_table() if bytes_in_force[row.index] == _C.POLICY_BYTES["unlisted"]}
    with_policy = {row for row in op_table() if row.policy(device_type) is not CastPolicy.fallthrough}
    assert set(missing_rows(device_type)) == not_counted & with_policy


def test_a_table_that_disagrees_is_reported_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "op_table", lambda: STRANGE_ROWS)
    no_such_op, relu, _mm = STRANGE_ROWS
    assert missing_rows("cpu") == (no_such_op, relu)
    assert missing_rows("cuda") == (relu,)
    # All that stock registers, but for the one op that has a policy there.
    assert unlisted_ops("cpu") == tuple(sorted(registered("cpu")))
    assert unlisted_ops("cuda") == tuple(sorted(registered("cuda") - {"aten::mm"}))


def test_a_custom_op_counts_from_its_registration_on() -> None:
    with torch.library._scoped_library("tp_registrations", "DEF") as library:
        library.define("scale(Tensor x) -> Tensor")
        assert "tp_registrations::scale" not in registered("cpu")
        library.impl("scale", lambda x: x * 2, "AutocastCPU")
        assert "tp_registrations::scale" in unlisted_ops("cpu")
        assert "tp_registrations::scale" not in unlisted_ops("cuda")
    assert "tp_registrations::scale" not in registered("cpu")


@pytest.mark.parametrize("function", [registered, missing_rows, unlisted_ops], ids=lambda function: function.__name__)
def test_a_device_type_without_a_column_is_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(UnsupportedDeviceError) as caught:
        function("cudaa")
    assert str(caught.value) == ("the op table has no column for device type 'cudaa'. Legal: 'cpu', 'cuda'.")
