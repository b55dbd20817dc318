"""Dynamo's variables for regions, like its variable for torch.autocast.

If Dynamo traced a region like any other context manager, a region would cost more than one of torch.autocast: Dynamo
would trace the Python code of `__init__` and `__enter__`, guard on each name in it, and skip frames with a graph break
in the region. With these variables, Dynamo calls the class during tracing if the arguments are constants, and keeps the
packed spec.

Source: torch/_dynamo/variables/ctx_manager.py, AutocastModeVariable (v2.13).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_promote import _C
from torch_promote.integrations.after_import import run_after_import
from torch_promote.integrations.compile import DYNAMO, graph_enter, graph_exit, skip_frames

__all__ = ["install"]


def install(region_type: Any, *region_types: Any) -> None:
    """Makes regions traceable, now or when Dynamo is imported.

    Args:
        region_type: The class that takes only a packed spec.
        region_types: Its subclasses, `my_autocast` first.
    """
    # Importing Dynamo here would take a second.
    run_after_import(DYNAMO, functools.partial(_register, region_type, *region_types))


def _register(region_type: Any, my_autocast: Any, *others: Any) -> None:
    torch._dynamo.allow_in_graph(graph_enter)
    torch._dynamo.allow_in_graph(graph_exit)
    # Otherwise FX would remove the calls as dead code.
    torch.fx.node.has_side_effect(graph_enter)
    torch.fx.node.has_side_effect(graph_exit)
    # If Dynamo does trace `__init__`, it traces this instead of the extension's function.
    torch._dynamo.substitute_in_graph(_C.pack_plain_region, skip_signature_check=True)(_traced_pack)
    for kind in (region_type, my_autocast, *others):
        skip_frames(kind.__init__, kind._entered, kind._exited)  # compiling them gains nothing
    _register_variables((region_type, my_autocast, *others), (region_type, my_autocast))


def _traced_pack(*arguments: object) -> None:
    """Returns None, which leaves the packing to Python code that Dynamo can trace."""


def _register_variables(kinds: tuple[Any, ...], made_while_tracing: tuple[Any, ...]) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, builder, ctx_manager, user_defined

    region_type = kinds[0]
    generic: Any = ctx_manager.GenericContextWrappingVariable
    switched: Any = ctx_manager.ContextWrappingVariable
    class_variable: Any = user_defined.UserDefinedClassVariable

    class RegionVariable(generic, switched):  # type: ignore[misc]
        """A region: a context manager that graph breaks leave and re-enter, with attributes and methods."""

        def __init__(self, cm_obj: Any, target_values: Any = None, **kwargs: Any) -> None:
            super().__init__(cm_obj, target_values=(cm_obj._packed,), **kwargs)

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
            name = codegen.tx.output.install_global_by_id("__region", self.cm_obj)
            codegen.append_output(codegen.create_load_global(name, add=True))

    class RegionClassVariable(class_variable):  # type: ignore[misc]
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            try:
                values = [value.as_python_constant() for value in args]
                named = {name: value.as_python_constant() for name, value in kwargs.items()}
                return RegionVariable(self.value(*values, **named))
            except Exception:  # not a constant, or an error of the class, which the traced code will raise
                return super().call_function(tx, args, kwargs)

    def build_class(self: Any, value: Any) -> Any:
        self.install_guards(GuardBuilder.CLASS_MATCH)
        return RegionClassVariable(value, source=self.source)

    def build(self: Any, value: Any) -> Any:
        self.install_guards(GuardBuilder.TYPE_MATCH)
        install_guard(AttrSource(self.source, "_packed").make_guard(GuardBuilder.EQUALS_MATCH))
        return RegionVariable(value, source=self.source)

    for kind in made_while_tracing:
        builder.VariableBuilder._id_dispatch()[id(kind)] = build_class
    for trace_numpy in (False, True):
        for kind in kinds:
            builder.VariableBuilder._type_dispatch_impl(trace_numpy)[kind] = build
