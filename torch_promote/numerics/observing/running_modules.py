"""Finds the module that runs in a thread, by its path in the model.

NOTE [ The frames say which module runs ]
A module runs if a frame of `nn.Module._call_impl` is on the stack. PyTorch's global module hooks would show it as well,
but they change the program: torch.compile warns about them and recompiles modules, and modules check for them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn

from torch_promote.errors import OptionError

__all__ = ["MODULE_CALL", "RunningModules"]

#: The code object of frames that run a module.
MODULE_CALL: CodeType = nn.Module._call_impl.__code__


class RunningModules:
    """The paths of the modules that run.

    Args:
        model: The module that paths start from. None: the first module that is called outside of other modules. Modules
            of other models are named after their class.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise OptionError(f"model must be an nn.Module or None, got {model!r}.")
        self._given = model is not None
        self._model_reference = None if model is None else weakref.ref(model)
        self._names: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of other models, if one was given
        self._was_called = False
        self._owners: dict[int, tuple[weakref.ref[Any], str | None]] = {}
        if model is not None:
            self._name(model, "")

    @property
    def missed(self) -> bool:
        """Whether a model was given, and none of its modules has run."""
        return self._given and not self._was_called

    @property
    def _model(self) -> nn.Module | None:
        return None if self._model_reference is None else self._model_reference()

    @property
    def path(self) -> str:
        """The path of the innermost module of this thread; "" if none runs."""
        return self.path_at(sys._getframe(1))

    def path_at(self, frame: FrameType | None) -> str:
        """The path of the innermost module that runs in a frame or around it; "" if none does."""
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                return self._path(frame)
            frame = frame.f_back
        return ""

    @property
    def innermost(self) -> tuple[nn.Module | None, str]:
        """The innermost module of this thread, and its path; None if none runs."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        return (None, "") if frame is None else (frame.f_locals["self"], self._path(frame))

    def named(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules of the model, each with its first path."""
        model = self._model
        return iter(()) if model is None else ((module, path) for path, module in model.named_modules())

    def path_of_parameter(self, parameter: Any) -> str | None:
        """The path of the module that has a parameter; None if it does not belong to the model."""
        model = self._model
        known = self._owners.get(id(parameter))
        if known is None or known[0]() is not parameter:
            # Keep parameters of other models: otherwise each lookup of one would search the whole model.
            others = {key: one for key, one in self._owners.items() if one[1] is None and one[0]() is not None}
            self._owners = others | {
                id(one): (weakref.ref(one), path)
                for path, module in reversed(list(model.named_modules() if model is not None else ()))
                for one in module._parameters.values()
                if one is not None
            }
            known = self._owners.setdefault(id(parameter), (weakref.ref(parameter), None))
        return known[1]

    def _path(self, frame: FrameType) -> str:
        module: nn.Module = frame.f_locals["self"]
        names = self._names.get(module)
        if names is None:
            names = self._look_for(module, frame)
        if not self._was_called and module not in self._others:
            self._was_called = True
        if len(names) > 1:  # a shared module: use the path below the module that calls it
            parent = self.path_at(frame.f_back)
            return next((name for name in names if parent and name.startswith(f"{parent}.")), names[0])
        return names[0]

    def _look_for(self, module: nn.Module, frame: FrameType) -> tuple[str, ...]:
        outer = frame.f_back
        if self._model_reference is None:
            self._model_reference = weakref.ref(_outermost(frame))
        model = self._model
        if model is not None:
            self._name(model, "")  # the model may have received new modules
        if module not in self._names:
            parent = self.path_at(outer)
            if self._given:
                self._names[module] = (parent,)
                self._others.add(module)
            elif module not in self._names:  # its parent, which was named just now, has named it
                self._name(module, f"{parent}.{type(module).__name__}" if parent else type(module).__name__)
        return self._names[module]

    def _name(self, root: nn.Module, prefix: str) -> None:
        found: dict[nn.Module, list[str]] = {}
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            found.setdefault(module, []).append(path)
        for module, names in found.items():
            self._names[module] = tuple(names)


def _outermost(frame: FrameType | None) -> nn.Module:
    found: nn.Module | None = None
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            found = frame.f_locals["self"]
        frame = frame.f_back
    assert found is not None
    return found
