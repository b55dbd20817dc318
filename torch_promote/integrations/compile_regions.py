"""Dynamo's variables for regions, like its variable for torch.autocast.

If Dynamo traced a region like any other context manager, a region would cost more than one of torch.autocast: Dynamo
would trace the Python code of `__init__` and `__enter__`, guard on each name in it, and skip frames with a graph break
in the region. With these variables, Dynamo calls the class during tracing if the arguments are constants, and keeps the
packed spec.

Source: torch/_dynamo/variables/ctx_manager.py, AutocastModeVariable (v2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_promote import _C
from torch_promote.integrations.after_import import run_after_import
from torch_promote.integrations.compile import DYNAMO, graph_enter, graph_exit, skip_frames

__all__ = ["install"]


def install(*region_types: Any) -> None:
    """Makes regions traceable, now or when Dynamo is imported.

    Args:
        region_types: The class that takes only a packed spec, and the subclasses of it in this package.
    """
    # Importing Dynamo here would take a second.
    run_after_import(DYNAMO, functools.partial(_register, *region_types))


def _register(*region_types: Any) -> None:
    torch._dynamo.allow_in_graph(graph_enter)
    torch._dynamo.allow_in_graph(graph_exit)
    # Otherwise FX would remove the calls as dead code.
    torch.fx.node.has_side_effect(graph_enter)
    torch.fx.node.has_side_effect(graph_exit)
    # If Dynamo does trace `__init__`, it traces this instead of the extension's function.
    torch._dynamo.substitute_in_graph(_C.pack_plain_region, skip_signature_check=True)(_traced_pack)
    for kind in region_types:
        skip_frames(kind.__init__, kind._entered, kind._exited)  # compiling them gains nothing
    _register_variables(region_types)


def _traced_pack(*arguments: object) -> None:
    """Returns None, which leaves the packing to Python code that Dynamo can trace."""


class _Methods:  # pragma: no cover: Dynamo traces the methods, and nothing calls them
    """What Dynamo traces instead of the methods of a region, which are C functions. `self` is a region."""

    _packed: str

    def __enter__(self) -> Any:
        graph_enter(self._packed)
        return self

    def __exit__(self, *error: object) -> None:
        graph_exit(self._packed)


def _register_variables(kinds: tuple[Any, ...]) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, builder, ctx_manager, functions, user_defined

    region_type = kinds[0]
    generic: Any = ctx_manager.GenericContextWrappingVariable
    switched: Any = ctx_manager.ContextWrappingVariable
    class_variable: Any = user_defined.UserDefinedClassVariable

    class TracedRegionVariable(generic):  # type: ignore[misc]
        """A region whose `__init__` Dynamo has traced: the object does not exist yet."""

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in ("__enter__", "__exit__"):  # not by a with statement
                return functions.UserFunctionVariable(getattr(_Methods, name)).call_function(tx, [self, *args], kwargs)
            return super().call_method(tx, name, args, kwargs)

    class RegionVariable(TracedRegionVariable, switched):  # type: ignore[misc]
        """A region that exists: a context manager that graph breaks leave and re-enter."""

        def __init__(self, region: Any, target_values: Any = None, **kwargs: Any) -> None:
            super().__init__(region, target_values=(region._packed,), **kwargs)
            self.cm_obj = _Methods()  # `value` is the region

        def enter(self, tx: Any) -> Any:
            # If Dynamo aborts the trace inside the region, graph_enter's clean-up ends the region.
            self._call(tx, graph_enter)
            return self

        def exit(self, tx: Any, *error: Any) -> Any:
            self._call(tx, graph_exit)
            return ConstantVariable.create(None)

        def _call(self, tx: Any, function: Any) -> None:
            function(*self.target_values)
            tx.output.create_node("call_function", function, self.target_values, {})

        def supports_graph_breaks(self) -> bool:
            return True

        def module_name(self) -> str:
            return str(region_type.__module__)

        def fn_name(self) -> str:
            return str(region_type.__name__)

        def reconstruct(self, codegen: Any) -> None:
            name = codegen.tx.output.install_global_by_id("__region", self.value)
            codegen.append_output(codegen.create_load_global(name, add=True))

    class RegionClassVariable(class_variable):  # type: ignore[misc]
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            if self.value in kinds:
                try:
                    values = [value.as_python_constant() for value in args]
                    named = {name: value.as_python_constant() for name, value in kwargs.items()}
                    if not any(map(callable, (*values, *named.values()))):  # a function would not be called again
                        return RegionVariable(self.value(*values, **named), cls_source=self.source)
                except Exception:  # not a constant, or an error of the class, which the traced code will raise
                    pass
            region = super().call_function(tx, args, kwargs)
            if type(region) in (generic, user_defined.UserDefinedObjectVariable) and has_c_methods(self.value):
                region.__class__, region.cm_obj = TracedRegionVariable, _Methods()
            return region

        def var_getattr(self, tx: Any, name: str) -> Any:
            if name in ("__enter__", "__exit__") and has_c_methods(self.value):  # contextlib.ExitStack
                return functions.UserFunctionVariable(getattr(_Methods, name))
            return super().var_getattr(tx, name)

    def has_c_methods(kind: Any) -> bool:
        return kind.__enter__ is _C.RegionBase.__enter__ and kind.__exit__ is _C.RegionBase.__exit__

    def build_class(self: Any, value: Any) -> Any:
        self.install_guards(GuardBuilder.CLASS_MATCH)
        return RegionClassVariable(value, source=self.source)

    def build(self: Any, value: Any) -> Any:
        self.install_guards(GuardBuilder.TYPE_MATCH)
        install_guard(AttrSource(self.source, "_packed").make_guard(GuardBuilder.EQUALS_MATCH))
        return RegionVariable(value, source=self.source)

    def register(kind: Any) -> None:
        builder.VariableBuilder._id_dispatch()[id(kind)] = build_class
        if has_c_methods(kind):
            for trace_numpy in (False, True):
                builder.VariableBuilder._type_dispatch_impl(trace_numpy)[kind] = build

    region_type.when_subclassed = register
    _with_subclasses(region_type, register)


def _with_subclasses(kind: Any, register: Callable[[Any], None]) -> None:
    register(kind)
    for subclass in kind.__subclasses__():
        _with_subclasses(subclass, register)
