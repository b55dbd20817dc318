"""`install`: turns all regions of torch.autocast in this process into regions of ours.

autocast_methods.py has the code that runs when such a region starts and ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from torch_promote import _C
from torch_promote.extension import DTYPE_NUMBERS, DeviceSpec, RegionSpec
from torch_promote.integrations import compile as _compile
from torch_promote.integrations.compile import while_changing
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.overrides import spell_overrides
from torch_promote.policy.policy import Policy
from torch_promote.regions.arguments import allows_cache, cache_mode, number_of_applied, policy_change, read_policy
from torch_promote.regions.autocast_methods import in_force, lock, put_in_force, stock_autocast

__all__ = ["Installation", "install", "installed", "installed_as", "stock_autocast", "uninstall"]

_PolicyArgument = Policy | str | os.PathLike[str] | None
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Installation:
    """The settings that `install` has put in force.

    Attributes:
        policy: The policy of regions. None: the policy of the surrounding region, or the default if there is none.
        overrides: The cast policies of single ops on top of the policy.
        cache: The cache mode. None: the mode of the surrounding region, or "weights" if there is none.
    """

    __slots__ = ("_change", "_held", "_specs", "cache", "overrides", "policy")

    def __init__(self, policy: _PolicyArgument, overrides: Mapping[Any, Any] | None, cache: str | None) -> None:
        given = dict(overrides) if isinstance(overrides, Mapping) else overrides
        self.policy = read_policy(policy)
        tables = 0 if self.policy is None else number_of_applied(Policy.of(self.policy))
        self._held = policy_change(self.policy, given, tables)
        self._change = self._held.number
        if cache is not None:
            allows_cache(cache, None)
        self.overrides: Mapping[Any, Any] = MappingProxyType(given or {})
        self.cache = cache
        self._specs: dict[Any, str] = {}

    def spec_of(self, region: Any) -> str | None:
        """Returns the packed spec of a torch.autocast object, or None if PyTorch has to handle it (or raise)."""
        enabled, reuses = region._enabled, region._cache_enabled
        # PyTorch rejects 1, although it equals True.
        if not ((enabled is True or enabled is False) and (reuses is True or reuses is False)):
            return None
        try:
            return self._specs[region.device, region.fast_dtype, enabled, reuses]
        except (KeyError, TypeError):  # not computed yet, or not hashable
            return self._make_spec(region.device, region.fast_dtype, enabled, reuses)

    def _make_spec(self, device_type: Any, dtype: Any, enabled: bool, reuses: bool) -> str | None:
        known = isinstance(device_type, str) and device_type in DEVICE_TYPES
        if not known or not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NUMBERS:
            return None
        spec = RegionSpec(
            (DeviceSpec(device_type, dtype, enabled),),
            reuses and self.cache != "none",
            cache_mode(self.cache),
            self._change,
        )
        packed = self._specs[device_type, dtype, enabled, reuses] = spec.pack()
        return packed

    def digest(self) -> str:
        """Returns a digest of the settings of a region entered now. It is the same in every process."""
        owner = object()
        _C.enter_region(owner, RegionSpec(policy_change=self._change).pack())
        try:
            return f"installed {self.cache} {_compile.policy_digest()}"
        finally:
            _C.exit_region(owner)

    @property
    def is_plain(self) -> bool:
        """Whether regions take the policy and the cache mode from their surroundings."""
        return self._change == 0 and self.cache is None

    def acts_as(self, other: Installation) -> bool:
        """Whether regions behave the same under both."""
        return (self._change, self.cache) == (other._change, other.cache)

    @property
    def info(self) -> str:
        """Returns a sentence that describes the installation."""
        parts = [] if self.policy is None else [f"policy {self.policy!r}"]
        parts += [f"{len(self.overrides)} override{'s' * (len(self.overrides) > 1)}"] if self.overrides else []
        parts += [] if self.cache is None else [f"cache {self.cache!r}"]
        asked = ", ".join(parts) if parts else "PyTorch's own policy and the cache mode 'weights' unless set elsewhere"
        return f"Regions of torch.autocast for {' and '.join(DEVICE_TYPES)} are run by torch_promote: {asked}."

    def __repr__(self) -> str:
        parts = [f"policy={self.policy!r}"] if self.policy is not None else []
        parts += [f"overrides={spell_overrides(self.overrides)}"] if self.overrides else []
        parts += [f"cache={self.cache!r}"] if self.cache is not None else []
        return f"<torch_promote.install({', '.join(parts)})>"


def _digest() -> str:
    installation = in_force()
    return "" if installation is None else installation.digest()


_compile.digests.append(_digest)


def _replace(what: str, installation: Installation | None) -> tuple[Installation | None, Installation | None]:
    """Puts an installation in force (None for none). Returns the previous one and the current one."""
    with while_changing(what) as forget_compiled, lock:
        before = in_force()
        if before is not None and installation is not None and installation.acts_as(before):
            installation = before
        if installation is not before:
            forget_compiled()
        put_in_force(installation)
    return before, installation


def _not_in_graphs(function: _Function) -> _Function:
    """Makes Dynamo break the graph at calls of the function, with a reason."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it changes the regions of compiled functions"  # type: ignore[attr-defined]
    return function


