"""The functions that an expression of `why` may call, by the names that people write."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from typing import Any

import torch

from torch_promote.reference import ExpressionError, Operand

__all__ = ["find_function"]

_F = torch.nn.functional
#: How a dotted name may start. A name without a dot is looked up in `_PLACES`; functions of torch.nn.functional have
#: defaults that those of torch with the same name lack.
_ROOTS: dict[str, Any] = {
    "torch": torch,
    "F": _F,
    "nn": torch.nn,
    "aten": torch.ops.aten,
    "ops": torch.ops,
    "Tensor": torch.Tensor,
    **{name: getattr(torch, name) for name in ("special", "linalg", "fft")},
}
_PLACES: tuple[Any, ...] = (_F, torch, torch.special, torch.linalg, torch.Tensor)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
#: The modules whose functions in Python take and return tensors.
_MODULES = ("torch.functional", "torch.nn.functional", "torch._jit_internal", "torch._tensor", "torch._linalg_utils")


def find_function(name: str, args: Sequence[Any]) -> Any:
    """Returns the function that a name stands for.

    Args:
        name: `softmax`, `torch.softmax`, `F.softmax`, `torch.nn.functional.softmax`, `torch.ops.aten.mm` or
            `linalg.norm`. A method starts with a dot: `.softmax`.
        args: The positional arguments, to tell a method's receiver from a wrong one.

    Raises:
        ExpressionError: There is no such function.

    Example:
        >>> find_function("F.softmax", ()) is torch.nn.functional.softmax
        True
        >>> find_function("cat", ()) is torch.cat, find_function("dropout", ()) is torch.nn.functional.dropout
        (True, True)
    """
    if name.startswith("."):
        found = getattr(torch.Tensor, name[1:], None)
        if args and isinstance(args[0], Operand) and _is_allowed(found, name):
            return found
        raise ExpressionError(f"tensors have no method {name[1:]!r}.{_closest(name[1:], _names(torch.Tensor))}")
    first, *rest = name.split(".")
    if not rest:
        for place in _PLACES:
            found = getattr(place, name, None)
            if _is_allowed(found, name):
                return found
        close = _closest(name, sorted({known for place in _PLACES for known in _names(place)}))
        raise ExpressionError(
            f"no function of PyTorch is called {name!r}.{close} Functions are those of torch, torch.nn.functional, "
            "torch.linalg, torch.special, torch.fft and torch.ops, and methods of tensors."
        )
    found, last = _ROOTS.get(first), first
    place = found
    for last in rest:
        place, found = found, _attribute(found, last)
    if not _is_allowed(found, last):
        close = _closest(last, _names(place)) if place is not None else ""
        raise ExpressionError(f"no function of PyTorch is called {name!r}.{close}")
    return found


def _attribute(place: Any, name: str) -> Any:
    try:
        return getattr(place, name, None)
    except RuntimeError:  # torch.classes names a class that is not registered in an error of its own
        return None


def _is_allowed(found: Any, name: str) -> bool:
    """Whether something is a function on tensors. `torch.load` and the like are not."""
    if found is None or name.rpartition(".")[2].startswith("_") or isinstance(found, type):
        return False
    return isinstance(found, (*_BUILTIN, *_OPS)) or getattr(found, "__module__", None) in _MODULES


def _closest(name: str, known: Sequence[str]) -> str:
    """A hint with names that differ by a slip of the pen; "" if there are none."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.8)
    return f" Closest: {', '.join(close)}." if close else ""


def _names(place: Any) -> list[str]:
    return [name for name in dir(place) if not name.startswith("_") and _is_allowed(getattr(place, name, None), name)]
