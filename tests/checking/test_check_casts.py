"""`check_casts`: a stale cast raises, in every cache mode and kind of tensor; blocks and the environment."""

from __future__ import annotations

import _thread
import ctypes
import pickle
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import ours
from helpers.subprocesses import environment, run_python
from torch_promote.checking.check_casts import check_casts

pytestmark = pytest.mark.usefixtures("nothing_persists")

check_casts_module = sys.modules[check_casts.__module__]
MODES = ("weights", "persistent", "all")
X = torch.linspace(-1, 1, 8 * 16).view(8, 16)


def trainable() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-2, 2, 16 * 4).view(16, 4))


def over_numpy() -> tuple[Any, nn.Parameter]:
    """An array, and a frozen weight over its memory."""
    array = torch.linspace(-2, 2, 16 * 4).view(16, 4).numpy()
    return array, nn.Parameter(torch.from_numpy(array), requires_grad=False)


# --- stale casts


def trained_weight(cache: str) -> Iterator[torch.Tensor]:
    weight = trainable()
    with ours(cache=cache):
        yield X @ weight
        weight.data.mul_(2)
        yield X @ weight


def weight_over_an_array(cache: str) -> Iterator[torch.Tensor]:
    array, weight = over_numpy()
    with ours(cache=cache):
        yield X @ weight
        array *= 2
        yield X @ weight


def between_regions(cache: str) -> Iterator[torch.Tensor]:
    weight = nn.Parameter(torch.linspace(-2, 2, 16 * 4).view(16, 4), requires_grad=False)
    for _ in range(2):
        with ours(cache=cache), torch.no_grad():
            yield X @ weight
        ctypes.memset(weight.data_ptr(), 0, weight.nbytes)


def activation(cache: str) -> Iterator[torch.Tensor]:
    x = X * 1.5
    other = torch.ones(16, 2, dtype=torch.bfloat16)
    with ours(cache=cache):
        yield x @ other
        x.data.mul_(2)
        yield x @ other


STALE = [
    (trained_weight, "weights"),
    (trained_weight, "persistent"),
    (trained_weight, "all"),
    (weight_over_an_array, "all"),
    (between_regions, "persistent"),
    (activation, "all"),
]


@pytest.mark.parametrize(("program", "cache"), STALE)
def test_a_stale_cast_raises(program: Callable[[str], Iterator[torch.Tensor]], cache: str) -> None:
    with check_casts(False):
        first, second = program(cache)
    assert torch.equal(first, second), "the cache detects this write: nothing is stale"
    run = program(cache)
    with check_casts() as checks:
        next(run)
        with pytest.raises(tp.errors.StaleCastError, match=f"cache mode: {cache}"):
            next(run)
    assert checks.checked == 1


def test_a_detected_write_does_not_raise() -> None:
    for cache in MODES:
        weight = trainable()
        with check_casts() as checks, ours(cache=cache):
            for _ in range(3):
                X @ weight
                with torch.no_grad():
                    weight.mul_(2)
                X @ weight
        assert checks.checked >= 2


def test_a_zero_that_changes_its_sign_and_a_nan() -> None:
    weight = nn.Parameter(torch.tensor([[0.0, float("nan")]]))
    with check_casts() as checks, ours():
        for _ in range(3):
            torch.ones(1, 1) @ weight
        assert checks.checked == 2
        weight.data.neg_()
        with pytest.raises(tp.errors.StaleCastError, match=r"the first at \[0, 0\]: 0\.0 instead of -0\.0"):
            torch.ones(1, 1) @ weight


def test_the_stale_cast_is_dropped_and_the_state_restored() -> None:
    for cache in MODES:
        weight = trainable()
        with check_casts(), ours(cache=cache):
            X @ weight
            weight.data.mul_(2)
            for _ in range(2):  # the second time it is a use of a new cast
                try:
                    y = X @ weight
                except tp.errors.StaleCastError:
                    continue
            assert torch.equal(y, X.bfloat16() @ weight.detach().bfloat16())


# --- the error


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def raised(model: nn.Module, write: Callable[[], object], cache: str = "weights") -> tp.errors.StaleCastError:
    with check_casts(), ours(cache=cache):
        model(X)
        write()
        with pytest.raises(tp.errors.StaleCastError) as caught:
            model(X)
    return caught.value


def test_the_error_names_the_weight_the_mode_and_both_lines() -> None:
    model = nn.ModuleDict({"encoder": Encoder()})
    error = raised(model["encoder"], lambda: model["encoder"].layers[1].weight.data.mul_(2))
    assert error.weight == "encoder.layers.1.weight (Parameter, 16 x 16, float32)"
    assert (error.dtype, error.mode) == ("bfloat16", "weights")
    # The lines of the user's module, not those of nn.Linear.
    for line in (error.first_line, error.this_line):
        assert line.endswith("in forward: x = layer(x)")
        assert __file__ in line
    text = str(error)
    for part in (
        error.weight,
        "cache mode: weights",
        error.first_line,
        "clear_cache()",
        'cache="none"',
        "docs/casts.md",
    ):
        assert part in text
    assert str(pickle.loads(pickle.dumps(error))) == text


