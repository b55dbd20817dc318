"""torch.compile and what `install` has put in force.

Dynamo turns regions of torch.autocast into calls of PyTorch's `_enter_autocast` and `_exit_autocast`, in the graph and
while it traces. These use the methods of the class, so that the regions are ours where something is installed. No guard
of Dynamo's covers what is installed; `while_changing` makes it forget what it has compiled.

Source: torch/_dynamo/variables/ctx_manager.py, AutocastModeVariable (v2.13).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_promote import _C
from torch_promote.errors import RegionError
from torch_promote.integrations.after_import import run_after_import
from torch_promote.integrations.compile import DYNAMO, skip_frames, translator
from torch_promote.integrations.export import refuse_policy

__all__ = ["refuse_strict_export", "register", "while_changing"]


# Whether the thread that holds Dynamo's lock is in `while_changing`.
_is_changing = False


@contextlib.contextmanager
def while_changing(what: str) -> Iterator[Callable[[], None]]:
    """Keeps Dynamo from compiling while what is installed changes.

    Args:
        what: The function that changes it, for the error.

    Yields:
        A function that makes Dynamo forget what it has compiled.

    Raises:
        RegionError: This thread is compiling: it would compile one function for two policies. Or the process was
            forked while another thread was compiling: Dynamo would wait for that thread forever.
    """
    dynamo = sys.modules.get(DYNAMO)
    frames: Any = sys.modules.get(f"{DYNAMO}.convert_frame")
    if dynamo is None or frames is None:
        yield lambda: None
        return
    global _is_changing
    nested = _is_changing and frames.compile_lock._is_owned()  # in a signal handler
    if frames.compile_lock._is_owned() and not nested:
        raise RegionError(
            f"{what} was called while torch.compile compiles in this thread, from a backend or a function that it "
            f"calls. Regions in the same function would get different policies. Call {what} before you call the "
            f"compiled function."
        )
    if _compiler_is_gone:
        raise RegionError(
            f"{what} was called in a process that was forked while another thread compiled with torch.compile. "
            f"PyTorch cannot compile anything here, nor forget what is compiled: it waits for that thread, which this "
            f"process does not have. Call {what} before the fork, or start the process with the start method 'spawn'."
        )
    with frames.compile_lock:
        _is_changing = True
        try:
            yield dynamo.reset if frames.input_codes.seen else lambda: None
        finally:
            _is_changing = nested


# Whether another thread was compiling as this process was forked. A fork copies one thread, so nobody releases Dynamo's
# lock here.
_compiler_is_gone = False


def _look_for_compiler() -> None:
    global _compiler_is_gone
    frames: Any = sys.modules.get(f"{DYNAMO}.convert_frame")
    if frames is not None:
        if frames.compile_lock.acquire(blocking=False):
            frames.compile_lock.release()
        else:
            _compiler_is_gone = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_look_for_compiler)


def refuse_strict_export() -> None:
    """If Dynamo traces for torch.export in a region whose policy is not stock's, adds a call to the graph that raises.

    Strict export runs the graph of Dynamo's once more to record aten ops, and that call then raises the error of
    `record_enter`. Dynamo would hide an error that is raised here.
    """
    tracing = translator()
    if tracing is None or _C.policy_is_stock():
        return
    if tracing.output.export or torch.compiler.is_exporting():
        tracing.output.create_node("call_function", refuse_policy, (), {})


def _enter_stock(*values: Any) -> Any:
    region = _stock_type(*values)
    region.__enter__()
    return region


def _exit_stock(region: Any) -> None:
    region.__exit__(None, None, None)


_stock_type: Any = None


def register(enter: Any, exit_: Any, stock_type: type) -> None:
    """Tells Dynamo, now or when it is imported, of the methods that regions of torch.autocast have.

    Args:
        enter: Our `__enter__`.
        exit_: Our `__exit__`.
        stock_type: The class whose regions stay PyTorch's.
    """
    global _stock_type
    _stock_type = stock_type
    run_after_import(DYNAMO, functools.partial(_register_with_dynamo, enter, exit_))


def _register_with_dynamo(enter: Any, exit_: Any) -> None:
    skip_frames(enter, exit_)
    for function in (refuse_policy, _enter_stock, _exit_stock):
        torch.fx.node.has_side_effect(function)
    _register_stock_type()


def _register_stock_type() -> None:
    """Makes regions of the stock type calls of their own in the graph.

    To Dynamo every object of a subclass of torch.autocast is one of torch.autocast.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import ConstantVariable, builder
    from torch._dynamo.variables import torch as classes
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    class_variable: Any = classes.TorchCtxManagerClassVariable
    original = class_variable.call_function

    class StockAutocastVariable(AutocastModeVariable):
        def enter(self, tx: Any) -> Any:
            region = _enter_stock(*self.target_values)
            self.set_cleanup_hook(tx, lambda: _exit_stock(region))
            self.proxy = tx.output.create_node("call_function", _enter_stock, (*self.target_values,), {})
            return ConstantVariable.create(None)

        def exit(self, tx: Any, *args: Any) -> Any:
            self.cleanup_assert()
            tx.output.create_node("call_function", _exit_stock, (self.proxy,), {})
            return ConstantVariable.create(None)

        def module_name(self) -> str:
            return str(_stock_type.__module__)

        def fn_name(self) -> str:
            return str(_stock_type.__name__)

        def python_type(self) -> type:
            return _stock_type  # type: ignore[no-any-return]

    def build(self: Any, value: Any) -> Any:
        self.install_guards(GuardBuilder.ID_MATCH)
        values = [value.device, value.fast_dtype, value._enabled, value._cache_enabled]
        return StockAutocastVariable(target_values=values, source=self.source)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is not _stock_type:
            return original(self, tx, args, kwargs)
        autocast: Any = torch.amp.autocast_mode.autocast
        as_stock = AutocastModeVariable.create(autocast, args, kwargs)
        return StockAutocastVariable(as_stock.target_values)

    for trace_numpy in (False, True):
        builder.VariableBuilder._type_dispatch_impl(trace_numpy)[_stock_type] = build
    classes.supported_ctx_manager_classes[_stock_type] = None
    class_variable.call_function = call_function
