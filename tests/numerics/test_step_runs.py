"""`StepRuns`: calls of a step under policies, errors and interrupts in it, its results and their distance."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import torch_promote as tp
from torch_promote.errors import OptionError, RegionError, StepError
from torch_promote.numerics.step_runs import StepRuns, current_policy, distance, distances, named_tensors, read_result


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    def present() -> Any:
        stance = torch._dynamo.eval_frame._stance.stance
        dtypes = [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")]
        hooks = dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)
        # A step that installs the same again may leave an equal installation.
        return tp.default_policy(), repr(tp.installed()), stance, dtypes, hooks, torch.is_grad_enabled()

    before = present()
    yield
    assert present() == before


OFF, STOCK = tp.Policy.named("off"), tp.Policy.stock()
BFLOAT16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16
X, MODEL = torch.ones(2, 2), nn.Linear(2, 2)


def product() -> torch.Tensor:
    with tp.my_autocast("cpu"):
        return X @ X


def stock_product() -> torch.Tensor:
    with torch.autocast("cpu"):
        return X @ X


def dtypes_of(runs: StepRuns, policy: tp.Policy, **options: Any) -> list[torch.dtype]:
    """The dtypes of a step's results under a policy."""
    [result] = runs.run(policy, **options)
    return [tensor.dtype for tensor in result.values()]


# --- calls of the step


def test_batches() -> None:
    with StepRuns(lambda number: float(number), MODEL, batches=3) as runs:
        assert [result["loss"].item() for result in runs.run(STOCK)] == [0, 1, 2]
        assert [result["loss"].item() for result in runs.run(STOCK, held_out=1)] == [3, 4, 5]
    with StepRuns(lambda: torch.rand(4), MODEL, batches=2) as runs:
        first, again, other, other_again = (
            [result["output"].tolist() for result in runs.run(STOCK, held_out=held_out)] for held_out in (0, 0, 1, 1)
        )
    assert first == again
    assert other == other_again
    assert len({str(output) for output in [*first, *other]}) == 4


class Numbered:
    def __call__(self, number: int) -> int:
        return number

    @classmethod
    def of_class(cls, number: int = 5) -> int:
        return number


@pytest.mark.parametrize(
    ("step", "takes_number"),
    [
        (Numbered(), True),
        (Numbered.of_class, False),
        (functools.partial(lambda a, b: a + b, 1), True),
        (functools.partial(lambda a, b: a + b, 1, b=2), False),
        (lambda number=3: number, False),
        (lambda *numbers, **names: 1, False),
        (int, False),  # has no signature
    ],
)
def test_whether_the_step_takes_a_number(step: Any, takes_number: bool) -> None:
    with StepRuns(step, MODEL) as runs:
        assert runs.takes_number is takes_number
        runs.run(STOCK)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": 5}, "step must be a function that runs a step and returns its loss, got 5"),
        ({"restore": 5}, "restore must be a tuple or list of objects that the step changes, got int. For one object"),
        ({"restore": X}, "got Tensor"),
        ({"step": lambda a, b: 1}, "but this one needs a, b. Bind its arguments, with functools.partial or a lambda"),
        ({"step": lambda *, a: 1}, "but this one needs a. Bind"),
        ({"model": None}, "model must be the nn.Module that the step runs, got None"),
        ({"batches": 0}, r"batches \(the number of times a run calls step\) must be 1 or more, got 0"),
        ({"dtype": torch.float32}, "dtype must be torch.float16, torch.bfloat16 or None"),
    ],
)
def test_invalid_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        StepRuns(**{"step": product, "model": MODEL, **arguments})


def test_an_iterator_that_ends() -> None:
    batches = iter([torch.ones(1)])
    with StepRuns(lambda: next(batches), MODEL) as runs:
        runs.run(STOCK)
        with pytest.raises(StepError, match=r"the end of an iterator, which does not restart.*step\(i\)"):
            runs.run(STOCK)


