"""`find_nonfinite`: its report of single calls, its options, and restored state."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from helpers.nonfinite_blocks import HALF, NAN, big, find, nothing_is_left, origin_of
from torch_promote.checking.crosscheck import crosscheck
from torch_promote.errors import OptionError
from torch_promote.numerics.find_nonfinite import NonfiniteError, NonfiniteReport, find_nonfinite
from torch_promote.observe.trace import trace

__all__ = ["nothing_is_left"]  # a fixture


def test_op_and_the_op_inside_it() -> None:
    def program() -> None:
        with tp.my_autocast("cpu", HALF):
            nn.functional.linear(big(200.0), big(200.0), torch.ones(4))

    assert origin_of(program) == ("aten::linear", "aten::addmm", "overflow in the op")


def test_cast_names_its_argument() -> None:
    def program() -> None:
        with tp.my_autocast("cpu", HALF):
            torch.mm(big(1.0), big(1e6))

    report = find(program)
    assert report.origin is not None
    assert (report.origin.op, report.origin.inner) == ("aten::mm", "aten::_to_copy")
    assert (report.origin.kind, report.origin.argument) == ("overflow in a cast", "mat2")


def test_cast_that_was_made_before_the_block() -> None:
    weight = big(1e6).requires_grad_()
    with tp.my_autocast("cpu", HALF):
        torch.mm(big(0.0), weight)
        report = find(lambda: torch.mm(big(1.0), weight))
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind, report.origin.argument) == ("aten::mm", "overflow in a cast", "mat2")


def test_an_overflow_of_bfloat16() -> None:
    def program() -> None:
        with tp.my_autocast("cpu"):
            torch.mm(big(1e30), big(1e30))

    report = find(program)
    assert report.origin is not None
    assert report.origin.kind == "mathematics"


def test_inputs_have_their_ranges_from_before_the_call() -> None:
    def program() -> None:
        x = torch.tensor([1.0, -300.0], dtype=HALF)
        x.mul_(300.0)

    origin = find(program).origin
    assert origin is not None
    (given,) = [one for one in origin.inputs if one.name == "self"]
    assert (given.min, given.max, given.infs) == (-300.0, 1.0, 0)
    assert (origin.outputs[0].min, origin.outputs[0].max, origin.outputs[0].infs) == (300.0, 300.0, 1)
    wide = find(lambda: torch.zeros(2).log_()).origin
    assert wide is not None
    assert (wide.kind, wide.inputs[0].min) == ("mathematics", 0.0)


def test_line_module_phase_and_node() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    model = nn.Sequential(nn.Identity(), nn.Sequential(Root()))
    x = torch.zeros(2, requires_grad=True)
    report = find(lambda: (model(x) * 0).sum().backward(), model=model)
    assert report.origin is not None
    assert (report.origin.module, report.origin.phase, report.origin.node) == ("1.0", "backward", "SqrtBackward0")
    assert Path(report.origin.line.rpartition(":")[0]).name == "test_nonfinite.py"
    assert report.origin.call.op == report.origin.op == "aten::div"


def test_nan_in_the_data_has_a_kind_of_its_own() -> None:
    data = torch.tensor([1.0, NAN])
    assert origin_of(lambda: data * 2) == ("aten::mul", "aten::mul.Tensor", "data")
    assert origin_of(lambda: data.nan_to_num()) is None
    assert origin_of(lambda: torch.where(data.isnan(), 0.0, data)) is None


def test_tensors_of_every_kind_can_be_checked() -> None:
    def program() -> None:
        torch.ones(3, dtype=torch.complex64).exp()
        torch.eye(3).to_sparse().mul(2)
        torch.eye(3).to_sparse_csr().mul(2)
        torch.ones(0).exp()
        torch.ones(2, device="meta").exp()
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).exp()
        torch.vmap(torch.exp)(torch.ones(2, 3))
        torch.func.grad(lambda x: x.exp().sum())(torch.ones(2))
        with torch.inference_mode():
            torch.ones(2).exp_()

    report = find(program)
    assert not report.found
    assert report.checked
    assert origin_of(lambda: torch.zeros(2, dtype=torch.complex64).log()) is not None
    assert origin_of(lambda: torch.zeros(2, 2).to_sparse().coalesce().log1p()) is None


def test_raise_at_first_raises_at_the_call() -> None:
    after = []

    def program() -> None:
        torch.log(torch.zeros(2))
        after.append(1)

    with pytest.raises(NonfiniteError, match=r"mathematics: aten::log") as caught:
        find(program, raise_at_first=True)
    assert not after
    assert caught.value.origin.line.endswith(f":{program.__code__.co_firstlineno + 1}")
    assert isinstance(caught.value, ArithmeticError)


def test_raise_at_first_in_a_backward() -> None:
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(NonfiniteError, match="backward"), find_nonfinite(raise_at_first=True) as report:
        (x.sqrt() * 0).sum().backward()
    assert report.found
    assert torch.ones(2).log().isfinite().all()


@pytest.mark.parametrize("name", ["log", "aten::log", "0", "test_nonfinite.py:{line}"])
def test_allow(name: str) -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    model = nn.Sequential(Log())
    line = Log.forward.__code__.co_firstlineno + 1
    report = find(lambda: model(torch.zeros(2)).exp(), model=model, allow=(name.format(line=line),))
    assert not report.found, str(report)
    assert [one.kind for one in report.benign] == ["allowed"]
    assert find(lambda: model(torch.zeros(2)), model=model, allow=("exp", "1", "test_nonfinite.py:1")).found


@pytest.mark.parametrize("allow", ["log", [1], [""]])
def test_a_wrong_allow_raises(allow: Any) -> None:
    with pytest.raises(OptionError, match="allow"), find_nonfinite(allow=allow):
        pass


def test_an_error_in_the_block_leaves_nothing() -> None:
    def program() -> None:
        torch.log(torch.zeros(2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), find_nonfinite() as report:
        program()
    assert report.found
    with pytest.raises(RuntimeError, match="size"), find_nonfinite():
        torch.ones(2) + torch.ones(3)


def test_keeps_no_tensor_alive() -> None:
    import weakref

    with find_nonfinite() as report:
        x = torch.ones(4).mul_(3)
        y = torch.mm(big(300.0, HALF), big(300.0, HALF))
        references = [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [reference() for reference in references] == [None, None]
    assert report.found


def test_random_numbers_are_those_of_the_program() -> None:
    def program() -> Tensor:
        torch.manual_seed(0)
        with tp.my_autocast("cpu", HALF):
            nn.functional.dropout(big(60000.0, HALF), 0.5)
        return torch.rand(2)

    with find_nonfinite() as report:
        found = program()
    assert report.found
    assert torch.equal(found, program())


def test_inside_and_around_other_observers() -> None:
    with trace(values=True) as outer:
        assert origin_of(lambda: torch.log(torch.zeros(1))) == ("aten::log", "aten::log", "mathematics")
    assert [call.values[0].infs for call in outer.calls.where(op="log")] == [1.0]
    with find_nonfinite() as report:
        with trace() as inner, crosscheck():
            torch.log(torch.zeros(1))
        assert report.found
    assert len(inner.calls.where(op="log")) == 1


def test_grad_scaler_is_recognized_inside_of_a_trace() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with trace(), find_nonfinite(model) as report:
        with tp.my_autocast("cpu", HALF):
            loss = model(torch.ones(2, 4)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not report.found, str(report)
    assert [one.scale for one in report.benign] == [2.0**40]


def test_other_threads_are_not_seen() -> None:
    with find_nonfinite() as report:
        thread = threading.Thread(target=lambda: torch.log(torch.zeros(1)))
        thread.start()
        thread.join()
    assert not report.found
    assert len(report.not_seen) == 1
    assert "Threads started in the block: 1" in " ".join(str(report).split())


def test_report_as_text_and_json(tmp_path: Path) -> None:
    report = find(lambda: torch.log(torch.zeros(2)))
    report.save(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["found"]
    assert data["origin"]["op"] == "aten::log"
    assert data["origin"]["inputs"][0]["max"] == 0.0
    report.save(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text().startswith("mathematics: aten::log")
    clean = find(lambda: torch.ones(2).exp())
    assert "no inf or NaN" in str(clean)
    assert clean.to_dict()["origin"] is None


def test_a_report_that_cannot_be_saved_says_why(tmp_path: Path) -> None:
    with find_nonfinite() as report:
        pass
    with pytest.raises(OptionError, match=r"cannot save the report as .*nowhere"):
        report.save(tmp_path / "nowhere" / "nan.json")


def test_the_model_has_to_be_a_module() -> None:
    with pytest.raises(OptionError, match=r"model must be an nn.Module or None, got 'model'"), find_nonfinite("model"):  # type: ignore[arg-type]
        pass


def test_benign_calls_are_counted_in_words() -> None:
    with find_nonfinite() as report:
        torch.zeros(2).masked_fill(torch.tensor([True, False]), -math.inf)
    assert str(report.benign[0]).endswith(", 1 call")


def test_a_report_can_be_pickled_and_copied() -> None:
    model = nn.Linear(2, 2)
    with find_nonfinite(model) as report, tp.my_autocast("cpu", torch.float16):
        model(torch.ones(1, 2)).masked_fill(torch.ones(1, 2, dtype=torch.bool), -math.inf)
        torch.mm(torch.full((2, 2), 300.0), torch.full((2, 2), 300.0))
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again.to_dict() == report.to_dict()
        assert str(again) == str(report)
        assert (again.checked, again.benign) == (report.checked, report.benign)
        assert again.ops_in("") == report.ops_in("") != []
        assert again.origin.call.op == "aten::mm"
        assert again.suggest(lambda: torch.ones(1)) is None


def test_a_report_whose_block_has_not_begun_is_empty() -> None:
    report = NonfiniteReport(None, ())
    assert (report.found, report.checked, report.benign) == (False, 0, [])
    assert report.ops_in("") == report.ops_at("", "") == []


def test_a_model_that_was_not_called() -> None:
    with find_nonfinite(nn.Linear(2, 2)) as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert report.not_seen == [
        "The given model was not called in the block, so calls have no module paths. "
        "Pass the module that the program calls, such as the wrapped one, or no model."
    ]
