"""Named results of a step, and the distance of two results."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy
import pytest
import torch

from torch_promote.errors import StepError
from torch_promote.numerics.step_runs import distance, distances, named_tensors, read_result

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Output:
    loss: Any
    logits: Any = None


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """As those of Transformers are."""


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (torch.ones(()), ["loss"]),
        (torch.ones(1, 1), ["loss"]),
        (torch.ones(2), ["output"]),
        (torch.ones(0), ["output"]),
        (0.5, ["loss"]),
        (3, ["loss"]),
        (numpy.float32(1), ["loss"]),
        (numpy.ones(2), ["output"]),
        ([torch.ones(2), 1.0], ["0", "1"]),
        ((torch.ones(2),), ["0"]),
        (Pair(1.0, torch.ones(2)), ["first", "second"]),
        ({"loss": 1.0, "name": "text", "none": None, "hits": numpy.int64(3)}, ["loss", "hits"]),
        ({"metrics": {"accuracy": 1.0, 5: [2.0]}}, ["metrics.accuracy", "metrics.5.0"]),
        (Output(1.0, {"a": torch.ones(2)}), ["loss", "logits.a"]),
        (ModelOutput(loss=torch.ones(()), cache=((torch.ones(2),),)), ["loss", "cache.0.0"]),
    ],
)
def test_names(result: Any, names: list[str]) -> None:
    assert list(named_tensors(result)) == names


@pytest.mark.parametrize("result", [None, "text", {}, [], object(), {"a": None}, Output, numpy.array(["a"])])
def test_a_result_without_tensors_is_an_error(result: Any) -> None:
    with pytest.raises(StepError, match=r"there is no tensor or number to compare\. Return the loss"):
        named_tensors(result)


def test_two_results_of_one_name() -> None:
    with pytest.raises(StepError, match=r"two results with the name 'a\.b'"):
        named_tensors({"a.b": 1.0, "a": {"b": 2.0}})


def test_results_are_copied() -> None:
    weight = torch.ones(2, requires_grad=True)
    found = read_result({"output": weight})["output"]
    with torch.no_grad():
        weight.zero_()
    assert found.tolist() == [1, 1]
    assert not found.requires_grad


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        ([2.0], [2.0], 0.0),
        ([2.5], [2.0], 0.25),
        ([-2.0], [2.0], 2.0),
        ([0.25], [0.0], 0.25),
        ([0.0], [-0.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([NAN], [NAN], 0.0),
        ([INF, 1.0], [INF, 2.0], 0.5),
        ([INF], [-INF], INF),
        ([NAN], [INF], INF),
        ([1.0], [INF], INF),
        ([INF], [1.0], INF),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.5e200, 0.0], [1e200, 0.0], 0.5),
        ([1.5e-200, 0.0], [1e-200, 0.0], 0.5),
        ([], [], 0.0),
    ],
)
def test_distance(candidate: list[float], reference: list[float], expected: float) -> None:
    found = distance(torch.tensor(candidate, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64))
    assert found == pytest.approx(expected, abs=0)


def test_distance_of_other_dtypes() -> None:
    assert distance(torch.tensor([1, 3]), torch.tensor([1, 2])) == pytest.approx(1 / math.sqrt(5))
    assert distance(torch.tensor([True]), torch.tensor([False])) == 1
    assert distance(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)) == 0
    assert distance(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])) == pytest.approx(math.sqrt(2))
    assert distance(torch.tensor([1 + 0j]), torch.tensor([1.0])) == 0
    assert distance(torch.eye(2).to_sparse(), torch.eye(2)) == 0


def test_other_shapes_and_names() -> None:
    with pytest.raises(StepError, match=r"a tensor of shape \[2\], but of shape \[3\] under the reference"):
        distance(torch.ones(2), torch.ones(3))
    assert distances({"a": torch.ones(1)}, {"a": torch.ones(1)}) == {"a": 0}
    with pytest.raises(StepError, match="returned other names than under the reference: only one side has b, c"):
        distances({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "c": torch.ones(1)})
