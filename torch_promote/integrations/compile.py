"""Regions under torch.compile.

Inside a compiled function, a region is two calls in the graph, `graph_enter` and `graph_exit`. Dynamo runs them while
it traces, to see the dtypes of ops inside. AOTAutograd runs them while it traces the aten graph, to record the casts.
The compiled code contains only the casts. The two have to be plain functions that Dynamo allows in the graph: if they
were ops of torch.library, the dispatcher would undo their changes of the dispatch state when they return.

While `install` is in force, Dynamo turns regions of torch.autocast into calls of PyTorch's `_enter_autocast` and
`_exit_autocast`, in the graph and during tracing. These call the methods of the class, so the regions are ours. Dynamo
does not guard on the installation; instead, `while_changing` discards compiled code when it changes.

Source: torch/_dynamo/variables/ctx_manager.py, AutocastModeVariable (v2.13).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from torch_promote import _C
from torch_promote.errors import RegionError
from torch_promote.extension import RegionSpec, tables_in_force


def record_enter(packed: str) -> None:
    """Records the start of a region with the modes of torch.export. Raises RegionError if its policy is not stock's."""
    modes = _export_modes()
    if modes and not _C.policy_is_stock():
        refuse_policy()
    for mode in modes:
        spec = RegionSpec.unpack(packed)
        for device in spec.devices:
            mode.__torch_function__(_enter_autocast, (), (*device, spec.cache_enabled))


def record_exit(packed: str) -> None:
    """Records the end of a region with the active modes of torch.export."""
    for mode in _export_modes():
        for _ in RegionSpec.unpack(packed).devices:
            mode.__torch_function__(_exit_autocast, (), ())


def refuse_policy() -> None:
    """Raises the error of `record_enter`."""
    raise RegionError(
        "a region with overrides (of ops or modules) or a promotion rule cannot be exported: an exported graph can "
        "only contain regions of torch.autocast, which have neither. Export without them, or write the casts into the "
        "module."
    )


def _export_modes() -> list[Any]:
    mode = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    return [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, mode)]


class _RunAfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        # Ask the other finders on the list; some of them may wait for the same module.
        specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            exec_module = loader.exec_module

            def exec_then_run(module: ModuleType) -> None:
                exec_module(module)
                self.function()

            loader.exec_module = exec_then_run
        return spec


def run_after_import(name: str, function: Callable[[], None]) -> None:
    """Runs `function` as soon as the module is imported, or immediately if it already is."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _RunAfterImport(name, function))


# The owner of regions that a graph opens. A graph that raises does not end its regions; the extension ends those of
# this owner together with the region around them.
_GRAPH = None


#: Not empty once a graph has opened a region in any thread.
_opened: list[bool] = []


def graphs_open_regions() -> bool:
    """Whether a compiled function, or one during compilation, has opened a region in this process."""
    return bool(_opened)


def graph_enter(packed: str) -> None:
    """Opens a region from a graph. `packed` is the packed spec of the region."""
    if not _opened:
        _opened.append(True)
    if (compilation := torch._guards.TracingContext.try_get()) is not None:
        compilation.torch_promote_opens_regions = True  # type: ignore[attr-defined]
    base = _C.depth()
    surroundings = _C.enter_region(_GRAPH, packed)
    try:
        _unwind_after_tracing(base)
        if surroundings & _C.TORCH_FUNCTION_MODE:
            record_enter(packed)
    except BaseException:
        _C.exit_region(_GRAPH)
        raise


def graph_exit(packed: str) -> None:
    """Ends the innermost region that `graph_enter` opened."""
    if _C.exit_region(_GRAPH) & _C.TORCH_FUNCTION_MODE:
        record_exit(packed)


def translator() -> Any:
    """Returns Dynamo's bytecode translator if it is tracing in this thread, or None."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    if module is None:
        return None
    try:
        return module.InstructionTranslator.current_tx()
    except (AttributeError, LookupError):
        return None


def _unwind_after_tracing(base: int) -> None:
    """Makes Dynamo, if it is tracing, end the region when it aborts the trace."""
    tracing = translator()
    if tracing is None:
        return  # not Dynamo: a backend runs the graph

    def unwind() -> None:
        if _C.depth() > base:
            _C.suspend_regions(base)

    tracing.output.add_cleanup_hook(unwind)


def skip_frames(*functions: Any, inner: bool = True) -> None:
    """Keeps Dynamo from compiling frames of these functions and (`inner`) of the functions that they call."""
    # After a graph break, Dynamo compiles each function that the broken one calls separately.
    eval_frame: Any = torch._C._dynamo.eval_frame  # exists even before torch._dynamo is imported
    actions = eval_frame._FrameAction
    skip = eval_frame._FrameExecStrategy(actions.SKIP, actions.SKIP if inner else actions.DEFAULT)
    for function in (*functions, skip_frames):  # Dynamo would warn that it cannot trace the line above
        eval_frame.set_code_exec_strategy(function.__code__, skip)


def _complete_disk_cache_keys() -> None:
    """Adds the current policy, and autocast dtypes if they are missing, to the keys of AOTAutograd's disk cache."""
    # PyTorch puts the dtypes into the key since 2.12 (autograd_cache.py, autocast_state). A policy's fingerprint has 25
    # bits, so two policies may have the same one; the digest distinguishes them. See NOTE [ Policy fingerprint ].
    details = sys.modules[_DISK_CACHE].AOTAutogradCacheDetails
    original = details.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Under the stock policy, add nothing: processes with and without this package then share entries.
        if digest := "/".join(filter(None, (part() for part in digests))):
            self.torch_promote_policy = digest
        if not hasattr(self, "autocast_state"):
            devices = torch._C._autocast_supported_devices()
            state = {name: torch.get_autocast_dtype(name) for name in devices if torch.is_autocast_enabled(name)}
            if state:
                self.autocast_state = state

    details.__init__ = init


