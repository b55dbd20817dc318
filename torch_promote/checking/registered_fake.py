"""A custom op's registered fake as its rule: the dtype, shape and strides that it gives each result of a call.

An op has a fake if its author called `torch.library.register_fake`, or registered a kernel on the dispatch key Meta.
The reference has rules for PyTorch's own ops only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton as _registry
from torch.utils._python_dispatch import _disable_current_modes

from torch_promote.observe.ops import is_fake, leaves, overload_name
from torch_promote.reference.autocast import tensors_in as tensors_by_path
from torch_promote.reference.promotion import Operand
from torch_promote.reference.strides import contiguous_strides

__all__ = ["FakeResults", "has_fake", "results_of_fake"]

#: The namespaces of PyTorch's own ops. Some have kernels on Meta that PyTorch does not use as fakes.
_OF_PYTORCH = frozenset(
    [
        "aten",
        "prim",
        "prims",
        "profiler",
        "quantized",
        "_quantized",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "xnnpack",
        "prepacked",
        "inductor",
        "rngprims",
        "debugprims",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "c10d_functional",
        "fsdp",
        "symm_mem",
        "higher_order",
        "export",
        "static_runtime",
        "sparse",
        "streams",
        "_dtensor",
        "dtensor",
    ]
)


@dataclass(frozen=True, slots=True)
class FakeResults:
    """What the fake of an op gives for a call.

    Attributes:
        tensors: The results, with lists flattened. None stands for an undefined result.
        error: The error that the fake raises instead, or None.
    """

    tensors: tuple[torch.Tensor | None, ...] = ()
    error: str | None = None

    def difference(self, results: Sequence[Any]) -> tuple[str, str, str] | None:
        """Compares the results of the op's kernel with those of its fake.

        Args:
            results: The call's results, in the schema's order.

        Returns:
            What differs ("dtype", "shape", "strides", or "error" if only the fake raises), the fake's value and the
            kernel's. None if nothing differs.
        """
        if self.error is not None:
            return "error", f"an error: the op's registered fake raises {self.error}", "a result"
        got = list(leaves(results))
        names = [f"result[{index}]" for index in range(len(self.tensors))]
        dtypes = [tuple(None if t is None else t.dtype for t in side) for side in (self.tensors, got)]
        if dtypes[0] != dtypes[1]:
            return "dtype", f"{_names(dtypes[0])}{_SOURCE}", _names(dtypes[1])
        for name, fake, real in zip(names, self.tensors, got, strict=True):
            if fake is None or real is None or real.layout is not torch.strided or real.is_nested:
                continue
            if len(fake.shape) != len(real.shape) or any(map(_differ, fake.shape, real.shape)):
                return "shape", f"{name} of shape {list(fake.shape)}{_SOURCE}", f"{name} of shape {list(real.shape)}"
            matter = [size > 1 and real.numel() > 0 for size in real.shape]
            strides = [m and _differ(a, b) for m, a, b in zip(matter, fake.stride(), real.stride(), strict=True)]
            if any(strides):
                return "strides", f"{name} with strides {fake.stride()}{_SOURCE}", f"{name} with {real.stride()}"
        return None


_SOURCE = ", as the op's registered fake has"


def _names(dtypes: Sequence[torch.dtype | None]) -> str:
    return ", ".join("none" if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes) or "no tensors"


def _differ(fake: Any, real: int) -> bool:
    """Whether a size or stride differs. One that depends on data, a symbol, equals any."""
    return not isinstance(fake, torch.SymInt) and fake != real


def has_fake(op: torch._ops.OpOverload) -> bool:
    """Whether an op is not PyTorch's own and has a registered fake. Not cached: a library may register one at any time.

    Example:
        >>> has_fake(torch.ops.aten.mm.default)
        False
    """
    if op.namespace in _OF_PYTORCH:
        return False
    name = overload_name(op)
    defined = OPDEFS.get(name)
    if defined is not None:  # torch.library.custom_op registers a fake that raises until the author registers one
        return defined._abstract_fn is not None
    if _registry.find(name).fake_impl.kernel is not None:
        return True
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")) and not bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    )


def results_of_fake(op: torch._ops.OpOverload, values: Mapping[str, Any]) -> FakeResults | None:
    """Runs an op's fake.

    Args:
        op: An op for which `has_fake` is true.
        values: Its arguments by name; an `Operand` stands for a tensor.

    Returns:
        What the fake gives. None: it does not say, because the results depend on data or because fakes do not support
        the arguments.
    """
    tensors = [tensor for name, value in values.items() for _, tensor in tensors_by_path(name, value)]
    if any(is_fake(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return None
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        mode, unknown = _fake_mode()
        try:
            given = {name: _faked(mode, value) for name, value in values.items()}
        except Exception:  # fake tensors do not support every tensor
            return None
        try:
            with mode:
                result = op(**given)
        except unknown:
            return None
        except Exception as error:  # the fake is the user's code
            return FakeResults(
                error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            )
    return FakeResults(tuple(leaves(result if isinstance(result, tuple) else [result])))


def _fake_mode() -> tuple[Any, tuple[type[Exception], ...]]:
    """A mode, and what a fake raises if the results depend on data, or if it does not support the arguments.

    Imported here: symbolic shapes need sympy, which takes a second to import, and most programs have no custom op.
    """
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    unknown = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
        NotImplementedError,
    )
    return fake_tensor.FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True), unknown


def _faked(mode: Any, value: Any) -> Any:
    if isinstance(value, Operand):
        strides = contiguous_strides(value.shape) if value.strides is None else value.strides
        with mode:
            return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value, static_shapes=True)
    if isinstance(value, list | tuple):
        return type(value)(_faked(mode, one) for one in value)
    if isinstance(value, Mapping):
        return {key: _faked(mode, one) for key, one in value.items()}
    return value