# --- errors and interrupts


@pytest.mark.parametrize("region", [tp.my_autocast, tp.stock_autocast])
def test_open_regions(region: Callable[[str], Any]) -> None:
    runs = StepRuns(product, MODEL)
    with region("cpu"), pytest.raises(RegionError, match="cannot begin inside of an open region: the step's"):
        runs.__enter__()
    with runs:
        assert dtypes_of(runs, OFF) == [FLOAT32]
    left = tp.my_autocast("cpu")

    def step() -> torch.Tensor:
        left.__enter__()
        return X @ X

    with StepRuns(step, MODEL) as runs:
        with pytest.raises(StepError, match=r"has left a region open\. Open regions with `with`"):
            runs.run(STOCK)
        left.__exit__(None, None, None)


def test_two_at_once() -> None:
    found: list[str] = []

    def other() -> None:
        try:
            StepRuns(product, MODEL).__enter__()
        except StepError as error:
            found.append(str(error))

    with StepRuns(product, MODEL) as runs:
        other()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 2
    assert "compare() and tune() cannot be nested" in found[0]
    with pytest.raises(StepError, match="lazy parameters"):
        StepRuns(product, nn.LazyLinear(2)).__enter__()
    with runs:  # neither an error nor the end of a block leaves it locked
        assert dtypes_of(runs, STOCK) == [BFLOAT16]


# --- policies


@pytest.mark.parametrize("step", [product, stock_product])
def test_regions_follow_the_policy_of_the_run(step: Any) -> None:
    with StepRuns(step, MODEL) as runs:
        for policy, dtype in ((OFF, FLOAT32), (STOCK, BFLOAT16), (STOCK.override({"matmul": FLOAT16}), FLOAT16)):
            assert dtypes_of(runs, policy) == [dtype]
        assert runs.count == 3


def test_regions_with_a_policy_and_with_overrides() -> None:
    def step() -> list[torch.Tensor]:
        with tp.my_autocast("cpu", policy="stock"):
            own = X @ X
        with tp.my_autocast("cpu", overrides={"matmul": torch.float64}):
            return [own, X @ X, nn.functional.conv1d(X[None], X[:, :, None])]

    with StepRuns(step, MODEL) as runs:
        for policy, rest in ((OFF, FLOAT32), (STOCK, BFLOAT16)):
            assert dtypes_of(runs, policy) == [BFLOAT16, torch.float64, rest]


@pytest.mark.parametrize(
    ("installation", "expected"),
    [
        ({"policy": "off"}, FLOAT32),
        ({"overrides": {"matmul": torch.float64}}, torch.float64),
        ({"cache": "persistent"}, BFLOAT16),
        ({"policy": "off", "overrides": {"matmul": torch.float16}, "cache": "none"}, FLOAT16),
    ],
)
def test_with_install_in_force(installation: Any, expected: torch.dtype) -> None:
    seen = []

    def step() -> torch.Tensor:
        seen.append(tp.installed().cache)  # type: ignore[union-attr]
        tp.install()  # a step may do so
        return stock_product()

    with tp.install(**installation) as before:
        with StepRuns(step, MODEL) as runs:
            for policy, dtype in ((current_policy(), expected), (OFF, FLOAT32), (STOCK, BFLOAT16)):
                assert dtypes_of(runs, policy) == [dtype]
        assert tp.installed() is before
        assert stock_product().dtype is expected
    assert seen == [installation.get("cache")] * 3