@_not_in_graphs
def install(
    *, policy: _PolicyArgument = None, overrides: Mapping[Any, Any] | None = None, cache: str | None = None
) -> Installation:
    """Runs every region of `torch.autocast` for "cpu" and "cuda" that is entered from now on as a region of ours.

    It affects all threads of the process and all code, including PyTorch and frameworks. It does not affect other
    device types, regions that are open now, and functions of `torch.jit.script`. A second call replaces the first.

    Args:
        policy: As for `my_autocast`.
        overrides: As for `my_autocast`.
        cache: As for `my_autocast`. A region with `cache_enabled=False` reuses no casts in any mode.

    Returns:
        The new installation.

    Raises:
        OptionError: The cache mode does not exist. It is a ValueError.
        PolicyError: A policy or op does not exist, a policy is not legal for an op, a policy file is invalid, or the
            policy has module tables and `Policy.apply_to` was not called. It is a ValueError. After either error,
            nothing has changed.

    Example:
        >>> install(overrides={"matmul": "fp32"})
        <torch_promote.install(overrides={'matmul': 'fp32'})>
        >>> with torch.autocast("cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
        >>> uninstall()
        <torch_promote.install(overrides={'matmul': 'fp32'})>
    """
    _, now = _replace("install()", Installation(policy, overrides, cache))
    assert now is not None
    return now


@_not_in_graphs
def uninstall() -> Installation | None:
    """Undoes `install`. Regions that are open keep running as regions of ours until they end.

    Returns:
        The installation that was in force, or None if there was none.

    Example:
        >>> uninstall() is None
        True
    """
    before, _ = _replace("uninstall()", None)
    return before


def installed() -> Installation | None:
    """Returns the installation that is in force, or None.

    Example:
        >>> installed() is None
        True
    """
    return in_force()  # type: ignore[no-any-return]


class _InstalledFor(contextlib.ContextDecorator):
    """The context manager of `installed_as`. It is not a generator: PyTorch 2.15's Dynamo cannot resume at one."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._before: list[Installation | None] = []

    @_not_in_graphs
    def __enter__(self) -> Installation:
        before, now = _replace("installed_as()", self._installation)
        assert now is not None
        self._before.append(before)
        return now

    @_not_in_graphs
    def __exit__(self, *error: object) -> None:
        _replace("installed_as()", self._before.pop())


@_not_in_graphs
def installed_as(
    *, policy: _PolicyArgument = None, overrides: Mapping[Any, Any] | None = None, cache: str | None = None
) -> _InstalledFor:
    """Calls `install` for the duration of a block, and restores the previous installation at its end. For tests.

    Like `install`, it affects the whole process, so blocks in several threads must not overlap.

    Args:
        policy: As for `install`.
        overrides: As for `install`.
        cache: As for `install`.

    Returns:
        A context manager, also usable as a decorator. `as` binds the installation that is in force in the block.

    Raises:
        OptionError, PolicyError: As for `install`.

    Example:
        >>> with installed_as(policy="off") as installation:
        ...     installed() is installation
        True
        >>> installed() is None
        True
    """
    return _InstalledFor(Installation(policy, overrides, cache))
