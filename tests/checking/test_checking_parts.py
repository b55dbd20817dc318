"""The parts of a crosscheck: comparison, description of a call, known gaps, report."""

from __future__ import annotations

import _thread
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from torch_promote.checking.checker import Checker, StockRun
from torch_promote.checking.comparison import compare, copy_with_strides
from torch_promote.checking.expectation import Finding, expect
from torch_promote.checking.known_gaps import GapError, explained, known_gaps, parse_gaps
from torch_promote.checking.report import CrosscheckReport, Mismatch
from torch_promote.observe.places import calling_line, describe_arguments
from torch_promote.reference.autocast import AutocastState, DeviceAutocast

NAN = float("nan")


def other_nan() -> torch.Tensor:
    return torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("ours", "stock", "kinds"),
    [
        (torch.ones(2), torch.ones(2), []),
        (torch.ones(2), torch.ones(2).double(), ["dtype"]),
        (torch.ones(2), torch.ones(2, 1), ["shape"]),
        (torch.ones(2), torch.ones(2, requires_grad=True), ["requires_grad"]),
        (torch.ones(2), torch.ones(2, device="meta"), ["device"]),
        (torch.eye(2), torch.eye(2).to_sparse(), ["layout"]),
        (torch.ones(2, 3), torch.ones(3, 2).t(), ["strides"]),
        (torch.tensor([0.0]), torch.tensor([-0.0]), ["bits"]),
        (torch.tensor([NAN]), torch.tensor([NAN]), []),
        (torch.tensor([NAN]), other_nan(), ["bits"]),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), ["is_conj"]),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj(), []),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0]), ["is_neg"]),
        (torch.ones(0), torch.ones(0), []),
        ([torch.ones(2)], (torch.ones(2),), ["structure"]),
        ([torch.ones(2), 1], [torch.ones(2), True], ["value"]),
        ([NAN, "a"], [NAN, "a"], []),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), []),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse(), ["bits"]),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse(), ["bits"]),
        (torch.eye(3)[::2, 1:], torch.tensor([[0.0, 0.0], [0.0, 1.0]]), ["strides"]),
    ],
)
def test_comparison(ours: Any, stock: Any, kinds: list[str]) -> None:
    assert [difference.kind for difference in compare(ours, stock)] == kinds


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_comparison_of_nested_tensors() -> None:
    a, b = torch.randn(2, 4), torch.randn(3, 4)
    nested = torch.nested.nested_tensor([a, b])
    assert compare(nested, nested.clone()) == []
    for other in ([a, b + 1], [a, b[:2]], [a]):
        assert [d.kind for d in compare(nested, torch.nested.nested_tensor(other))] == ["bits"]


def test_a_difference_in_bits_says_where() -> None:
    ours, stock = torch.zeros(2, 3), torch.zeros(2, 3)
    ours[1, 2] = 5
    (difference,) = compare(ours, stock)
    assert str(difference) == "result[0]: bits 1 of 6 elements, the first at [1, 2]: 5.0 against 0.0"


def test_a_difference_in_a_dtype_without_numbers() -> None:
    ours, stock = (torch.tensor(bits, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for bits in ([0, 1], [0, 2]))
    with pytest.raises(NotImplementedError):
        ours[1].item()
    (difference,) = compare(ours, stock)
    assert str(difference) == "result[0]: bits 1 of 2 elements, the first at [1]: bytes [1] against bytes [2]"


def test_a_shape_that_the_reference_does_not_expect() -> None:
    two = torch.ones(2)
    found = expect(torch.ops.aten.add.Tensor, [two, two], None).check([torch.ones(3)])
    assert found == Finding("shape", "[2]", "[3]")


def test_an_expectation_of_a_call_with_tensors_of_two_devices() -> None:
    state = AutocastState(
        {"cuda": DeviceAutocast(True, torch.float16), "cpu": DeviceAutocast(True, torch.bfloat16)},
    )
    with FakeTensorMode():
        expectation = expect(torch.ops.aten.mm.default, [torch.ones(2, 2, device=d) for d in ("cuda", "cpu")], state)
    assert expectation.arguments == {"self": torch.float16, "mat2": torch.bfloat16}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_arguments_in_words() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2)])
    args = [
        torch.ones(2, 3).t(),
        torch.ones((), device="meta"),
        torch.eye(2).to_sparse(),
        nested,
        [torch.ones(1), None],
    ]
    assert describe_arguments([*args, torch.int8, "x", 2, {"k": torch.ones(1)}]) == (
        "float32[3, 2] strides (1, 3), float32[] on meta, float32[2, 2] sparse_coo, float32 nested, "
        "[float32[1], None], int8, 'x', 2, {k: float32[1]}"
    )


def test_the_calling_line_is_the_users() -> None:
    def deep() -> str:
        return calling_line()  # this one

    assert deep().startswith(f"{__file__}:")
    assert deep().endswith(" in deep: return calling_line()  # this one")


@pytest.mark.parametrize("folder", ["foo", "vision", "_promote_of_mine"])
def test_a_package_next_to_pytorch_counts_as_the_users(folder: str) -> None:
    file = f"{Path(torch.__file__).parent}{folder}/boxes.py"
    names: dict[str, Any] = {"calling_line": calling_line}
    exec(compile("def area():\n    return calling_line()\n", file, "exec"), names)
    assert names["area"]().startswith(f"{file}:2 in area")
    inside = f"{Path(torch.__file__).parent}/boxes.py"
    exec(compile("def area():\n    return calling_line()\n", inside, "exec"), names)
    assert names["area"]().startswith(f"{__file__}:")