def _run_backwards_without_autocast() -> None:
    """Makes the backward of a graph that opens regions run with autocast off."""
    # Its graph contains the casts, but AOTAutograd turns autocast off only if it was on at the call: `backward()` in a
    # region would cast once more, and, for dynamic shapes, write out of bounds of a buffer of another dtype.
    # Source: torch/_functorch/_aot_autograd/runtime_wrappers.py, AOTDispatchAutograd.post_compile (v2.13).
    owner = sys.modules[_AOT_RUNTIME].AOTDispatchAutograd
    original = owner.post_compile
    signature = inspect.signature(original)

    def post_compile(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if hasattr(torch._guards.TracingContext.try_get(), "torch_promote_opens_regions"):
            if "spec" in given.arguments:
                given.arguments["spec"] = dataclasses.replace(given.arguments["spec"], disable_amp=True)
            else:  # before 2.13
                given.arguments["disable_amp"] = True
        return original(*given.args, **given.kwargs)

    owner.post_compile = staticmethod(post_compile)


def note_float8() -> None:
    """Called for each product in float8. If it becomes part of a graph, the graph is noted."""
    if (compilation := torch._guards.TracingContext.try_get()) is not None:
        compilation.torch_promote_in_float8 = True  # type: ignore[attr-defined]


def _round_graphs_in_float8() -> None:
    """Makes Inductor round what a graph with products of `linear` in float8 computes, as eager code does."""
    # Inductor leaves out conversions between ops that it fuses. In float8, a recomputed value may then get another
    # scale, or round to another of few values: the gradients are those of another forward (pytorch issue 150859).
    # Source: torch/_inductor/compile_fx.py, compile_fx_inner (v2.13), which looks the function up by its name.
    owner = sys.modules[_INDUCTOR]
    original = owner._compile_fx_inner  # type: ignore[attr-defined]

    @functools.wraps(original)
    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(torch._guards.TracingContext.try_get(), "torch_promote_in_float8"):
            return original(*args, **kwargs)
        with owner.config.patch(emulate_precision_casts=True):
            return original(*args, **kwargs)

    owner._compile_fx_inner = compile_graph  # type: ignore[attr-defined]


def policy_digest() -> str:
    """Returns a digest of this thread's current policy, the same in every process; "" for stock's."""
    if _C.policy_is_stock():
        return ""
    policy = (sorted(_C.current_policy().items()), _C.promotion_content(), *tables_in_force())
    return hashlib.sha256(repr(policy).encode()).hexdigest()


#: The parts that the disk cache's key gets: the current policy, and the `install` settings for regions in graphs.
digests: list[Callable[[], str]] = [lambda: policy_digest()]


DYNAMO = "torch._dynamo"
_DISK_CACHE = "torch._functorch._aot_autograd.autograd_cache"
_INDUCTOR = "torch._inductor.compile_fx"
_AOT_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"


def install(*region_types: Any) -> None:
    """Makes regions traceable, and completes AOTAutograd: now, or when the modules are imported."""
    # The first type is the class that takes only a packed spec, the others are the subclasses of it in this package.
    run_after_import(_DISK_CACHE, _complete_disk_cache_keys)
    run_after_import(_AOT_RUNTIME, _run_backwards_without_autocast)
    run_after_import(_INDUCTOR, _round_graphs_in_float8)
    run_after_import(DYNAMO, functools.partial(_register_regions, *region_types))


@contextlib.contextmanager
def while_changing(what: str) -> Iterator[Callable[[], None]]:
    """Keeps Dynamo from compiling while `what` changes the installation. Yields what discards compiled code."""
    # If this thread is compiling, one function would be compiled for two policies.
    dynamo = sys.modules.get(DYNAMO)
    frames: Any = sys.modules.get(f"{DYNAMO}.convert_frame")
    if dynamo is None or frames is None:
        yield lambda: None
        return
    if frames.compile_lock._is_owned():
        raise RegionError(
            f"{what} was called while torch.compile compiles in this thread (from a backend, or a function called "
            f"during tracing). Regions in the same function would get different policies. Call {what} before you call "
            f"the compiled function."
        )
    with frames.compile_lock:
        yield dynamo.reset if frames.input_codes.seen else lambda: None


def refuse_strict_export() -> None:
    """Adds a call that raises to Dynamo's graph, if that is for torch.export, in a region with a policy."""
    # Dynamo would hide an error raised during tracing. Strict export runs its graph once more to record aten ops.
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
    """Registers our methods of torch.autocast with Dynamo, now or when it is imported."""
    global _stock_type
    _stock_type = stock_type
    run_after_import(DYNAMO, functools.partial(_register_installation, enter, exit_))


def _register_installation(enter: Any, exit_: Any) -> None:
    """Makes regions of the stock type calls in the graph of their own, and not those of torch.autocast."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import ConstantVariable, builder
    from torch._dynamo.variables import torch as classes
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    skip_frames(enter, exit_)
    for function in (refuse_policy, _enter_stock, _exit_stock):
        torch.fx.node.has_side_effect(function)
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


# NOTE [ Dynamo's variables for regions ]
# If Dynamo traced a region like any other context manager, a region would cost more than one of torch.autocast: Dynamo
# would trace the Python code of `__init__` and `__enter__`, guard on each name in it, and skip frames with a graph
# break in the region. With these variables, like its own for torch.autocast, Dynamo calls the class during tracing if
# the arguments are constants, and keeps the packed spec.


def _register_regions(*region_types: Any) -> None:
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

        for subclass in kind.__subclasses__():
            register(subclass)

    region_type.when_subclassed = register
    register(region_type)
