"""Recordings: what calls read, where tensors come from, what a step left, and the file."""

from __future__ import annotations

import errno
import gc
import gzip
import json
import os
import random
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.autoloading import entry_point, folder
from helpers.subprocesses import Program, output_of
from helpers.traced_commands import command_run, warm
from torch_promote.errors import OptionError
from torch_promote.observe import places
from torch_promote.observe.call import COMPILED_FUNCTION, Call
from torch_promote.observe.observer import OpenCall
from torch_promote.observe.ops import OpFacts
from torch_promote.reading.trace import Tracer
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording import file as recording_file
from torch_promote.recording import recorder, values
from torch_promote.recording.file import SUFFIX
from torch_promote.recording.program_state import OptimizerStates, generator_states
from torch_promote.recording.recorder import Recorder
from torch_promote.recording.recording import Recording
from torch_promote.recording.values import EMPTY, Values

__all__ = ["entry_point", "folder", "warm"]  # fixtures


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 3))


def train(model: nn.Module, steps: int = 2, **options: Any) -> TraceReport:
    optimizer = torch.optim.AdamW(model.parameters())
    with tp.trace(model, values=True, **options) as report:
        for _ in range(steps):
            with tp.my_autocast("cpu"):
                loss = model(torch.ones(4, 6)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


# --- what calls read


def traced(function: Callable[..., object], *tensors: Any, model: nn.Module | None = None) -> TraceReport:
    with tp.trace(model, values=True) as report:
        function(*tensors)
    return report


def reads_of(report: TraceReport, op: str, number: int = 0) -> list[list[str]]:
    """What a call reads: the ops that wrote it, or "parameter NAME", "buffer NAME", "input"."""

    def name(one: int) -> str:
        if one >= 0:
            return report.calls[one].op.removeprefix("aten::")
        source = report.sources[-1 - one]
        return f"{source.kind} {source.name}".strip()

    found = [i for i, call in enumerate(report.calls) if call.own and call.op == f"aten::{op}"][number]
    return [[name(one) for one in read.written_by] for read in report.reads[found]]


def in_place(x: torch.Tensor) -> None:
    y = x.exp()
    y.add_(1)
    y.sin()


def half_of_it(x: torch.Tensor) -> None:
    y = x.exp()
    y[:1].add_(1)
    y.sin()


def through_views(x: torch.Tensor) -> None:
    x.exp().view(-1)[1:].detach().contiguous().sin()


def a_copying_reshape(x: torch.Tensor) -> None:
    x.t().reshape(-1).sin()


def into_out(x: torch.Tensor) -> None:
    y = torch.empty(2, 2)
    torch.exp(x, out=y)
    y.sin()


def behind_the_back(x: torch.Tensor) -> None:
    x.cos()
    torch._C._increment_version([x])  # as the kernel of another library does
    x.sin()


def read_by_numpy(x: torch.Tensor) -> None:
    y = x.exp()
    y.numpy().sum()
    y.sin()


def written_by_numpy(x: torch.Tensor) -> None:
    y = x.exp()
    y.numpy()[0] = 9
    y.view(-1).sin()


def a_list(x: torch.Tensor) -> None:
    ys = [x.exp(), x.cos()]
    torch._foreach_add_(ys, 1)
    ys[1].sin()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: x.sin(), [["input"]]),
        (in_place, [["add_"]]),
        (half_of_it, [["exp", "add_"]]),
        (through_views, [["exp"]]),
        (a_copying_reshape, [["reshape"]]),
        (into_out, [["exp"]]),
        (behind_the_back, [["input"]]),
        (read_by_numpy, [["exp"]]),
        (written_by_numpy, [["input"]]),
        (a_list, [["_foreach_add_"]]),
        (torch.inference_mode()(through_views), [["exp"]]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_a_call_reads(program: Callable[..., object], expected: list[list[str]]) -> None:
    report = traced(program, torch.eye(2))
    assert reads_of(report, "sin") == expected


def test_values_belong_to_their_calls_if_two_threads_add_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has a thread for each device. Here, another one adds a call while the first is adding its own."""
    ended, count, others, fives = Recorder.ended, Recording.add, [], torch.full((2,), 5.0)

    def added(recorder: Recorder, of: OpenCall, call: Call, results: list[torch.Tensor]) -> None:
        def counted(report: Recording, call: Call) -> int | None:
            number = count(report, call)
            if not others:
                others.append(threading.Thread(target=ended, args=(recorder, of, replace(call), [fives])))
                others[0].start()
                others[0].join(0.1)  # it waits for this call to be added
            return number

        monkeypatch.setattr(Recording, "add", counted)
        ended(recorder, of, call, results)

    monkeypatch.setattr(Recorder, "ended", added)
    with tp.trace(values=True) as report:
        torch.full((2,), 7.0)
        others[0].join()
    assert [values[0].amax for values in report.values.values()] == [7.0, 5.0]


def test_sources_have_their_numbers_if_two_threads_read_some(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, values_of, others, fives = Recorder.begun, Recorder._values_of, [], torch.full((2,), 5.0)

    def begins(recorder: Recorder, call: OpenCall) -> Any:
        def measured(recorder: Recorder, tensor: torch.Tensor) -> Values:
            if not others:
                of_other = replace(call, args=[fives], read=[fives])
                others.append(threading.Thread(target=begun, args=(recorder, of_other)))
                others[0].start()
                others[0].join(0.1)  # it waits for this call to have begun
            return values_of(recorder, tensor)

        monkeypatch.setattr(Recorder, "_values_of", measured)
        return begun(recorder, call)

    sevens = torch.full((2,), 7.0)
    monkeypatch.setattr(Recorder, "begun", begins)
    with tp.trace(values=True) as report:
        sevens.exp()
        others[0].join()
    assert [source.values.amax for source in report.sources] == [7.0, 5.0]
    assert report.reads[0][0].written_by == (-1,)


def test_memory_that_changed_unseen_is_read_anew() -> None:
    x = torch.ones(2)
    elements = x.numpy()

    def program() -> None:
        x.cos()
        x.sin()
        elements[:] = 2
        torch._C._increment_version([x])
        x.tan()

    report = traced(program)
    assert [[read.written_by for read in reads] for reads in report.reads.values()] == [[(-1,)], [(-1,)], [(-2,)]]
    assert [source.kind for source in report.sources] == ["input", "input"]


def test_a_source_has_the_values_before_the_call_that_changes_it() -> None:
    x = torch.ones(3)
    report = traced(lambda: x.mul_(5))
    assert report.sources[0].values.amax == 1


def test_what_calls_inside_of_a_call_have_made_is_that_calls() -> None:
    """The mask of a dropout, and the cast weight of a linear, which the backward reads."""
    model = net()
    report = train(model, 1)
    assert {source.info.shape for source in report.sources if source.kind == "input"} == {()}  # the optimizer's steps


def test_parameters_and_buffers_are_sources_even_if_the_block_has_initialized_them() -> None:
    def program() -> None:
        model = net()
        with torch.no_grad():
            model(torch.ones(4, 6)).sum()
            model(torch.ones(4, 6)).sum()

    report = traced(program)
    named = {source.name: source for source in report.sources if source.kind != "input"}
    assert set(named) == {name for name, _ in net().named_parameters()} | {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    first = named["0.weight"]
    assert [report.calls[one].op for one in first.written_by] == ["aten::uniform_"]
    assert reads_of(report, "linear") == [["ones"], ["parameter 0.weight"], ["parameter 0.bias"]]
    assert reads_of(report, "batch_norm", 1)[3:] == [["batch_norm"], ["batch_norm"]]


def test_an_initialization_may_read_what_it_has_written() -> None:
    """As trunc_normal_ does from PyTorch 2.13 on. The parameter is a source when the model reads it."""

    def program() -> None:
        model = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.masked_fill_(parameter > 0.1, 0.1).masked_fill_(parameter.isnan().any(), 0)
            model(torch.ones(2, 6))

    report = traced(program)
    assert [(one.kind, one.name) for one in report.sources if one.kind != "input"] == [
        ("parameter", "weight"),
        ("parameter", "bias"),
    ]
    assert reads_of(report, "linear") == [["ones"], ["parameter weight"], ["parameter bias"]]


def test_the_states_of_generators_are_those_that_a_program_draws_with() -> None:
    """torch-promote trace opens its block before the program sets its seed."""

    def states(seed: int) -> list[str]:
        torch.seed()
        with tp.trace(values=True) as report:
            zeros = torch.zeros(3)
            torch.manual_seed(seed)
            parameter = nn.Parameter(torch.randn(3) + zeros)
            optimizer = torch.optim.SGD([parameter], 0.1)
            for _ in range(2):
                nn.functional.dropout(parameter).sum().backward()
                optimizer.step()
        return [end.rng["cpu"] for end in report.ends]

    one, same, other = states(1), states(1), states(2)
    assert one == same
    assert len({*one, *other}) == 4


def test_tensors_with_the_ids_of_buffers_that_are_gone_are_not_theirs() -> None:
    model = nn.Module()
    for number in range(100):
        model.register_buffer(f"b{number}", torch.ones(3))
    ids, found = {id(one) for one in model.buffers()}, []
    with tp.trace(model, values=True) as report:
        torch.stack(list(model.buffers()))
        model._buffers.clear()
        for _ in range(200):
            found.append(torch.randn(3))
            found[-1].exp()
    assert ids & {id(one) for one in found}
    assert {source.kind for source in report.sources} == {"buffer"}


def test_a_parameter_that_is_read_before_the_model_runs_has_its_name() -> None:
    model = net()

    def program() -> None:
        model[0].weight.norm()  # type: ignore[index, operator, union-attr]
        model(torch.ones(4, 6))

    report = traced(program)
    assert [source.name for source in report.sources if source.info.shape == (8, 6)] == ["0.weight"]


def test_the_end_of_a_step() -> None:
    model = net()
    seen: list[dict[str, torch.Tensor]] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with tp.trace(model, values=True) as report:
        for _ in range(2):
            loss = model(torch.ones(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
            seen.append({name: one.detach().clone() for name, one in model.named_parameters()})
            gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
            optimizer.zero_grad()
    assert len(report.ends) == 2
    for end, loss, parameters in zip(report.ends, losses, seen, strict=False):
        assert [one.digest for one in end.losses] == [Values.of(loss).digest]
        assert {name: one.digest for name, one in end.parameters.items()} == {
            name: Values.of(one).digest for name, one in parameters.items()
        }
    assert report.ends[1].gradients == {name: Values.of(one) for name, one in gradients.items()}
    first, second = report.ends
    assert first.rng["cpu"] != second.rng["cpu"]  # the dropout
    assert first.rng["python"] == second.rng["python"]


def test_a_block_without_an_optimizer_ends_with_the_gradients() -> None:
    model = nn.Linear(2, 2)
    report = traced(lambda: model(torch.ones(1, 2)).sum().backward(), model=model)
    [end] = report.ends
    assert set(end.gradients) == {"weight", "bias"}
    assert len(end.losses) == 1
    assert not end.parameters


def test_without_values_nothing_is_read() -> None:
    with tp.trace() as report:
        torch.ones(2).exp()
    assert (report.sources, report.ends, report.environment) == ([], [], {})
    assert not report.reads
    assert not report.values


def test_compiled_functions() -> None:
    """The arguments are sources of a call, also of the first, which compiles; the second reads the same ones."""
    torch._dynamo.reset()
    model, x = nn.Linear(6, 3), torch.ones(4, 6)
    compiled = torch.compile(model, backend="aot_eager")
    with tp.trace(values=True) as report:
        for _ in range(2):
            compiled(x).sum().backward()
    calls = [number for number, call in enumerate(report.calls) if call.op == COMPILED_FUNCTION]
    assert len(calls) == 2
    for number in calls:
        found = [report.sources[-1 - read.written_by[0]] for read in report.reads[number]]
        assert [(source.kind, source.name) for source in found] == [
            ("input", ""),
            ("parameter", "weight"),
            ("parameter", "bias"),
        ]
    assert list(report.ends[-1].gradients) == ["weight", "bias"]
    assert len({call.thread for call in report.calls}) == 1


def test_a_view_of_memory_that_no_kernel_has_written_is_not_measured() -> None:
    """The kernel of a product with a vector views its operands, and its result before it writes to that."""
    row, low = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
    with tp.trace(values=True) as report, tp.my_autocast("cpu"):
        torch.mm(row, low)
    views = [report.values_of(call) for call in report.calls.where(op="resolve_conj")]
    assert (EMPTY,) in views or not views  # in another PyTorch
    assert all(one.amax == 1 for values in views for one in values if one.count)


def test_what_a_collective_leaves_is_read_anew() -> None:
    """It writes after its call has returned, which no version of a tensor shows."""
    output = output_of(
        """
        import tempfile, torch, torch.distributed as dist, torch_promote as tp
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        x = torch.ones(2)
        with tp.trace(values=True) as report:
            y = x.exp()
            dist.all_reduce(y)
            y.sin()
        [sin] = [number for number, call in enumerate(report.calls) if call.op == "aten::sin"]
        print([read.written_by for read in report.reads[sin]], [one.kind for one in report.sources])
        dist.destroy_process_group()
        """,
        compiler=True,
    )
    assert output.splitlines()[-1] == "[(1,)] ['input']"


# --- the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"run{SUFFIX}"


def test_a_file_has_all_that_the_report_has(path: Path) -> None:
    """The file that is written as the program runs, and the one that is saved after it."""
    report = train(net(), record=path)
    report.save(saved := path.with_name(f"saved{SUFFIX}"))
    first = TraceReport.load(path)
    for read in (first, tp.load(saved)):
        for name in (
            "values",
            "reads",
            "draws",
            "sources",
            "states",
            "ends",
            "rng",
            "environment",
            "steps",
            "nonfinite",
        ):
            assert getattr(read, name) == getattr(report, name), name
        assert [replace(call, line="", thread=0) for call in read.calls] == [
            replace(call, line="", thread=0) for call in report.calls
        ]
        assert {call.line for call in read.calls} == {call.line.rpartition("/")[2] for call in report.calls}
    first.save(saved)
    again = tp.load(saved)
    assert again.to_dict() == first.to_dict()
    assert str(again) == str(first)
    assert str(again.explain("(model)")) == str(first.explain("(model)"))
    assert str(first).count("\n") == str(report).count("\n")
    assert again.formats()[".html"][1]() == first.formats()[".html"][1]()
    assert not report.diff(first)


def test_all_calls_are_recorded_whatever_is_stored(path: Path) -> None:
    report = train(net(), record=path, max_calls=10)
    read = TraceReport.load(path)
    assert len(report.calls) == 10
    assert len(read.calls) == report.total.calls
    assert read.calls[-1].op == train(net()).calls[-1].op
    few = TraceReport.load(path, 10)
    assert (few.values, few.reads, few.total.calls) == (report.values, report.reads, report.total.calls)


def test_a_step_of_a_transformer_is_small(path: Path) -> None:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)

    model = nn.Sequential(*(layer() for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    with tp.trace(model, record=path) as report, tp.my_autocast("cpu"):
        model(torch.ones(2, 4, 16)).sum().backward()
        optimizer.step()
    assert path.stat().st_size < 80 * len(report.calls)


def test_nothing_names_a_folder_outside_of_the_program(path: Path, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("import torch\ndef f(x):\n    return x.exp()\n")
    (tmp_path / "prog.py").write_text(
        "import torch, torch_promote as tp, part\n"
        f"with tp.trace(record={str(path)!r}), tp.my_autocast('cpu', overrides={{'mm.default': 'fp32'}}):\n"
        "    part.f(torch.mm(torch.ones(2, 2), torch.ones(2, 2)))\n"
    )
    output_of("import runpy, sys; sys.path.insert(0, '.'); runpy.run_path('prog.py')", cwd=tmp_path)
    text = gzip.decompress(path.read_bytes()).decode()
    assert '"part.py:3"' in text
    assert "region at prog.py:2" in text
    assert str(tmp_path) not in text
    assert not [one for one in text.split('"') if one.startswith(os.sep)]


def test_a_killed_run_leaves_what_it_had_recorded(path: Path) -> None:
    Program(
        f"""
        import os, signal, torch, torch_promote as tp
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with tp.trace(model, record={str(path)!r}):
            for step in range(5):
                model(torch.ones(1, 2)).sum().backward()
                if step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
        """,
        compiler=True,
    ).wait()
    read = TraceReport.load(path)
    assert read.steps == len(read.ends) == 3
    [said] = read.not_seen
    assert said.endswith(f"the file ends after 3 steps and {len(read.calls)} calls.")


def test_a_run_without_steps_is_written_as_it_goes(path: Path) -> None:
    model = net().eval()
    with torch.no_grad(), tp.trace(model, record=path) as report:
        for _ in range(1000):
            model(torch.ones(4, 6))
        so_far = TraceReport.load(path)
    assert len(so_far.calls) == 4096 * (len(report.calls) // 4096)
    whole = TraceReport.load(path)
    assert so_far.values == {number: whole.values[number] for number in range(len(so_far.calls))}
    assert {source.name for source in so_far.sources if source.kind != "input"} >= {"0.weight", "1.running_mean"}


def kept_by(tracer: Tracer) -> int:
    """The number of objects that a tracer refers to, without those of the program and of PyTorch."""
    found: set[int] = set()
    others = types.ModuleType, types.FunctionType, type, nn.Module, torch.Tensor
    waiting: list[object] = [tracer]
    while waiting:
        one = waiting.pop()
        if id(one) not in found and not isinstance(one, others):
            found.add(id(one))
            waiting += gc.get_referents(one)
    return len(found)


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_recording_needs_no_more_memory_with_each_step(
    factor: float, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((recording_file, "_MOST_KNOWN"), (values, "_MOST_KNOWN"), (places, "_MOST")):
        monkeypatch.setattr(module, name, 32)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    tracer = Tracer(None, True, False, 0, recording_file.RecordingFile(path))
    with tracer as report:
        for steps in (60, 300):
            for _ in range(steps):
                (model(torch.randn(4, 6)) * factor).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            kept.append(kept_by(tracer))
    assert report.dropped > 5000
    assert not any((report.calls, report.values, report.reads, report.sources, report.ends))
    assert len(TraceReport.load(path).ends) == 360
    assert kept[1] - kept[0] < 300


@pytest.mark.parametrize("with_file", [True, False])
def test_a_recording_without_steps_needs_no_more_memory_with_each_call(
    with_file: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((recording_file, "_MOST_KNOWN"), (values, "_MOST_KNOWN"), (recorder, "CALLS_TO_WRITE")):
        monkeypatch.setattr(module, name, 32)
    model, kept = net().eval(), []
    tracer = Tracer(None, True, False, 0, recording_file.RecordingFile(path) if with_file else None)
    with tracer, torch.no_grad():
        for batches in (60, 240):
            for _ in range(batches):
                model(torch.tensor([[0.5] * 6] * 4))  # a source, as no recorded op has made it
            kept.append(kept_by(tracer))
    assert kept[1] - kept[0] < 240


def test_settings_are_those_that_the_program_runs_with(path: Path) -> None:
    """The command opens the block before the program runs."""
    found = []
    try:
        with tp.trace(record=path) as report:
            torch.set_float32_matmul_precision("high")
            torch.ones(2).exp()
            found.append(dict(report.environment))
            torch.set_float32_matmul_precision("medium")
            parameter = nn.Parameter(torch.ones(2))
            parameter.exp().sum().backward()
            torch.optim.SGD([parameter], 0.1).step()
            torch.set_float32_matmul_precision("highest")
    finally:
        torch.set_float32_matmul_precision("highest")
    found += [report.environment, TraceReport.load(path).environment]
    assert [one["float32 matmul precision"] for one in found] == ["high", "medium", "medium"]


@pytest.mark.parametrize(
    "setting",
    ["cuda.matmul.fp32_precision = 'tf32'", "mkldnn.matmul.fp32_precision = 'bf16'", "fp32_precision = 'tf32'"],
)
def test_a_program_may_set_precisions_in_the_new_way(setting: str, path: Path) -> None:
    """The functions that tell of the older settings raise then."""
    output = output_of(
        f"""
        import torch, torch_promote as tp
        with tp.trace(record={str(path)!r}):
            torch.backends.{setting}
            torch.ones(2, 2) @ torch.ones(2, 2)
        with tp.trace(values=True) as report:
            torch.ones(2, 2) @ torch.ones(2, 2)
        print(tp.load({str(path)!r}).environment == report.environment)
        """
    )
    assert output.splitlines()[-1] == "True"
    with tp.trace(values=True) as report:
        torch.ones(2, 2) @ torch.ones(2, 2)
    name, value = setting.replace("'", "").split(" = ")
    assert tp.diff(report, path).environment[f"backends.{name}"][1] == value


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_that_is_read_before_it_is_one_of_a_model(kind: str, path: Path) -> None:
    reports = []
    weight = torch.randn(8, 8)
    for _ in range(2):
        torch.manual_seed(0)
        with tp.trace(record=path):
            weight.norm()
            model = nn.Linear(8, 8, bias=False)
            if kind == "parameter":
                model.weight = nn.Parameter(weight)
            else:
                del model.weight
                model.register_buffer("weight", weight)
            model(torch.ones(4, 8)).sum()
        reports.append(tp.load(path))
    assert [(one.kind, one.name) for one in reports[0].sources][-1] == (kind, "weight")
    assert reports[0].diff(reports[1]).equal


def test_the_state_of_pythons_generator_is_digested_alike_in_each_process() -> None:
    random.seed(1)
    assert generator_states()["python"] == "265af31fc9e366b9"
    random.gauss()
    assert generator_states()["python"] == "0205a65a28c7fe9d"


def test_what_is_known_of_an_optimizer_goes_with_it() -> None:
    known, weight = OptimizerStates(lambda _: "", Values.of), nn.Parameter(torch.ones(2))
    for number in range(20):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        _ = torch.optim.lr_scheduler.StepLR(optimizer, 1 + number)
        state, suffix = known.at_step(optimizer, number), f" of optimizer {number}" * (number > 0)
        assert state is not None
        assert [state.numbers[one + suffix] for one in ("lr of group 0", "step_size of StepLR")] == [0.1, 1 + number]
    gc.collect()
    known.at_step(torch.optim.SGD([weight], lr=0.1), 20)
    assert len(known._known) <= 2
    assert len(known._numbers) <= 3 * len(state.numbers)


def test_a_state_that_raises_is_unknown_at_the_first_step_and_at_the_end() -> None:
    known, optimizer = OptimizerStates(lambda _: "", Values.of), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.state = None  # type: ignore[assignment]
    states = known.at_step(optimizer, 0), known.at_end(1)
    assert [one and one.numbers["state of SGD"] for one in states] == ["unknown", "unknown"]


def test_a_call_that_cannot_be_measured_keeps_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file counts calls: one that it lacked would make others read what they do not."""
    measure = Recorder._measure

    def refusing(recorder: Recorder, facts: OpFacts, *args: Any) -> tuple[Values, ...]:
        if facts.name == "aten::tan":
            raise RuntimeError("no")
        return measure(recorder, facts, *args)

    monkeypatch.setattr(Recorder, "_measure", refusing)
    with tp.trace(record=path) as report:
        x = torch.ones(2).exp()
        x.tan()
        x.sin()
    again = TraceReport.load(path)
    assert [call.op for call in again.calls] == [call.op for call in report.calls]
    assert (again.reads, again.values) == (report.reads, report.values)
    assert "Parts of the recording are unknown (_record): RuntimeError: no." in again.not_seen


@pytest.mark.parametrize("with_values", [True, False])
def test_a_program_goes_on_if_the_disk_is_full(path: Path, with_values: bool) -> None:
    path.symlink_to("/dev/full")
    with Tracer(None, with_values, False, 1000, recording_file.RecordingFile(path)) as report:
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()
        torch.ones(2).exp()
    assert report.not_seen == [f"The file of the recording ends before the run: {os.strerror(errno.ENOSPC)}."]
    assert report.calls.where(op="exp")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        recording_file.write_recording(path, report)


def test_a_forked_process_does_not_keep_the_name(path: Path) -> None:
    """As a worker of a data loader, which lives on."""
    output = output_of(
        f"""
        import os, torch, torch_promote as tp
        read, write = os.pipe()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        for name in ("sin", "cos"):
            with tp.trace(record={str(path)!r}):
                optimizer.step()  # the file is open from here on
                if name == "sin" and not os.fork():
                    os.close(write)
                    os.read(read, 1)  # until the other process ends
                    os._exit(0)
                getattr(torch.ones(2), name)()
        """
    )
    assert output == ""
    assert [call.op for call in TraceReport.load(path).calls][-1] == "aten::cos"
    assert list(path.parent.glob(f"*{SUFFIX}")) == [path]


def test_a_forked_process_leaves_the_file_alone(path: Path) -> None:
    output = output_of(
        f"""
        import gc, os, torch, torch_promote as tp
        from torch_promote.recording.file import CALLS_TO_WRITE, RecordingFile
        with tp.trace(record={str(path)!r}):
            torch.ones(2).exp()
            child = os.fork()
            if not child:
                x = torch.ones(2)
                for _ in range(CALLS_TO_WRITE):
                    x.sin()
                (file,) = (one for one in gc.get_objects() if type(one) is RecordingFile)
                assert len(file._lines) < 100  # it keeps nothing that will not be written
                raise SystemExit(0)
            os.waitpid(child, 0)
            torch.ones(2).cos()
        """
    )
    assert output == ""
    assert [call.op for call in TraceReport.load(path).calls] == ["aten::ones", "aten::exp", "aten::ones", "aten::cos"]


@pytest.mark.usefixtures("warm")
def test_each_rank_has_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A process that a rank has started, and that inherits its RANK, leaves the file alone."""
    (folder / "prog.py").write_text(
        "import subprocess, sys, torch\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        "weight.exp().sum().backward() if sys.argv[1:] else weight.sin().sum().backward()\n"
        "torch.optim.SGD([weight], lr=0.1).step()\n"
        "if sys.argv[1:]:\n"
        "    subprocess.run([sys.executable, __file__], check=True)\n"
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(folder)
    status, _, errors = command_run(capfd, "trace", "--record", f"run{SUFFIX}", "prog.py", "starts another")
    assert status == 0
    assert f"recorded run.rank1{SUFFIX}" in errors
    assert not (folder / f"run{SUFFIX}").exists()
    report = TraceReport.load(folder / f"run.rank1{SUFFIX}")
    assert report.calls.where(op="exp")
    assert not report.calls.where(op="sin")
    assert report.not_seen == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", "has to end in .jsonl.gz"),
        (f"nowhere/run{SUFFIX}", "there is no folder"),
        (f"folder{SUFFIX}", "it is a folder"),
    ],
)
def test_files_that_cannot_be_written(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / f"folder{SUFFIX}").mkdir()
    with pytest.raises(OptionError, match=text), tp.trace(record=tmp_path / name):
        pytest.fail("the block ran")
    with pytest.raises(OptionError, match=r"`record` is the name of a file, .* got 3"), tp.trace(record=3):  # type: ignore
        pytest.fail("the block ran")


def changed(lines: list[Any], **changes: Any) -> list[Any]:
    """The lines of a file, with changes of the first dict."""
    return [{**lines[0], **changes}, *lines[1:]]


def with_call(call: list[Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda lines: [*lines[:-1], call, lines[-1]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lines: changed(lines, format="another"), "its first line does not have"),
        (lambda lines: changed(lines, version=99), "its version is 99, and this torch_promote reads version 2"),
        (lambda lines: changed(lines, environment=[1]), "expected dict"),
        (lambda lines: [*lines[:2], ["what", 1], *lines[2:]], r"line 3 is wrong \(KeyError: "),
        (lambda lines: [lines[0], [0, 0]], "line 2"),
        (with_call([9999, 0]), "there is no definition 9999"),
        (with_call([0, 0, [0, 0, 0, 0], 0, [], [["", -77]]]), r"call \d+ reads what is neither a call before it nor"),
        (with_call([0, 0, [0, 0, 0, 0], 0, [], [[-77]]]), "there is no definition 76"),
        (with_call([0, 0, [0, 0, 0, 0], 0, [9999]]), "there is no definition 9999"),
        (with_call([0, 0, [[-77]], [1], 5]), "is wrong"),
        (with_call([True, 0]), "there is no definition True"),
        (with_call(["values", ["0", "float32", [1, 1, 0, 1.0], [0] * 8, [1], "abc"]]), "a sketch has 16 numbers"),
    ],
)
def test_files_that_were_changed(path: Path, change: Callable[[list[Any]], list[Any]], text: str) -> None:
    traced_to = path
    with tp.trace(record=traced_to):
        torch.ones(2).exp()
    lines = list(map(json.loads, gzip.decompress(path.read_bytes()).splitlines()))
    path.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in change(lines)).encode()))
    with pytest.raises(OptionError, match=text):
        TraceReport.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"[1]\n"), gzip.compress(b'{"a": 1}\n')],
    ids=["empty", "text", "list", "dict"],
)
def test_files_that_are_no_recordings(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(OptionError, match="cannot read the recording"):
        TraceReport.load(path)
    with pytest.raises(OptionError, match=os.strerror(errno.ENOENT)):
        TraceReport.load(path.with_name(f"other{SUFFIX}"))
