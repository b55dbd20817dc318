"""docs/found_in_pytorch.md and its reports: PyTorch still prints what they say. A fix in PyTorch makes a test fail."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.doc_blocks import ROOT
from torch_promote import reference
from torch_promote.reference import infer
from torch_promote.reference.promotion import PromotionError
from torch_promote.reference.strides import has_internal_overlap

aten = torch.ops.aten
INDEX = (ROOT / "docs" / "found_in_pytorch.md").read_text(encoding="utf-8")
REPORTS = sorted((ROOT / "docs" / "found_in_pytorch").glob("*.md"))
#: What a report consists of; the script and what it prints are groups.
PARTS = (
    "# .+\n\nFound in PyTorch .+\n\n```python\n(.+?)```\n\nExpected: .+\n\n"
    "Got.*?:\n\n```text\n(.+?)```\n\nCause: .+\n\nSuggested fix: .+"
)
SINGLE, HALF, INTS = torch.zeros(2, 2), torch.zeros(2, 2).half(), torch.tensor([1, 3])


@pytest.mark.parametrize(
    "report",
    # Inductor compiles C++ for it.
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem == "index_copy")) for path in REPORTS],
)
def test_report(report: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    text = report.read_text(encoding="utf-8")
    parts = re.fullmatch(PARTS, text, re.DOTALL)
    assert parts
    assert f"- [{text.partition(chr(10))[0].removeprefix('# ')}](found_in_pytorch/{report.name})" in INDEX
    module = types.ModuleType("report")  # the compiler looks the names of a function up in its module
    monkeypatch.setitem(sys.modules, "report", module)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(parts[1], str(report), "exec"), vars(module))
    assert printed.getvalue() == parts[2]


def test_the_index_has_each_report() -> None:
    assert INDEX.count("(found_in_pytorch/") == len(REPORTS) == 6


def outcome(call: Callable[[], Any]) -> Any:
    """The call's result, described, or the type of its error."""
    try:
        result = call()
    except (RuntimeError, PromotionError) as error:
        return RuntimeError if isinstance(error, PromotionError) else type(error)
    return (result.dtype, result.stride()) if isinstance(result, torch.Tensor) else result


def sliced_and_plain() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_strided((1, 3, 1, 1), (8, 1, 8, 4)), torch.empty(1, 3, 1, 1)


#: What eager PyTorch returns for a call, what fake tensors return, and what the reference says.
KNOWN: dict[str, tuple[Callable[[], Any], Any, Any, Any]] = {
    "abs": (
        lambda: torch.abs(torch.tensor([3 + 4j]), out=torch.empty(1, dtype=torch.complex64)),
        (torch.complex64, (1,)), RuntimeError, None,
    ),
    "an expanded tensor": (
        lambda: torch.zeros(1).expand(2, 2).add_(1),
        RuntimeError, (torch.float32, (0, 0)), lambda: has_internal_overlap((2, 2), (0, 0)) and RuntimeError,
    ),
    "a resized output": (
        lambda: torch.add(torch.zeros(2, 3).t(), 1, out=torch.empty(0)),
        (torch.float32, (1, 3)), (torch.float32, (2, 1)),
        lambda: (torch.float32, infer(aten.add.out, (torch.zeros(2, 3).t(), 1), {"out": torch.empty(0)}).strides),
    ),
    "mm": (lambda: torch.zeros(2, 2).half() @ torch.zeros(2, 2), RuntimeError, (torch.float16, (2, 1)),
           lambda: infer(aten.mm.default, (HALF, SINGLE))),
    "addmm": (lambda: torch.addmm(torch.zeros(2, 2), torch.zeros(2, 2).half(), torch.zeros(2, 2).half()),
              RuntimeError, (torch.float32, (2, 1)), lambda: infer(aten.addmm.default, (SINGLE, HALF, HALF))),
    "add_ to integers": (lambda: torch.tensor([1, 3]).add_(1.5), RuntimeError, RuntimeError,
                         lambda: reference.can_cast(torch.float32, torch.int64) or RuntimeError),
    "mul_ of integers": (lambda: torch.tensor([1, 3]).mul_(1.5), RuntimeError, (torch.int64, (1,)),
                         lambda: reference.can_cast(torch.float32, torch.int64) or RuntimeError),
    "mul_ of bool": (lambda: torch.ones(2, dtype=torch.bool).mul_(2), RuntimeError, (torch.bool, (1,)), None),
    "add_ of complex": (lambda: torch.zeros(2).add_(1j), RuntimeError, (torch.float32, (1,)),
                        lambda: reference.can_cast(torch.complex64, torch.float32) or RuntimeError),
    "mul_ of complex": (lambda: torch.zeros(2).mul_(1j), RuntimeError, (torch.float32, (1,)), None),
    "strides": (
        lambda: torch.add(*sliced_and_plain()), (torch.float32, (3, 1, 1, 1)), (torch.float32, (3, 1, 3, 3)),
        lambda: (torch.float32, infer(aten.add.Tensor, sliced_and_plain()).strides),
    ),
    "uint16": (lambda: torch.zeros(2, dtype=torch.uint16) + torch.zeros(2, dtype=torch.int32),
               RuntimeError, (torch.uint16, (1,)),
               lambda: infer(aten.add.Tensor, (torch.zeros(2, dtype=torch.uint16), INTS.int()))),
    "index_copy": (lambda: torch.index_copy(torch.zeros(2), 0, torch.tensor([0]), torch.zeros(1).half()),
                   RuntimeError, (torch.float32, (1,)),
                   lambda: infer(aten.index_copy.default, (torch.zeros(2), 0, torch.tensor([0]), HALF[0]))),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_fake_tensors_differ_from_eager_mode(name: str) -> None:
    call, eager, fake, expected = KNOWN[name]
    assert outcome(call) == eager
    with FakeTensorMode():
        assert outcome(call) == fake
    if expected is not None:
        assert outcome(expected) == eager


def test_the_reference_refuses_an_empty_product_of_two_dtypes() -> None:
    with pytest.raises(PromotionError, match="aten::bmm takes tensors of one dtype, got bfloat16 and "):
        infer(aten.bmm.default, (torch.zeros(0, 2, 2, dtype=torch.bfloat16), torch.zeros(0, 2, 2)))


@pytest.mark.parametrize(("function", "x", "result"), [
    (lambda x: x.mul_(1.5), [1, 3], [1, 4]), (lambda x: x.expand(2, 2).add_(1), [0.0], [[4.0, 4.0], [4.0, 4.0]]),
])  # fmt: skip
def test_compiled_code_that_eager_mode_refuses(function: Any, x: Any, result: Any, fresh_dynamo: None) -> None:
    assert outcome(lambda: function(torch.tensor(x))) is RuntimeError
    assert torch.compile(function, backend="aot_eager")(torch.tensor(x)).tolist() == result
