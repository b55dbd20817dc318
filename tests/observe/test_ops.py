"""What observers know of ops, compared with what the ops do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import OpLog
from torch_promote.observe.ops import _OVERWRITING, facts_of, find_overload, tensors_in

#: They replace the storage, and write nothing.
NOT_WRITING = {"aten::set_", "aten::shallow_copy_data_"}
#: Ops that return their argument, or a view of it, if there is nothing to do, as dropout without training.
SOMETIMES_VIEWS = re.compile(
    r"aten::(_unsafe_view|conj_physical|contiguous|data|dequantize|\w*dropout|flex_attention|lift|set|sum_to_size"
    r"|to|to_(dense|mkldnn)(_backward)?|type_as|unsafe_(chunk|split))(\.|$)"
)
#: Ops that read memory which PyTorch has not initialized, that do nothing here, or of which all results are NaN.
NOT_REPEATABLE, IDLE, NAN = "aten::linalg_lstsq", ("aten::detach_", "aten::resize_"), "aten::special_zeta"
#: Most other ops that begin with "_" do not check their arguments, and crash.
SAFE = re.compile(r"aten::([^_]|_(to_copy|unsafe_view|foreach_))")


def value_for(argument: Any) -> Any:
    values = {"Tensor": torch.arange(6).view(2, 3) / 5, "number": 0.5, "float": 0.5, "int": 1, "bool": False}
    values |= {"List[int]": [2, 3], "List[Tensor]": [torch.ones(2, 3), torch.arange(6).view(2, 3) / 3]}
    return argument.default_value if argument.has_default_value() else values[str(argument.type)]


def results_of(op: Any, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors among simple arguments of an op, and its results; none if it does not run on these."""
    torch.manual_seed(seed)
    try:
        values = {one.name: value_for(one) for one in op._schema.arguments}
        tensors = tensors_in(list(values.values()))
        positional = [values.pop(one.name) for one in op._schema.arguments if not one.kwarg_only]
        results = tensors_in([op(*positional, **values)])
    except Exception:  # an op may refuse them in any way
        return [], []
    plain = all(one.layout is torch.strided and not one.is_quantized for one in results)
    return tensors, results if plain else []


def storages(tensors: list[torch.Tensor]) -> set[int]:
    return {one.untyped_storage()._cdata for one in tensors}


def elements(tensors: list[torch.Tensor]) -> set[float]:
    return {float(one) for tensor in tensors for one in tensor.flatten()}


def draws(op: Any, results: list[torch.Tensor]) -> bool:
    pairs = zip(results, results_of(op, seed=1)[1], strict=False)
    return not all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs if a.is_floating_point())


def facts_by_running(op: Any) -> dict[str, Any]:
    """What running an op shows of it."""
    facts, (tensors, results) = facts_of(op), results_of(op)
    if not results:
        return {}
    found: dict[str, Any] = {}
    if not op._schema.is_mutable:
        shares = not storages(tensors).isdisjoint(storages(results))
        if not (shares and SOMETIMES_VIEWS.match(facts.name)):
            found["is_view"] = shares
        if facts.keeps_elements:
            found["keeps_elements"] = elements(results) <= elements(tensors)
    if not facts.is_uninitialized and facts.op_name != NOT_REPEATABLE and draws(op, results):
        found["is_random"] = True
    if facts.op_name not in IDLE:
        with OpLog() as seen:
            results_of(op)
        # By name: PyTorch makes new objects for the overloads of an op to which a test has added one.
        found["is_composite"] = facts.name not in {facts_of(one).name for one in seen.ops}
        torch.use_deterministic_algorithms(True)  # fills memory that is not initialized
        filled = [i for i, one in enumerate(results_of(op)[1]) if one.numel() and bool(one.isnan().all())]
        torch.use_deterministic_algorithms(False)
        if facts.op_name != NAN and results[0].is_floating_point():
            found["unwritten"] = tuple(filled)
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_facts_of_all_ops_are_what_running_them_shows() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if SAFE.match(name)]
    ran, wrong = 0, []
    for name in names:
        shown, facts = facts_by_running(find_overload(name)), facts_of(name)
        ran += bool(shown)
        said = {one: getattr(facts, one) for one in shown} | {"is_composite": facts.is_composite("cpu")}
        wrong += [] if {**said, **shown} == said else [(name, shown, said)]
    assert not wrong
    assert ran > 1000


def written_over(name: str) -> list[torch.Tensor] | None:
    """Returns what an in-place op makes of several contents; None if it does not run on simple arguments."""
    op, results = find_overload(name), []
    first, *others = op._schema.arguments
    try:
        for content in (float("nan"), 0.0, 0.25, 0.5, -3.0, 7.0):
            torch.manual_seed(0)
            tensor = torch.full((2, 3), content)
            op(tensor, **{one.name: value_for(one) for one in others})
            results.append(tensor)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return results if str(first.type) == "Tensor" and all(one.shape == (2, 3) for one in results) else None


@pytest.mark.filterwarnings("ignore")
def test_ops_that_overwrite_are_those_for_which_the_old_content_does_not_matter() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    in_place = {name for name in names if (op := name.partition(".")[0]).endswith("_") and not op.startswith("aten::_")}
    ran = {name: results for name in in_place if (results := written_over(name)) is not None}
    assert len(ran) > 100
    overwrite = {
        name.partition(".")[0]
        for name, results in ran.items()
        if all(torch.equal(results[0], one) for one in results[1:])
    }
    assert overwrite - NOT_WRITING == {name for name in _OVERWRITING if not name.startswith("aten::_")}


def test_of_an_op_that_is_unknown_nothing_is_assumed() -> None:
    facts = facts_of("another_library::op")
    assert facts.computes
    assert not any((facts.is_view, facts.is_random, facts.is_uninitialized, facts.writes))


@pytest.mark.parametrize("name", sorted(_OVERWRITING))
def test_a_tensor_that_is_overwritten_is_not_read(name: str) -> None:
    tensor = torch.full((2, 3), float("nan"))
    with tp.trace(values=True) as report, tp.find_nonfinite() as found:
        if "_foreach" in name:
            getattr(torch, name.removeprefix("aten::"))([tensor], *([[torch.ones(2, 3)]] if "copy" in name else []))
        else:
            arguments = {"copy_": [torch.ones(2, 3)], "fill_": [0.5], "geometric_": [0.5]}
            getattr(tensor, name.removeprefix("aten::"))(*arguments.get(name.removeprefix("aten::"), []))
        _ = tensor + 1
    assert not found.found
    (number,) = (number for number, call in enumerate(report.calls) if call.op == name)
    assert report.reads[number][0].written_by == ()


def test_arguments_are_values_of_json() -> None:
    with tp.trace() as report:
        torch.full((2,), float("-inf"), dtype=torch.float16)
    (call,) = (call for call in report.calls if call.op == "aten::full")
    found = dict(call.arguments)
    assert (found["size"], found["fill_value"], found["dtype"], found["layout"]) == ((2,), "-inf", "float16", None)
