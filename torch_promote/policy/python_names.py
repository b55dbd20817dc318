"""The ops that functions of PyTorch call: `torch.mm`, `F.cross_entropy`, `torch.Tensor.softmax`, also as text.

Most functions that C++ implements are ops of the same name. A function in Python may call another op (`F.cross_entropy`
calls `aten::cross_entropy_loss`), one of several, or several: torch_promote/policy/python_functions.py.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from torch_promote.errors import PolicyError
from torch_promote.policy.python_functions import called_ops

__all__ = ["HOW_TO_NAME", "calls_of_function", "is_python_name", "op_of_function", "op_of_python_name"]

#: How people write the places in which PyTorch has functions and methods.
_ROOTS: dict[str, object] = {"torch": torch, "F": functional, "nn": nn, "Tensor": torch.Tensor}

#: How ops are named: the end of errors.
HOW_TO_NAME = (
    "Ops are named as in torch.ops or in Python: 'softmax', 'aten::softmax.int', 'mylib::op', 'F.softmax', torch.mm."
)

#: The types of functions and methods that C++ implements.
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
#: Their places in torch._C, besides those of torch and Tensor.
_NAMES_OF_PLACES = ("_nn", "_linalg", "_special", "_fft", "_sparse", "_nested")
#: Where these are. The functions of torch.linalg, torch.special and torch.fft have their place in the name of the op.
_PLACES: dict[str, Any] = {
    "torch": torch._C._VariableFunctions,
    "Tensor": torch.Tensor,
    **{f"torch._C.{name}": getattr(torch._C, name, None) for name in _NAMES_OF_PLACES},
}

#: The modules that define functions in Python, and where people find these functions.
_MODULES = {"torch.functional": "torch", "torch.nn.functional": "F", "torch._tensor": "Tensor"}


def op_of_function(function: object, shown: str = "") -> str:
    """Returns the op that a function or method of PyTorch calls, with its namespace.

    Args:
        function: The function or method.
        shown: What the user wrote, if not the function itself.

    Raises:
        PolicyError: It is a module, no function of PyTorch, or one that calls no op, or several.

    Example:
        >>> op_of_function(torch.mm), op_of_function(torch.Tensor.softmax), op_of_function(functional.cross_entropy)
        ('aten::mm', 'aten::softmax', 'aten::cross_entropy_loss')
    """
    if isinstance(function, nn.Module) or _is_module(function):
        raise _module_error(function)
    path = _path_of(function)
    if path is None:
        got = repr(shown or function)
        raise PolicyError(
            f"expected the name of an op, an op object or a function of PyTorch, got {got}. {HOW_TO_NAME}"
        )
    calls = called_ops().get(path, (path.rpartition(".")[2],))
    if len(calls) > 1:
        raise PolicyError(
            f"{shown or path} is not an op. It calls several, or one of several, such as {', '.join(calls)}. Name the "
            f"ops that you mean."
        )
    if not calls or not _is_op(calls[0]):
        raise PolicyError(
            f"{shown or path} is not an op, and this package does not know which ops it calls. Name those "
            f"ops; torch_promote.trace shows them. {HOW_TO_NAME}"
        )
    return f"aten::{calls[0]}"


def calls_of_function(name: str) -> str | None:
    """Returns a sentence about a function or module of PyTorch that has the name of no op; None: there is none.

    Example:
        >>> calls_of_function("cross_entropy")
        "F.cross_entropy calls the op 'cross_entropy_loss'. Use that name."
    """
    for root in ("F", "torch", "nn"):
        found = getattr(_ROOTS[root], name, None)
        try:
            if isinstance(found, types.FunctionType | type) and (_path_of(found) in called_ops() or _is_module(found)):
                op = op_of_function(found).removeprefix("aten::")
                return f"{root}.{name} calls the op {op!r}. Use that name."
        except PolicyError as error:
            return f"{error}"
    return None


def _is_op(name: str) -> bool:
    """Whether PyTorch's dispatcher has an op. TorchScript has others, such as aten::tensor."""
    op = getattr(torch.ops.aten, name, None)
    overloads = op.overloads() if isinstance(op, torch._ops.OpOverloadPacket) else []
    names = (f"aten::{name}" + ("" if one == "default" else f".{one}") for one in overloads)
    return any(map(torch._C._dispatch_has_kernel, names))


def _is_module(found: object) -> TypeGuard[type[nn.Module]]:
    return isinstance(found, type) and issubclass(found, nn.Module)


def _path_of(function: object) -> str | None:
    """Where people find a function of PyTorch, such as "torch.mm"; None: it is not one."""
    name = getattr(function, "__name__", "")
    if isinstance(function, _BUILTIN):
        places = (where for where, place in _PLACES.items() if getattr(place, name, None) == function)
        where = next(places, None)
    else:
        where = _MODULES.get(function.__module__) if isinstance(function, types.FunctionType) else None
    return where and f"{where}.{name}"


def is_python_name(name: str) -> bool:
    """Whether a name starts as those of PyTorch's functions and modules do.

    Example:
        >>> [is_python_name(name) for name in ("F.softmax", "torch.ops.aten.mm", "softmax.int")]
        [True, True, False]
    """
    return name.partition(".")[0] in _ROOTS and "." in name


def op_of_python_name(name: str) -> str | None:
    """Returns the op that a name in Python stands for, as `op_of_function`. None: nothing has the name.

    Args:
        name: A name for which `is_python_name` is true. One that starts with "torch.ops." is only rewritten.

    Raises:
        PolicyError: The name is that of a module, or of a function that calls no op, or several.

    Example:
        >>> op_of_python_name("F.cross_entropy"), op_of_python_name("torch.ops.aten.softmax.int")
        ('aten::cross_entropy_loss', 'aten::softmax.int')
        >>> op_of_python_name("torch.sofmax")
    """
    if name.startswith("torch.ops."):
        return name.removeprefix("torch.ops.").replace(".", "::", 1)
    root, *parts = name.split(".")
    found: Any = _ROOTS[root]
    for part in parts:
        found = getattr(found, part, None)
    return op_of_function(found, name) if callable(found) else None


def _module_error(module: nn.Module | type[nn.Module]) -> PolicyError:
    """Returns the error for a module in the place of an op, with the line that gives the module a policy."""
    kind = module if isinstance(module, type) else type(module)
    spelled = f"nn.{kind.__name__}" if getattr(nn, kind.__name__, None) is kind else kind.__name__
    op = _op_of_module(kind)
    remedy = f" Or name the op, wherever it is called: {op!r}." if op else ""
    return PolicyError(
        f"{spelled} is a module, and overrides are for ops. For the modules of a model, write: "
        f'torch_promote.set_module_policy(model, {{{spelled}: "fp32"}}).{remedy}'
    )


def _op_of_module(kind: type[nn.Module]) -> str | None:
    """The op that a module of PyTorch is made of, by the function of the same letters."""
    for name in dir(functional) if kind.__module__.startswith("torch.nn.") else ():
        if name.replace("_", "") == kind.__name__.lower():
            with contextlib.suppress(PolicyError):  # of F._max_pool2d, say, which comes before F.max_pool2d
                return op_of_function(getattr(functional, name)).removeprefix("aten::")
    return None