def test_a_mismatch_in_a_thread_that_runs_no_python_says_so() -> None:
    """A thread of autograd has no frames below the checker's."""
    report = CrosscheckReport()
    observer = Checker(report, "dtype", raises=False)
    _thread.start_new_thread(observer._add, (FINDING, torch.ops.aten.add.Tensor, [torch.ones(2), 1]))
    deadline = time.monotonic() + 60
    while not report.mismatches and time.monotonic() < deadline:
        time.sleep(0.001)
    [found] = report.mismatches
    assert found.where == "a thread that runs no Python, such as one of autograd's"
    assert found.arguments == "float32[2], 1"


class TestARunUnderStock:
    def test_it_leaves_the_random_numbers_of_the_gpu_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a GPU: a stand-in for its state."""
        states = [torch.ones(16, dtype=torch.uint8)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[-1].clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
        run = StockRun()
        run.start(torch.ops.aten.relu.default, [torch.ones(2)])
        states.append(torch.zeros(16, dtype=torch.uint8))  # the run draws
        run.stop()
        assert len(states) == 3
        assert torch.equal(states[-1], torch.ones(16, dtype=torch.uint8))
        run.stop()  # does nothing
        assert len(states) == 3


FINDING = Finding("strides", "(1,)", "(2,)")
GAP = '[[call]]\nop = "{op}"\nkind = "{kind}"\nwrong = "pytorch"\nreason = "so it is"\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GAP.format(op="aten::add.*", kind="strides"), True),
        (GAP.format(op="aten::mul.* aten::add.Tensor", kind="strides"), True),
        (GAP.format(op="aten::mul.* aten::add.Scalar", kind="strides"), False),
        (GAP.format(op="aten::mul.*", kind="strides"), False),
        (GAP.format(op="aten::add.*", kind="dtype"), False),
        (GAP.format(op="aten::add.*", kind="strides") + "fake = true\n", False),
    ],
)
def test_a_gap_explains_what_it_names_and_nothing_else(text: str, found: bool) -> None:
    gap = explained(parse_gaps(text, "here").calls, torch.ops.aten.add.Tensor, FINDING, [torch.ones(2)])
    assert (gap is not None) == found


def test_a_gap_of_fake_tensors_is_used_and_counted() -> None:
    """The one that is listed: PyTorch's fake tensors leave the strides of eager."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), tp.crosscheck() as report:
        torch.empty_strided((1, 3, 1, 1), (8, 1, 8, 4)) + torch.empty_strided((1, 3, 1, 1), (3, 1, 1, 1))
    assert dict(report.known_gaps) == {known_gaps().calls[0].reason: 1}
    assert report.mismatches == []
    assert known_gaps().calls[0].reason in str(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[call]\n", "here: "),
        ("[[call]]\nop = '*'\n", "here, call 1: missing kind, reason, wrong."),
        (GAP.format(op="*", kind="size"), "here, call 1: kind is 'size'. Legal: dtype, shape, strides, casts, bits"),
        (GAP.format(op="*", kind="bits") + "dtypes = 1\n", "here, call 1: unknown dtypes."),
    ],
)
def test_bad_gaps(text: str, message: str) -> None:
    with pytest.raises(GapError) as raised:
        parse_gaps(text, "here")
    assert str(raised.value).startswith(message)


def mismatch(op: str) -> Mismatch:
    return Mismatch("dtype", op, "float32[2]", "float16", "float32", "file.py:1 in f: x")


def test_reports_add_up() -> None:
    first, second = CrosscheckReport(), CrosscheckReport()
    first.checked["a"], second.checked["a"], second.checked["b"], second.no_rule["c"] = 1, 2, 3, 4
    second.mismatches.append(mismatch("b"))
    first.add(second)
    assert (first.checked, first.no_rule, first.mismatches) == ({"a": 3, "b": 3}, {"c": 4}, second.mismatches)
    assert (first.calls, first.coverage, first.ok) == (10, 0.6, False)


def test_the_text_of_a_report() -> None:
    report = CrosscheckReport()
    report.checked.update({"aten.mm.default": 3})
    report.no_rule.update({"my.op.default": 1})
    report.mismatches += [mismatch(f"op{i}") for i in range(25)]
    text = str(report)
    assert "checked against the reference          3  75.0% of those with kernels" in text
    assert "without a rule                         1  my.op.default 1" in text
    assert "compared with stock" not in text
    assert text.count("expected float16") == 20
    assert "and 5 more: " in text
    with pytest.raises(tp.CrosscheckError) as raised:
        report.raise_for_mismatches()
    assert str(raised.value) == text
    CrosscheckReport().raise_for_mismatches()


def test_a_report_as_json() -> None:
    report = CrosscheckReport()
    report.checked["a"] = 1
    report.mismatches.append(mismatch("a"))
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["ok"], data["calls"], data["coverage"], data["checked"]) == (False, 1, 1.0, {"a": 1})
    assert data["mismatches"][0]["where"] == "file.py:1 in f: x"


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view])
def test_a_copy_of_a_lazy_view_is_one(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.complex(torch.arange(12.0), torch.ones(12))[::2])
    copy = copy_with_strides(tensor)
    assert torch.equal(copy, tensor)
    assert (copy.is_conj(), copy.is_neg(), copy.stride()) == (tensor.is_conj(), tensor.is_neg(), tensor.stride())
    assert copy.data_ptr() != tensor.data_ptr()


def test_the_report_in_one_line() -> None:
    with tp.crosscheck() as report:
        torch.ones(2).exp()
    assert repr(report) == f"<CrosscheckReport: 0 mismatches in {report.calls} calls>"
    assert report.calls >= 1
