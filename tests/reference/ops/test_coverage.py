"""The op rules over PyTorch's own op database: some samples of each op in each dtype; `op_db_coverage.py` runs all."""

from __future__ import annotations

import pytest
import torch

from helpers.op_db_coverage import LEAST_COVERED, Run, backward, measure, op_db, variants
from torch_promote.reference.ops.infer import Entry, Term, rule_table

ADD = [op for op in op_db if op.name == "add"]


def test_op_db() -> None:
    result = measure(limit=5)
    assert result.wrong == {}, str(result)
    assert result.covered >= LEAST_COVERED, str(result)
    assert len(result.ruled) > 400
    # jiterator's ops are compiled for a GPU, whatever the tensors are; older releases have no CPU kernel of the other.
    refused = {name for name in result.refused if not name.startswith("jiterator_")}
    assert refused <= {"torch._scaled_mm_v2"}


@pytest.mark.parametrize("run", [backward, variants])
def test_gradients_and_variants(run: Run) -> None:
    result = measure(run=run, limit=1)
    assert result.wrong == {}, str(result)
    assert result.unruled == {}, str(result)


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Entry("aten::add.Tensor", (Term("bool", ()),), "elementwise")
    monkeypatch.setitem(rule_table(), "aten::add.Tensor", wrong)
    result = measure(ADD)
    assert list(result.wrong) == ["aten.add.Tensor"]
    assert "dtypes" in result.wrong["aten.add.Tensor"]


def test_wrong_strides_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Entry("aten::add.Tensor", (Term("binary", ("other", "self")),), "elementwise")
    monkeypatch.setitem(rule_table(), "aten::add.Tensor", wrong)
    with torch.no_grad():
        rows, columns = torch.ones(3, 2).t(), torch.ones(2, 6)[:, ::2]
        result = measure([_Calls(rows, columns)])
    assert "strides" in result.wrong["aten.add.Tensor"]


def test_a_missing_rule_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rule_table(), "aten::add.Tensor")
    result = measure(ADD)
    assert list(result.unruled) == ["aten.add.Tensor"]
    assert result.covered < 1


class _Calls:
    """Stands for an entry of the op database: torch.add with one pair of operands."""

    name = "add"

    def __init__(self, *operands: torch.Tensor) -> None:
        self.operands = operands

    def supported_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float32}

    def sample_inputs_func(self, op: _Calls, device: str, dtype: torch.dtype, requires_grad: bool) -> list[_Calls]:
        return [self]

    input = property(lambda self: self.operands[0])
    args = property(lambda self: self.operands[1:])
    kwargs: dict[str, object] = {}  # noqa: RUF012 # never changed

    def __call__(self, *operands: torch.Tensor) -> torch.Tensor:
        return torch.add(*operands)