def test_each_line_is_its_own() -> None:
    weight = trainable()
    with check_casts(), ours():
        first = X @ weight  # the first cast
        weight.data.mul_(2)
        with pytest.raises(tp.errors.StaleCastError) as caught:
            first + X @ weight
    assert caught.value.first_line.endswith(": first = X @ weight  # the first cast")
    assert caught.value.this_line.endswith(": first + X @ weight")


def test_a_tensor_outside_of_modules_has_no_name() -> None:
    for program, cache, text in (
        (trained_weight, "weights", "a Parameter (16 x 4, float32)"),
        (activation, "all", "a Tensor (8 x 16, float32)"),
    ):
        with check_casts(), pytest.raises(tp.errors.StaleCastError) as caught:
            list(program(cache))
        assert caught.value.weight == text


def test_a_module_that_cannot_be_asked_for_its_parts_has_its_own_names() -> None:
    class Closed(nn.Linear):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not yet")

    model = Closed(16, 16)
    assert raised(model, lambda: model.weight.data.mul_(2)).weight == "weight (Parameter, 16 x 16, float32)"


def test_a_cast_from_before_the_check() -> None:
    weight = trainable()
    with ours():
        with check_casts(False):
            X @ weight
        weight.data.mul_(2)
        with (
            check_casts(),
            pytest.raises(tp.errors.StaleCastError, match="unknown: it was made before the check began"),
        ):
            X @ weight


# --- threads


def test_every_thread_is_checked() -> None:
    errors: list[Exception] = []

    def serve() -> None:
        try:
            list(trained_weight("weights"))
        except tp.errors.StaleCastError as error:
            errors.append(error)

    with check_casts() as checks:
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert checks.checked == len(errors) == 1


# --- blocks


def test_the_block_entered_last_decides() -> None:
    with check_casts(False) as outer, check_casts() as inner:
        with check_casts(False) as off:
            list(trained_weight("weights"))
        with pytest.raises(tp.errors.StaleCastError):
            list(trained_weight("weights"))
    assert (outer.checked, inner.checked, off.checked) == (1, 1, 0)


def test_blocks_may_end_in_any_order() -> None:
    with check_casts(False):
        first, second = check_casts(), check_casts()
        for block in (first, second):
            block.__enter__()
        first.__exit__(None, None, None)
        with pytest.raises(tp.errors.StaleCastError):
            list(trained_weight("weights"))
        second.__exit__(None, None, None)
        list(trained_weight("weights"))
        assert (first.checked, second.checked) == (0, 1)


def test_a_thread_without_a_line_of_the_program() -> None:
    lines: list[str] = []
    ended = threading.Event()

    def call_and_tell() -> None:
        lines.append(check_casts_module.line_of_this_thread())
        ended.set()

    _thread.start_new_thread(call_and_tell, ())
    assert ended.wait(60)
    assert lines.pop().startswith(f"{__file__}:")
    # As in a thread of C++, nothing calls the function.
    result: queue.SimpleQueue[str] = queue.SimpleQueue()
    code = compile("put(line_of_this_thread())", check_casts_module.__file__, "exec")
    call = types.FunctionType(code, {**vars(check_casts_module), "put": result.put})
    _thread.start_new_thread(call, ())
    assert result.get(timeout=60) == "a thread that runs no Python, such as one of autograd's"


def test_a_bad_argument() -> None:
    with pytest.raises(tp.errors.OptionError, match=r"enabled is 'yes', which is not a bool\. Legal: True, False\."):
        tp.check_casts("yes")  # type: ignore[arg-type]


# --- the environment

PROGRAM = """
import torch, torch_promote as tp
w = torch.nn.Parameter(torch.ones(4, 4))
with tp.my_autocast("cpu"):
    torch.ones(4, 4) @ w
    w.data.mul_(2)
    torch.ones(4, 4) @ w
print("not detected")
"""


@pytest.mark.parametrize(
    ("value", "end"),
    [
        ("1", "StaleCastError: the cast of a Parameter (4 x 4, float32) to bfloat16 has stale data"),
        ("0", "not detected"),
        ("on", "TORCH_PROMOTE_CHECK_CASTS is 'on'. Legal: 1 (check every reused cast), 0."),
    ],
)
def test_the_environment(value: str, end: str) -> None:
    ran = run_python(PROGRAM, env=environment(TORCH_PROMOTE_CHECK_CASTS=value))
    assert end in ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (value == "0")