def test_compiled_functions_run_uncompiled_by_default() -> None:
    compiled_calls = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled_calls.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x @ x + 1, backend=backend)
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)
    update = torch.compile(optimizer.step, backend="eager")

    def step() -> list[torch.Tensor]:
        loss = MODEL(X).sum()
        loss.backward()
        update()
        with torch.autocast("cpu"):
            return [compiled(X), loss]

    torch._dynamo.reset()
    try:
        with StepRuns(step, MODEL) as runs:
            [eager] = runs.run(STOCK)
            assert not compiled_calls
            [verified] = runs.run(STOCK, eager=False)
            assert compiled_calls
            assert all(torch.equal(eager[name], verified[name]) for name in eager)
            assert dtypes_of(runs, OFF, eager=False) == dtypes_of(runs, OFF) == [FLOAT32, FLOAT32]
    finally:
        torch._dynamo.reset()


# --- results

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
        (torch.ones(1, 1), ["loss"]),
        (torch.ones(2), ["output"]),
        (torch.ones(0), ["output"]),
        (3, ["loss"]),
        (numpy.float32(1), ["loss"]),
        (numpy.ones(2), ["output"]),
        ([torch.ones(2), 1.0], ["0", "1"]),
        (Pair(1.0, torch.ones(2)), ["first", "second"]),
        ({"loss": 1.0, "name": "text", "none": None, "hits": numpy.int64(3)}, ["loss", "hits"]),
        ({"metrics": {"accuracy": 1.0, 5: [2.0]}}, ["metrics.accuracy", "metrics.5.0"]),
        (Output(1.0, {"a": torch.ones(2)}), ["loss", "logits.a"]),
        (ModelOutput(loss=torch.ones(()), cache=((torch.ones(2),),)), ["loss", "cache.0.0"]),
    ],
)
def test_names_of_results(result: Any, names: list[str]) -> None:
    assert list(named_tensors(result)) == names


@pytest.mark.parametrize("result", [None, "text", {}, [], object(), {"a": None}, Output, numpy.array(["a"])])
def test_a_result_without_tensors_is_an_error(result: Any) -> None:
    with StepRuns(lambda: result, MODEL) as runs, pytest.raises(StepError, match=r"no tensor or number to compare\."):
        runs.run(STOCK)


def test_results_are_copied() -> None:
    weight = torch.ones(2, requires_grad=True)
    found = read_result({"output": weight})["output"]
    with torch.no_grad():
        weight.zero_()
    assert found.tolist() == [1, 1]
    assert not found.requires_grad
    with pytest.raises(StepError, match=r"two results with the name 'a\.b'"):
        named_tensors({"a.b": 1.0, "a": {"b": 2.0}})


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        ([2.0], [2.0], 0.0),
        ([-2.0], [2.0], 2.0),
        ([0.25], [0.0], 0.25),
        ([0.0], [-0.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([NAN], [NAN], 0.0),
        ([INF, 1.0], [INF, 2.0], 0.5),
        ([INF], [-INF], INF),
        ([NAN], [INF], INF),
        ([1.0], [INF], INF),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.5e200, 0.0], [1e200, 0.0], 0.5),
        ([1.5e-200, 0.0], [1e-200, 0.0], 0.5),
        ([], [], 0.0),
        ([1, 3], [1, 2], 1 / math.sqrt(5)),
        ([True], [False], 1.0),
        ([1 + 1j], [1 - 1j], math.sqrt(2)),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0), 0.0),
        (torch.eye(2).to_sparse(), torch.eye(2), 0.0),
    ],
)
def test_distance(candidate: Any, reference: Any, expected: float) -> None:
    ours, theirs = (
        value if isinstance(value, torch.Tensor) else torch.from_numpy(numpy.asarray(value))
        for value in (candidate, reference)
    )
    assert distance(ours, theirs) == pytest.approx(expected, abs=0)


def test_results_that_cannot_be_compared() -> None:
    with pytest.raises(StepError, match=r"a tensor of shape \[2\], but of shape \[3\] under the reference"):
        distance(torch.ones(2), torch.ones(3))
    assert distances({"a": torch.ones(1)}, {"a": torch.ones(1)}) == {"a": 0}
    with pytest.raises(StepError, match="returned other names than under the reference: only one side has b, c"):
        distances({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "c": torch.ones(1)})
