"""Policies for a whole program: the one that regions start from, and those of ops that join it.

What is set here holds for regions that are entered afterwards, in every thread. Regions that are open keep theirs; a
coroutine's or a generator's are entered anew at each of its steps.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.integrations import compile as _compile
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.overrides import parse_overrides
from torch_promote.policy.policy import Policy
from torch_promote.policy.registered_policies import replace_registered_ops
from torch_promote.regions.arguments import policy_number, register_policy_change

__all__ = [
    "RegisteredPolicy",
    "default_policy",
    "register_policy",
    "registered_policies",
    "set_default_policy",
    "use_environment",
]

#: The environment variable that names a policy, or the file of one.
VARIABLE = "TORCH_PROMOTE_POLICY"

_lock = threading.RLock()
_default: Policy | None = None
_registered: _Registered = {}


def set_default_policy(policy: Policy | str | os.PathLike[str] | None) -> Policy | None:
    """Sets what regions without a `policy` start from, where no region is around them.

    The environment variable TORCH_PROMOTE_POLICY does the same when the package is imported.

    Args:
        policy: A `Policy`, the name of one, or the path of a policy file. None: PyTorch's own.

    Returns:
        What it was before; None for PyTorch's own.

    Raises:
        PolicyError: There is no such policy, or its file is wrong. Nothing has then changed.

    Example:
        >>> from torch_promote import my_autocast
        >>> before = set_default_policy("cuda")
        >>> with my_autocast("cpu"):
        ...     torch.exp(torch.ones(2, dtype=torch.float16)).dtype
        torch.float32
        >>> set_default_policy(before)
        Policy.named('cuda')
    """
    global _default
    chosen = None if policy is None else Policy.of(policy)
    with _lock:
        _put(_registered, chosen)
        before, _default = _default, chosen
    return before


def default_policy() -> Policy | None:
    """Returns what `set_default_policy` was given last; None for PyTorch's own policy.

    Example:
        >>> default_policy()
    """
    return _default


class RegisteredPolicy:
    """What `register_policy` returns, by which the policy can be taken off again. Also a context manager that does so.

    Attributes:
        overloads: Full names of the overloads that have the policy.
        devices: The device types on which they have it.
        policy: The policy. Where stock's autocast has it anyway, nothing is registered.
    """

    def __init__(self, overloads: Iterable[str], devices: Iterable[str], policy: CastPolicy | torch.dtype) -> None:
        self.overloads = tuple(overloads)
        self.devices = tuple(devices)
        self.policy = policy

    def remove(self) -> None:
        """Takes the policy off each overload that has been given no other one since. Once is enough."""
        with _lock:
            kept = {place: given for place, given in _registered.items() if given[1] is not self}
            if len(kept) < len(_registered):
                _put(kept, _default)
                _replace_registered(kept)

    def __enter__(self) -> RegisteredPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        policy = self.policy.value if isinstance(self.policy, CastPolicy) else str(self.policy)
        return f"<{policy} for {', '.join(self.overloads)} on {', '.join(self.devices)}>"


def register_policy(
    op: object, policy: CastPolicy | str | torch.dtype, *, device_types: str | Sequence[str] | None = None
) -> RegisteredPolicy:
    """Gives an op, a custom one above all, a policy in every region: it joins what regions start from.

    `torch.library.register_autocast` can cast to one dtype that is fixed when it is called, and once. This takes any
    cast policy, follows the region's dtype, and can be changed and removed. What a region's own `overrides` say about
    the op goes before it, and so does its `policy`, where that is not stock's for the op. What
    `torch.library.register_autocast` has registered for the same op works on wherever this has no say.

    Args:
        op: The op, named as in `my_autocast(overrides=...)`.
        policy: The cast policy, or a floating dtype to run in. It takes the place of one that was registered before.
        device_types: "cpu", "cuda" or a sequence of these. None: both.

    Returns:
        A handle, whose `remove()` takes the policy off again.

    Raises:
        PolicyError: The op or the policy does not exist, the policy is not legal for the op, or it is what stock
            autocast does with the op anyway. Nothing has then changed.
        DeviceTypeError, UnsupportedDeviceError: A device type that has no autocast here.

    Example:
        >>> from torch_promote import my_autocast
        >>> @torch.library.custom_op("mylib::scaled", mutates_args=())
        ... def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        ...     return x * factor
        >>> handle = register_policy("mylib::scaled", "fp16")
        >>> with my_autocast("cpu"):
        ...     scaled(torch.ones(2), 3.0).dtype
        torch.bfloat16
        >>> handle.remove()
    """
    given = Policy.stock().override({op: policy}, device_types)
    devices = (
        DEVICE_TYPES if device_types is None else [device_types] if isinstance(device_types, str) else device_types
    )
    parsed = parse_overrides({op: policy})
    named = {(name, device) for name, _ in parsed for device in devices}
    with _lock:
        kept = {place: known for place, known in _registered.items() if place not in named}
        if not given.changes and len(kept) == len(_registered):
            raise PolicyError(f"{op!r} with policy {policy!r}: this is what PyTorch's autocast does. Leave it out.")
        handle = RegisteredPolicy([name for name, _ in parsed], devices, parsed[0][1])
        wanted = {**kept, **{(name, device): (value, handle) for name, device, value in given.changes}}
        _put(wanted, _default)
        _replace_registered(wanted)
    return handle


def registered_policies() -> Mapping[tuple[str, str], CastPolicy | torch.dtype]:
    """Returns what `register_policy` has given: policies by the overload's full name and the device type.

    Example:
        >>> with register_policy("relu", "fp32", device_types="cpu"):
        ...     registered_policies()
        {('aten::relu', 'cpu'): <CastPolicy.fp32: 'fp32'>}
    """
    with _lock:
        return {place: value for place, (value, _) in _registered.items()}


def use_environment() -> None:
    """Sets the default policy that the environment asks for, if it does.

    Raises:
        PolicyError: There is no such policy, or its file is wrong.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    try:
        set_default_policy(asked)
    except PolicyError as error:
        raise PolicyError(f"the environment variable {VARIABLE} is {asked!r}: {error}") from error


_Registered = dict[tuple[str, str], tuple[CastPolicy | torch.dtype, RegisteredPolicy]]


def _put(registered: _Registered, default: Policy | None) -> None:
    """Puts both in force. Where that fails, nothing has changed."""
    changes = [(*place, value) for place, (value, _) in sorted(registered.items(), key=lambda item: item[0])]
    number = register_policy_change(changes)
    _C.set_defaults(number, 0 if default is None else policy_number(default, None))
    # A graph that opens a region outside of all regions was traced under the default, and has no guard on it.
    if _compile.graphs_open_regions():
        sys.modules["torch._dynamo"].reset()


def _replace_registered(registered: _Registered) -> None:
    global _registered
    _registered = registered
    replace_registered_ops(registered)
