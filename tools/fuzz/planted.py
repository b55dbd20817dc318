"""Bugs for the tests to plant in ours, and the cache modes in which they show."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torch_promote as tp
from fuzz.calls import Ours
from torch_promote import _C
from torch_promote.integrations import cast_invalidation


class _Planted(Ours):
    """Ours with a bug, which `around` plants while a program runs."""

    modes: tuple[str, ...] = ()
    #: Whether it takes hundreds of programs to find.
    is_rare = False

    def around(self) -> Any:
        return contextlib.nullcontext()


@contextlib.contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _unseen(write: Any, of_weights: bool) -> Any:
    """A write that does not increase versions: those of weights, or those of activations."""

    @functools.wraps(write)
    def written(*args: Any, **kwargs: Any) -> Any:
        tensors = args[0] if isinstance(args[0], list) else [args[0]]
        tensors = [t for t in tensors if isinstance(t, nn.Parameter) is of_weights and not t.is_inference()]
        versions = tuple(tensor._version for tensor in tensors)
        result = write(*args, **kwargs)
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), versions)
        return result

    return written


def _keeps_versions_of_weights(step: Any) -> Any:
    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights = [p for group in self.param_groups for p in group["params"]]
        versions = tuple(weight._version for weight in weights)
        result = step(self, *args, **kwargs)
        torch._C._autograd._unsafe_set_version_counter(tuple(weights), versions)
        return result

    return stepped


class NestedDtypeIgnored(_Planted):
    """A nested region has the dtype of the region around it."""

    modes = ("weights", "persistent", "all", "none", "mixed")

    def __call__(self, **options: Any) -> Any:
        if _C.depth():
            options["dtype"] = torch.get_autocast_dtype(self.device)
        return super().__call__(**options)


class CastsOutliveRegions(_Planted):
    """Casts end with the program."""

    modes = ("weights",)

    def around(self) -> Any:
        return tp.stock_autocast(self.device, enabled=False)


class WritesToWeightsUnseen(_Planted):
    """The cache does not see that an op writes to a weight."""

    modes = ("weights", "persistent", "all")
    is_rare = True
    weights = True

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        unseen = functools.partial(_unseen, of_weights=self.weights)
        with _patched(Tensor, "mul_", unseen), _patched(torch, "_foreach_mul_", unseen):
            yield


class WritesToActivationsUnseen(WritesToWeightsUnseen):
    """The cache does not see that an op writes to an activation."""

    modes = ("all",)
    is_rare = False
    weights = False


class StepsUnseen(_Planted):
    """The cache does not see the steps of optimizers."""

    modes = ("persistent",)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with (
            _patched(cast_invalidation, "_forget_weights", lambda before: lambda optimizer: None),
            _patched(torch.optim.SGD, "step", _keeps_versions_of_weights),
            _patched(torch.optim.AdamW, "step", _keeps_versions_of_weights),
        ):
            yield


class ModeIgnored(_Planted):
    """Casts are kept although the mode is "none"."""

    modes = ("none",)

    def __call__(self, **options: Any) -> Any:
        if options.get("cache") == "none":
            options["cache"] = "weights"
        return super().__call__(**options)


class ExceptionsLeaveRegionsOpen(_Planted):
    """A region that an exception ends stays open."""

    modes = ("weights", "persistent", "all", "none")

    def __call__(self, **options: Any) -> Any:
        region = super().__call__(**options)
        return region if "overrides" in options else _LeftOpen(region)


class _LeftOpen:
    def __init__(self, region: Any) -> None:
        self.region = region

    def __enter__(self) -> None:
        self.region.__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.region.__exit__(None, None, None)

    def __call__(self, function: Any) -> Any:
        return self.region(function)


class FirstCastWithoutGradientIsKept(_Planted):
    """A weight that was first used without a gradient gets none later in the region."""

    modes = ("weights", "all", "persistent")

    def around(self) -> Any:
        seen: dict[int, Tensor] = {}

        def reuse(forward: Any) -> Any:
            @functools.wraps(forward)
            def call(module: nn.Linear, x: Tensor) -> Tensor:
                if not _C.depth():
                    seen.clear()
                elif not torch.is_grad_enabled():
                    seen[id(module.weight)] = module.weight
                weight = module.weight.detach() if id(module.weight) in seen else module.weight
                return nn.functional.linear(x, weight, module.bias)

            return call

        return _patched(nn.Linear, "forward", reuse)


#: The bugs by their names.
BUGS: dict[str, type[_Planted]] = {
    bug.__name__: bug
    for bug in (
        NestedDtypeIgnored,
        CastsOutliveRegions,
        WritesToWeightsUnseen,
        WritesToActivationsUnseen,
        StepsUnseen,
        ModeIgnored,
        ExceptionsLeaveRegionsOpen,
        FirstCastWithoutGradientIsKept,
    )
}
