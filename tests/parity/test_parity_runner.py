"""torch_promote/parity/runner.py and its parts: entries, samples, known gaps, and coverage of all rows."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from helpers.planted_bugs import change_results, other_values
from helpers.rows import ROWS, listed
from torch_promote.checking.comparison import compare
from torch_promote.errors import OptionError
from torch_promote.parity import op_database
from torch_promote.parity.devices import check_device, on_device
from torch_promote.parity.model import Entry, Options
from torch_promote.parity.outcome import copied
from torch_promote.parity.runner import entries, run_entry
from torch_promote.parity.samples import LISTED, NotGenerated, Sample, samples
from torch_promote.policy.op_table import registered

OURS = "ours against stock"


def test_entries_have_names_of_their_own_and_a_fixed_order() -> None:
    everything = entries(Options("cpu"))
    assert len({entry.name for entry in everything}) == len(everything)
    assert entries(Options("cpu")) == everything
    assert {entry.source for entry in everything} == {"row", "promotion", "autocast_lists", "op_db"}
    assert [entry.name for entry in everything if entry.source == "row"] == [row.name for row in ROWS]


@pytest.mark.parametrize("device", ["cpu", "fake-cuda"])
def test_every_row_with_a_policy_is_reached_and_agrees(device: str) -> None:
    options = Options(device, dtypes=("float32",))
    wanted = [row.name for row in ROWS if listed(row, options.device_type)]
    results = [run_entry(Entry(name, "row"), options) for name in wanted]
    assert [result.entry.name for result in results if result.entry.name not in result.rows] == []
    assert [mismatch.text for result in results for mismatch in result.mismatches] == []


def test_no_row_is_left_out_on_both_devices() -> None:
    known = registered("cpu") | registered("cuda")  # an older PyTorch may register nothing of a row
    assert [row.name for row in ROWS if row.name in known and not any(listed(row, d) for d in ("cpu", "cuda"))] == []


def test_options_and_results_can_be_pickled() -> None:
    options = Options("cpu", dtypes=("float32",))
    result = run_entry(Entry("mm", "op_db"), options)
    assert pickle.loads(pickle.dumps((options, result))) == (options, result)


def error_of(options: Options) -> str:
    with pytest.raises(OptionError) as error:
        entries(options)
    return str(error.value)


def test_any_device_type_is_checked_without_ours() -> None:
    options = Options("meta", ops=("aten::*", "mul"), stock_only=True)
    with pytest.raises(OptionError, match="no entry is called 'aten::"):  # no rows: the table has no column for it
        entries(options)
    result = run_entry(Entry("mul", "op_db"), Options("meta", ops=("mul",), quick=True, stock_only=True))
    assert (result.mismatches, result.rows) == ((), frozenset())
    assert result.checked["aten.mul.Tensor"] > 0
    with pytest.raises(OptionError, match="cannot make a tensor on device 'gpu'"):
        entries(Options("gpu", stock_only=True))


def test_a_selection_without_matches_is_an_error() -> None:
    assert_expected_inline(
        error_of(Options("gpu")),
        """'gpu' is not a device. Legal: cpu, cuda, fake-cuda, cuda-stand-in, and with --stock-only every device type of this PyTorch. Closest: cpu.""",  # noqa: E501
    )
    assert_expected_inline(
        error_of(Options("cpu", ops=("aten::mn",))),
        """no entry is called 'aten::mn'. Closest: aten::mv, aten::mm, aten::tan.""",
    )
    assert_expected_inline(
        error_of(Options("cpu", dtypes=("floot32",))),
        """'floot32' is not a dtype of PyTorch. Closest: float32, float, cfloat.""",
    )
    assert_expected_inline(
        error_of(Options("cpu", ops=("aten::mm",), dtypes=("int8",))),
        """no sample of the selected entries has dtype 'int8'. Legal: bfloat16, complex64, float32, float64, int64.""",
    )
    assert_expected_inline(
        error_of(Options("cpu", ops=("mm", "aten::mm"), sample="float32/0/plain")),
        """--sample 'float32/0/plain' needs one entry, but 2 are selected. Name one op.""",
    )
    assert_expected_inline(
        error_of(Options("cpu", autocast_dtype="int8")), """the autocast dtype 'int8' is not a floating dtype."""
    )
    with pytest.raises(OptionError) as error:
        run_entry(Entry("mm", "op_db"), Options("cpu", sample="float32/0/miked"))
    assert_expected_inline(
        str(error.value),
        """mm has no sample 'float32/0/miked'. Closest: float32/0/mixed, float32/2/mixed, float32/1/mixed.""",
    )


def test_the_stand_in_without_its_process_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"this process was not started for device 'cuda-stand-in'\. Use"):
        check_device("cuda-stand-in")


def test_devices_in_samples_become_fake_too() -> None:
    sample = SimpleNamespace(input=torch.ones(2), args=("cpu", 2), kwargs={"device": torch.device("cpu"), "dim": 0})
    with on_device(Options("fake-cuda")):
        faked = op_database._on_fake_cuda(sample)
    assert faked.input.device.type == "cuda"
    assert (faked.args, faked.kwargs) == (("cuda", 2), {"device": "cuda", "dim": 0})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error() -> None:
    assert_expected_inline(
        error_of(Options("cuda")),
        """device 'cuda' needs a GPU, but PyTorch finds none. Without a GPU, use fake-cuda or cuda-stand-in.""",
    )


@pytest.mark.parametrize(
    ("name", "source"),
    [("aten::mm", "row"), ("torch_16.mm", "autocast_lists"), ("bmm", "op_db"), ("nn.functional.dropout", "op_db")],
)
def test_a_sample_is_the_same_alone(monkeypatch: pytest.MonkeyPatch, name: str, source: Any) -> None:
    change_results(monkeypatch, other_values)
    entry = Entry(name, source)
    together = run_entry(entry, Options("cpu")).mismatches
    labels = sorted({mismatch.sample for mismatch in together if mismatch.kind == "bits"})
    assert len(labels) > 1 or source == "autocast_lists"
    for label in reversed(labels[:12]):
        torch.rand(7)
        alone = run_entry(entry, Options("cpu", sample=label))
        assert alone.samples == 1
        assert alone.mismatches == tuple(mismatch for mismatch in together if mismatch.sample == label)


def inputs(entry: Entry, options: Options) -> Iterator[tuple[str, Any]]:
    with on_device(options):
        for sample in samples(entry, options):
            assert isinstance(sample, Sample)
            yield sample.label, (sample.bound[1], sample.bound[2])


def test_samples_do_not_depend_on_what_ran_before() -> None:
    options = Options("cpu", dtypes=("float32", "bfloat16"))
    for name in ("add", "linalg.eigh", "nn.functional.ctc_loss", "index_add"):
        entry = Entry(name, "op_db")
        first = dict(inputs(entry, options))
        torch.rand(3)
        second = dict(inputs(entry, options))
        assert first.keys() == second.keys()
        assert [label for label in first if compare(first[label], second[label])] == []


def test_mixed_inputs_are_of_both_dtypes_by_turns() -> None:
    made = dict(inputs(Entry("baddbmm", "op_db"), Options("cpu", dtypes=("float32",))))
    args, _ = made["float32/0/mixed"]
    assert [arg.dtype for arg in args] == [torch.float32, torch.bfloat16, torch.float32]
    plain, _ = made["float32/0/plain"]
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(plain, args, strict=True))


def test_an_op_that_has_no_samples_in_the_regions_dtype_gets_them_cast() -> None:
    made = dict(inputs(Entry("linalg.det", "op_db"), Options("cpu", dtypes=("float32",))))
    assert made["float32/0/lower"][0][0].dtype is torch.bfloat16
    assert "float32/0/lower" not in dict(inputs(Entry("mm", "op_db"), Options("cpu", dtypes=("float32",))))


def test_quick_takes_some_samples_of_every_entry() -> None:
    chosen = entries(Options("cpu", quick=True))
    assert chosen == entries(Options("cpu"))
    quick = dict(inputs(Entry("nn.functional.linear", "op_db"), Options("cpu", quick=True)))
    assert quick.keys() == {
        f"{dtype}/{number}/{kind}"
        for number in range(3)
        for dtype, kind in (("bfloat16", "plain"), ("float32", "plain"), ("float32", "mixed"))
    }


def test_what_cannot_be_generated_is_counted() -> None:
    result = run_entry(Entry("sparse.mm.reduce", "op_db"), Options("fake-cuda", dtypes=("float32",)))
    assert result.samples == 0
    assert list(result.not_generated) == ["float32"]
    assert "layout" in result.not_generated["float32"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_samples_that_need_a_gpu_are_refused() -> None:
    result = run_entry(Entry("geqrf", "op_db"), Options("fake-cuda", dtypes=("float32",)))
    assert (result.refused, result.mismatches) == (result.samples, ())
    assert result.samples > 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6)[::2, 1::3],
        torch.rand(3, 1).expand(3, 4),
        torch.rand(2, 3, dtype=torch.complex64).mT.conj(),
        torch.rand(2, 2, dtype=torch.complex64).conj().imag,
        torch.rand(0, 3),
        torch.rand(6).as_strided((2, 3), (1, 1)),
        torch.rand(3, 4).to_sparse(),
    ],
    ids=["gaps", "expanded", "conjugate", "negative", "empty", "overlapping", "sparse"],
)
def test_copies_have_the_strides_and_values(tensor: torch.Tensor) -> None:
    (copy,) = copied([tensor])
    assert compare(copy, tensor) == []
    assert (copy.is_conj(), copy.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if tensor.layout is torch.strided and tensor.numel():
        assert copy.data_ptr() != tensor.data_ptr()


def test_a_tensor_that_occurs_twice_stays_one() -> None:
    tensor = torch.rand(2, requires_grad=True)
    first, (second,) = copied([tensor, (tensor,)])
    assert first is second
    assert first.requires_grad


def test_labels_name_their_samples_once() -> None:
    for entry in (Entry("aten::mm", "row"), Entry("torch_16.mm", "autocast_lists"), Entry("addmm", "op_db")):
        options = Options("cpu")
        with on_device(options):
            made = [s for s in samples(entry, options) if not isinstance(s, NotGenerated)]
        labels = [sample.label for sample in made]
        assert len(labels) == len(set(labels))
        assert all(label.count("/") == 2 for label in labels)
        assert entry.source != "autocast_lists" or labels[0].startswith(LISTED)
