"""A crosscheck restores all state however the block ends, and does not affect other threads."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.crosscheck_state import is_on, off_before_and_after
from torch_promote import _C
from torch_promote.observe.dispatch import DispatchObserverError, observe_dispatch

__all__ = ["off_before_and_after"]  # fixture


def test_on_inside_and_off_outside() -> None:
    with tp.crosscheck() as report:
        assert is_on()
        torch.ones(2)
    torch.ones(2)
    assert not is_on()
    assert report.calls == report.checked.total() + report.composite.total() > 0


def test_a_bad_level() -> None:
    with (
        pytest.raises(tp.errors.OptionError, match=r"^'bit' is not a level of crosscheck\. Legal: 'dtype', 'bits'\."),
        tp.crosscheck(level="bit"),
    ):  # type: ignore[arg-type]
        pass


class MineError(Exception):
    pass


def test_an_exception_in_the_block() -> None:
    with pytest.raises(MineError), tp.crosscheck():
        raise MineError
    assert not is_on()


@pytest.mark.parametrize("level", ["dtype", "bits"])
def test_errors_of_ops_pass_unchanged(level: Any) -> None:
    def fails() -> None:
        with tp.my_autocast("cpu"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))

    with pytest.raises(RuntimeError) as plain:
        fails()
    with tp.crosscheck(level=level) as report:
        with pytest.raises(RuntimeError) as checked:
            fails()
        assert torch.ones(2).sum() == 2  # and the check goes on
    assert type(checked.value) is type(plain.value)
    assert str(checked.value) == str(plain.value)
    names = [[frame.name for frame in traceback.extract_tb(e.value.__traceback__)] for e in (plain, checked)]
    assert names[0] == names[1]
    assert report.mismatches == []
    assert report.checked["aten.sum.default"] == 1


def test_errors_of_python_kernels_pass_unchanged() -> None:
    @torch.library.custom_op("torch_promote_tests::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise MineError("as it was")

    with tp.crosscheck() as report, pytest.raises(MineError, match="as it was") as raised:
        fails(torch.ones(2))
    assert traceback.extract_tb(raised.value.__traceback__)[-1].line == 'raise MineError("as it was")'
    assert report.mismatches == []


@pytest.mark.parametrize("level", ["dtype", "bits"])
def test_errors_that_come_through_a_dispatch_mode(level: Any) -> None:
    class PassesOn(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    def pool(dtype: torch.dtype) -> None:
        torch.ops.aten.adaptive_max_pool3d(torch.ones(1, 2, 4, 4, 4, dtype=dtype), [2, 2, 2])

    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        with PassesOn(), pytest.raises(NotImplementedError, match="ComplexFloat"):
            pool(torch.complex64)
        with pytest.raises(NotImplementedError, match="Long"):
            pool(torch.int64)  # would be compared with the first call, if that were still open
    assert report.mismatches == []


class Seen:
    """An observer that counts calls, and raises at one of its methods."""

    stock_too = False
    see_through = True

    def __init__(self, raises: str = "") -> None:
        self.raises = raises
        self.calls: list[str] = []

    def _came(self, what: str) -> None:
        self.calls.append(what)
        if what == self.raises:
            raise MineError(what)

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Seen:
        self._came("begin")
        torch.ones(2).sin()  # its own ops are not shown to it
        return self

    def before_stock(self, token: Any) -> list[Any]:
        return []

    def after_stock(self, token: Any, results: list[Any], error: str | None) -> None:
        pass

    def end(self, token: Any, results: list[Any]) -> None:
        self._came("end")

    def failed(self, token: Any) -> None:
        self._came("failed")


def test_the_observer_does_not_observe_itself() -> None:
    x = torch.ones(2)
    with observe_dispatch(seen := Seen()):
        x.sin()
    assert seen.calls == ["begin", "end"]


@pytest.mark.parametrize(("raises", "calls"), [("begin", ["begin"]), ("end", ["begin", "end", "failed"])])
def test_errors_of_the_observer_are_raised_by_the_op(raises: str, calls: list[str]) -> None:
    x = torch.ones(2)
    seen = Seen(raises)
    with pytest.raises(MineError, match=raises), observe_dispatch(seen):
        x.sin()
    assert seen.calls == calls
    assert not is_on()


def test_nested_blocks_check_once_and_add_up() -> None:
    x = torch.ones(2)
    with tp.crosscheck() as outer:
        x.sin()
        with tp.crosscheck(level="bits") as inner:
            x.cos()
        assert is_on()
        x.tan()
    assert inner.checked == {"aten.cos.default": 1}
    assert outer.checked == {f"aten.{name}.default": 1 for name in ("sin", "cos", "tan")}


def test_a_nested_block_that_raises_still_reports() -> None:
    x = torch.ones(2)
    with tp.crosscheck() as outer:
        with pytest.raises(ZeroDivisionError), tp.crosscheck():
            x.cos().add_(1 // 0)
        x.sin()
    assert outer.checked == {"aten.cos.default": 1, "aten.sin.default": 1}


def test_a_generator_that_is_closed_early() -> None:
    def steps() -> Iterator[int]:
        with tp.crosscheck():
            yield 1
            yield 2

    running = steps()
    assert next(running) == 1
    assert is_on()
    running.close()
    assert not is_on()


def test_other_threads_are_neither_checked_nor_disturbed() -> None:
    x = torch.ones(2)
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(is_on())
        found.append(x.cos())
        with tp.crosscheck() as own:
            x.tan()
        found.append(own.checked)

    with tp.crosscheck() as report:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        x.sin()
    assert report.checked == {"aten.sin.default": 1}
    assert found[0] is False
    assert torch.equal(found[1], x.cos())
    assert found[2] == {"aten.tan.default": 1}


def test_two_threads_check_at_once() -> None:
    barrier = threading.Barrier(2, timeout=30)
    found: dict[str, Any] = {}

    def work(name: str) -> None:
        x = torch.ones(2)
        with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
            for _ in range(20):
                barrier.wait()
                getattr(x, name)()
        found[name] = report.checked

    threads = [threading.Thread(target=work, args=(name,)) for name in ("sin", "cos")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: {f"aten.{name}.default": 20} for name in ("sin", "cos")}


def test_tensors_are_let_go_of() -> None:
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
        x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
        y = x @ w
        alive = [weakref.ref(tensor) for tensor in (x, w, y)]
        del x, w, y
        tp.clear_cache()
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3
    assert report.with_stock.total() == 1


def test_a_key_that_another_library_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> None:
        raise RuntimeError("tried to register multiple backend fallbacks")

    monkeypatch.setattr(_C, "register_dispatch_observer", taken)
    with (
        pytest.raises(DispatchObserverError, match="another library has registered a fallback on it"),
        tp.crosscheck(),
    ):
        pass
    assert not is_on()
